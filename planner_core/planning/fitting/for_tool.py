"""The best plan that a tool can be told, and what that costs beside the best of all plans."""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import InputError, NoPlanFits, Plan
from planner_core.planning.fitting.micro_batches import Choose, GraphSource, settle
from planner_core.planning.methods import EXACT, FREE, check_tool
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import Planner

SWITCHES = ("none", "full")
"""A tool recomputes all blocks or none: its settings know no copies."""


def for_tool(request: Request, graph: GraphSource, choose: Choose, say: Progress) -> tuple[Planner, Plan, str]:
    """The planner and the best plan among those that the request's tool can be told, and a sentence about its price.

    Raises InputError for an unknown tool or another method, and NoPlanFits if the user gave a budget that none of them fits.
    """
    check_tool(request.tool)
    if (request.method, request.objective) != (EXACT.name, "time"):
        raise InputError(
            f"--for {request.tool} bounds the exact search for step time; leave --method and --objective out"
        )
    free = settle(replace(request, tool=None, zero=None), graph, choose, say)[1]  # tools differ in their ZeRO stages
    found: list[tuple[Planner, Plan]] = []
    refused: NoPlanFits | None = None
    for recompute in SWITCHES if request.recompute == "auto" else (request.recompute,):
        try:
            found.append(settle(replace(request, recompute=recompute), graph, choose, say))
        except NoPlanFits as error:
            refused = error
    if not found:
        raise NoPlanFits(f"for {request.tool}: {refused}", refused.needed_bytes if refused else 0)
    planner, plan = min(found, key=lambda f: (not f[1].fits, f[1].cost.step_time_s if f[1].fits else _peak(f[1])))
    plan = replace(plan, notes=(*plan.notes, f"the best that {request.tool} can be told"))
    return planner, plan, _price(request, plan, free)


def _peak(plan: Plan) -> float:
    return plan.cost.memory_bytes["peak"]


def _price(request: Request, plan: Plan, free: Plan) -> str:
    if not (plan.fits and free.fits):
        return f"for {request.tool}: " + ("no plan fits" if not plan.fits else "the plan fits")
    more = plan.cost.step_time_s / free.cost.step_time_s - 1
    beside = "as fast as" if abs(more) < 0.0005 else f"{100 * more:.1f} % slower than"
    return (
        f"for {request.tool}: {1e3 * plan.cost.step_time_s:.4g} ms a step, {beside} the best of all plans "
        f"({1e3 * free.cost.step_time_s:.4g} ms, which the {FREE} script runs)"
    )
