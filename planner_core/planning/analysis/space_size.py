"""The size of the space that a method searches: how many plans an enumeration of it would have to price."""

from __future__ import annotations

import math
from collections.abc import Mapping

from planner_core.planning.analysis.unfolded_network import outer_names
from planner_core.planning.methods import ALL
from planner_core.planning.planner import prepare_planner
from planner_core.planning.result import Result
from planner_core.search.network import Problem


def count_spaces(result: Result) -> Mapping[str, float]:
    """log10 of the size of the space of each method and baseline that has a plan of one stage in the result, on the mesh of its plan and
    with its micro-batches, by the method's name."""
    planner = prepare_planner(result.request, result.graph)
    sizes_by_method: dict[str, float] = {}
    for plan in result.plans:
        # A plan with stages is no member of its method's space: its mesh is that of one rank.
        if plan.pipeline is None and plan.method in ALL and plan.method not in sizes_by_method:
            sizes = [log10_size(build()) for build in planner.builders(ALL[plan.method], plan.mesh)]
            # log10 of a sum of powers. The largest is taken out, since 10 ** 400 is no float.
            sizes_by_method[plan.method] = max(sizes) + math.log10(sum(10 ** (size - max(sizes)) for size in sizes))
    return sizes_by_method


def log10_size(problem: Problem) -> float:
    """log10 of the number of assignments of states to the variables of the unfolded network.

    Variables are the strategy of each group of operators, the placement of each tensor and each weight, and what each copy of a block
    recomputes. States that no plan of the method has are not counted; of two states that exclude each other every pair is. So it is a
    bound from above. Copies count apart, unless all copies of a run are equal.

    Example: an operator of 3 strategies between two tensors of 4 placements, in 10 copies that hand the second tensor on: the first
    tensor, and 10 times operator and tensor: log10(4 · 12^10) = 11.4; alike, with one placement handed on, log10(4 · 12) = 1.7.
    """
    sizes = dict(problem.top.sizes)
    for run in problem.runs:
        unit, variants = problem.first_variant(run.block), len(problem.blocks[run.block])
        # If all copies are equal, one choice decides for all of them.
        for call in run.calls[:1] if problem.uniform else run.calls:
            names = outer_names(problem, call, unit.net)
            sizes |= {names.get(v, f"{call.prefix}:{v}"): n for v, n in unit.sizes.items()}
            sizes[f"{call.prefix}:recomputes"] = variants
    return math.fsum(math.log10(n) for n in sizes.values())
