"""Plans of less memory than an answer has: its trade-offs with recomputation, searched when somebody asks for them."""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import STAGED_ROLES, Plan, PlanRole
from planner_core.planning.fitting.front import (
    FRONT_STEP,
    TRADE_OFF,
    leave_out_beaten,
    unseen_corners,
    with_open_recomputation,
)
from planner_core.planning.fitting.micro_batch_size import keep_micro_batch_size
from planner_core.planning.planner import candidate_meshes
from planner_core.planning.request import Progress
from planner_core.planning.result import Result

LESS_MEMORY = "less memory"
"""The pass in `Result.reasons`."""
WITH_RECOMPUTATION = f"{TRADE_OFF} with recomputation"
"""How the names of these plans begin."""


def add_less_memory(result: Result, progress: Progress | None = None) -> Result:
    """Return the result with corners of the front of time and memory that recompute, each of less memory than all plans before it.

    An answer that fits without recomputation is searched without it, and so are its trade-offs: half of the networks. Example: those of
    Llama-3-8B on 16 H100 take 35.8 GiB and more, and these 22.8 and 12.3. `progress` is called once, and may raise to stop. Only the
    reason is new where recomputation is not open, where it was searched already, or where no plan fits.
    """
    if LESS_MEMORY in result.reasons:
        return result
    planner = with_open_recomputation(result.planner, result.asked)
    if planner is result.planner or not result.searched.fits:
        return _say_why(result, "recomputation is not left open, was searched already, or does not make a plan fit")
    if progress:
        progress("plans of less memory")
    planner = planner.separate()
    staged = [plan for plan in result.plans if plan.role in STAGED_ROLES]
    shown = [plan for plan in result.plans if plan not in staged]
    corners = unseen_corners(planner, candidate_meshes(planner.request, planner.cluster), shown)
    corners = [plan for plan in keep_micro_batch_size(planner.request, corners) if plan.fits]
    trade_offs: list[Plan] = []
    least_bytes = min(plan.cost.memory_bytes["peak"] for plan in shown if plan.fits)
    for plan in leave_out_beaten(corners, corners):
        peak = plan.cost.memory_bytes["peak"]
        if peak < least_bytes * (1 - FRONT_STEP):
            least_bytes = peak
            trade_offs.append(
                replace(plan, name=f"{WITH_RECOMPUTATION} {len(trade_offs) + 1}", role=PlanRole.TRADE_OFF)
            )
    # Numbered without them: the page searches these plans before stages, the command line behind them.
    added = leave_out_beaten(trade_offs, staged)
    # Beside the other trade-offs, before the baselines.
    end = 1 + max((k for k, plan in enumerate(shown) if plan.role in (PlanRole.TRADE_OFF, PlanRole.FASTEST)), default=0)
    plans = (*shown[:end], *added, *shown[end:], *staged)
    return _say_why(replace(result, plans=plans), f"{len(added)} corners of less memory than all other plans")


def _say_why(result: Result, reason: str) -> Result:
    return replace(result, reasons={**result.reasons, LESS_MEMORY: reason})
