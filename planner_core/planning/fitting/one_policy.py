"""A plan in which all blocks are recomputed alike, where a search that may choose for each block proved nothing.

A choice that is left open never makes the optimum worse. But a search within a budget that ends with a gap may miss a plan that the
search of a smaller space finds. So where the gap stays open, the plans of each way of recomputation are looked at too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner_core.core import RECOMPUTE, DeviceMesh, Plan, PlannerError
from planner_core.planning.fitting.micro_batches import Choose
from planner_core.planning.methods import Method
from planner_core.planning.request import Progress
from planner_core.planning.session import Planner, with_recompute
from planner_core.search import Answer


def no_worse_than_one_policy(
    planner: Planner, plan: Plan, answer: Answer, options: Sequence[DeviceMesh], method: Method, choose: Choose, say: Progress
) -> Plan:  # fmt: skip
    """The best of `plan`, which `answer` found among all ways of recomputation, and of the plans with one way for all blocks."""
    if planner.workload.recompute != "auto" or not plan.fits or plan.optimal:
        return plan
    for policy in (p for p in RECOMPUTE if p != "auto"):
        try:
            other = choose(
                with_recompute(planner, policy), options, say, method, below=planner.value(plan), prove=False
            )
        except PlannerError:
            continue
        if other.fits and planner.value(other) < planner.value(plan):
            gap = replace(answer, value=planner.value(other)).gap_told
            plan = replace(other, optimal=False, notes=(gap,))
    return plan
