"""From a model and a cluster to plans: the parts of planning in order. Every value between two parts is kept.

    graph -> coarsen -> strategies -> for each mesh: network -> search -> plan
                                   -> candidates of each block, baselines, other methods

This is the one place that knows the order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import Cluster, DeviceMesh, Graph, NoPlanFits, Plan, Workload, axis_names, slow_numbers
from planner_core.cost import Component
from planner_core.ops import CoarseGraph
from planner_core.planning.fitting.baselines import baselines, without
from planner_core.planning.fitting.for_tool import for_tool
from planner_core.planning.fitting.front import trade_offs
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.fitting.micro_batch_size import of_size, only_size
from planner_core.planning.fitting.micro_batches import choose_micro_batches
from planner_core.planning.fitting.shortage import same_work, uncounted
from planner_core.planning.fitting.simpler import fastest_alone, simpler
from planner_core.planning.fitting.three_axes import fewer_gpus, with_third_axis
from planner_core.planning.methods import FREE, METHODS, DataAxis, Method, spaces
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import Planner, meshes, prepare, replace_request
from planner_core.search import (
    OBJECTIVES,
    block_totals,
    objective_of,
    solve,
)
from planner_core.search.candidates import Candidates, score


@dataclass(frozen=True, slots=True)
class Result:
    """All that a report or a page shows. `plans`: the chosen plan, then the fastest if a simpler one was chosen, then the corners of
    the front, then the baselines."""

    request: Request
    graph: Graph
    coarse: CoarseGraph
    cluster: Cluster
    workload: Workload
    candidates: tuple[Candidates, ...]
    dropped: Mapping[str, int]
    unknown_ops: tuple[str, ...]  # call sites of operators without a rule, as "block:site"
    plans: tuple[Plan, ...]
    timings_s: Mapping[str, float]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Plan:
        """The chosen plan."""
        return self.plans[0]

    @property
    def fastest(self) -> Plan:
        """The plan that the search found: the chosen one, unless a simpler one was chosen that ties with it."""
        return fastest_alone(self.plans)[0]


def plan_model(request: Request, graph: GraphSource = None, progress: Progress | None = None) -> Result:
    """Run every part of planning: load or capture, coarsen, strategies, network and search of each mesh, candidates, baselines.

    Raises PlannerError (see `core.errors`) for all that a user can get wrong, and NoPlanFits if no plan fits the memory budget
    that the user gave.
    """
    say = progress or (lambda text: None)
    start = time.perf_counter()
    asked = request.recompute
    told: Sequence[str] = ()
    if request.micro_batch is not None:
        planner, chosen = of_size(request, graph, say)
    elif request.tool in (None, FREE):
        planner, chosen = choose_micro_batches(request, graph, say)
        chosen = with_third_axis(planner, chosen, say)
    else:
        planner, chosen, *told = for_tool(request, graph, say)
    request = planner.request
    say("baselines")
    every = meshes(replace(request, tool=None), planner.cluster)
    usual = [*planner.stated(), *baselines(planner, every, recompute=asked)]
    others = only_size(request, usual)
    chosen = chosen if told else no_worse(chosen, others)
    first = simpler(planner, chosen, others, say)
    say("trade-offs")
    front = only_size(request, trade_offs(planner, meshes(request, planner.cluster), first))
    say("candidates")
    scored = block_candidates(planner, chosen)
    slow = slow_numbers(planner.cluster.gpu, planner.workload.dtype)
    assumed = (*planner.workload.assumptions, *planner.graph.assumptions)
    own = same_work(chosen) if chosen.fits else chosen.notes
    own = (*own, *fewer_gpus(planner, chosen, say))
    notes = (*told, *own, *uncounted(chosen, planner.graph), *slow, *assumed, *without(planner, usual))
    timings = {**planner.clock.seconds, "total": time.perf_counter() - start}
    return Result(
        request=request, graph=planner.graph, coarse=planner.coarse, cluster=planner.cluster, workload=planner.workload,
        candidates=tuple(scored), dropped=_dropped(scored, planner.budget), unknown_ops=_unknown(planner), plans=(*first, *front, *others),
        timings_s=timings, notes=notes,
    )  # fmt: skip


def no_worse(chosen: Plan, others: Iterable[Plan]) -> Plan:
    """The chosen plan; or a baseline that fits and is better, if the search proved nothing and missed it."""

    def value(plan: Plan) -> float:
        return plan.cost.seconds(chosen.objective)

    if chosen.optimal or chosen.method != "exact" or not chosen.fits:
        return chosen
    better = min((p for p in others if p.fits), key=value, default=chosen)
    if value(better) >= value(chosen):
        return chosen
    told = f"laid out as {better.name}, which is better than what the search found"
    return replace(
        better, name=chosen.name, method=chosen.method, objective=chosen.objective, optimal=False, bound=chosen.bound,
        notes=(told, *chosen.notes),
    )  # fmt: skip


def block_candidates(planner: Planner, chosen: Plan) -> list[Candidates]:
    """The candidates of every repeated block on the tensor axis, which is the last axis of the chosen mesh, or all GPUs of a node.
    The other GPUs shard the batch."""
    n, size = planner.cluster.num_gpus, planner.cluster.levels[0].size
    if len(chosen.mesh.axis_sizes) > 1:
        size = chosen.mesh.axis_sizes[-1]
    mesh = DeviceMesh(axis_names(2), (n // size, size)) if size < n else DeviceMesh(axis_names(1), (n,))
    restrict = DataAxis(planner.graph) if size < n else None
    problem = planner.problem(mesh, restrict, zero=0)
    whole = solve(problem, objective_of(problem, "communication"))
    found = []
    for name, repeats in planner.graph.num_repeats.items():
        one = score(planner.coarse.blocks[name], planner.strategies[name], problem.model, repeats, restrict)
        if one is not None and whole is not None:
            rest = whole.totals - block_totals(problem, whole, name)
            one = replace(
                one,
                rest_comm_s=float(rest[Component.COMMUNICATION]),
                rest_memory_bytes=float(rest[Component.AFTER_FORWARD]),
            )
        if one is not None:
            found.append(one)
    return found


def _dropped(found: Iterable[Candidates], budget: float) -> dict[str, int]:
    """Number of candidates that were dropped, by reason: they do not shard evenly, the model does not fit, or they are dominated."""
    counts = {"uneven": 0, "memory": 0, "dominated": 0}
    for c in found:
        runs = np.isfinite(c.comm_s)
        fits = c.model_memory_bytes <= budget
        beaten = c.possible - c.scored  # these were never formed (see `generate`)
        counts["uneven"] += c.space - c.possible
        counts["memory"] += int((runs & ~fits).sum())
        counts["dominated"] += int((runs & fits & ~c.on_front).sum()) + beaten
    return counts


def _unknown(planner: Planner) -> tuple[str, ...]:
    """The call sites of operators without a rule, as "block:site"."""
    return tuple(f"{block}:{site}" if block else site for block, s in planner.strategies.items() for site in s.unknown)


def compare_methods(request: Request, progress: Progress | None = None, graph: Graph | None = None) -> Result:
    """Plan by every method and baseline. The object of `compare --json` has the form of that of `plan --json`."""
    result = plan_model(request, graph, progress)
    result = replace(result, plans=fastest_alone(result.plans))
    say = progress or (lambda text: None)
    planner = prepare(replace(result.request, tool=None), result.graph)  # the others may choose any plan of theirs
    found: dict[tuple[str, str], Plan] = {}
    asked = None if spaces(request.tool, result.cluster) else (request.method, planner.objective())
    for method in METHODS.values():
        for objective in (method.objective,) if method.objective else OBJECTIVES:
            if (method.name, objective) == asked:
                found[method.name, objective] = result.best
                continue
            say(f"{method.name}, least {objective}")
            one = replace_request(planner, method=method.name, objective=objective, memory_gb=None)
            with contextlib.suppress(NoPlanFits):
                found[method.name, objective] = choose_mesh(one, meshes(planner.request, planner.cluster))
    extra = [_beside(METHODS[name], plan, found) for (name, _), plan in found.items() if plan is not result.best]
    return replace(result, plans=(*result.plans, *extra))


def _beside(method: Method, plan: Plan, found: Mapping[tuple[str, str], Plan]) -> Plan:
    """A method's plan for the comparison: it has the method's name, and a note about what its restrictions cost."""
    if method.objective is None:
        return replace(plan, name=f"least {plan.objective}")
    told = (f"{method.title}: {method.words}", _restriction_cost(plan, found), *plan.notes)
    return replace(plan, name=method.title, notes=told)


def _restriction_cost(plan: Plan, found: Mapping[tuple[str, str], Plan]) -> str:
    """A note: the cost of a method's restrictions, compared with the exact search, in step time and in communication."""
    parts = []
    for objective, what in (("time", "the step"), ("communication", "communication")):
        best = found.get(("exact", objective))
        if best is None:
            continue
        mine, least = (p.cost.seconds(objective) for p in (plan, best))
        parts.append(f"{what} takes {1e3 * mine:.3g} ms, with the exact search {1e3 * least:.3g} ms")
    return "; ".join(parts)
