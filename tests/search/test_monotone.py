"""To allow a choice never makes the optimum worse: a wider space has no larger value and needs no more memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from planner_core.core import RECOMPUTE, Workload, load_cluster
from planner_core.core.mesh import DeviceMesh
from planner_core.cost.model import CostModel, cost_model
from planner_core.models.zoo import load_snapshot
from planner_core.planning.methods.registry import ALL
from planner_core.search.lagrangian import memory_bytes, search_within_budget
from planner_core.search.network.folded import Problem, Restriction, build_problem
from planner_core.search.objective import TIE
from tests.support.random_graphs import prepared, random_graph

MESH = DeviceMesh(("data", "tensor"), (2, 4))


def problem_of(graph: Any, model: CostModel, restrict: Restriction | None = None, uniform: bool = False) -> Problem:
    return build_problem(*prepared(graph), model, restrict, uniform)


def model_of(graph: Any, **options: Any) -> CostModel:
    workload = Workload(graph.workload["batch"], graph.workload["seq"], **{"accumulate": 2, **options})
    return cost_model(load_cluster("1x8-h100"), MESH, workload)


def chains(graph: Any) -> Iterator[tuple[str, list[Problem]]]:
    """Spaces of one graph, each of which contains the one before it."""
    model = model_of(graph)
    free = problem_of(graph, model)
    kept = replace(model, stages=(0,))
    for zero in (1, 2, 3):
        staged = problem_of(graph, replace(model, stages=(0, zero)))
        every = problem_of(graph, replace(model, stages=(0, 1, 2, 3)))
        yield f"ZeRO {zero}", [problem_of(graph, kept), staged, every]
    yield "joined axes", [problem_of(graph, replace(model, joined=(1,))), free]
    for method in ALL.values():
        restrict = method.restrict(graph, MESH)
        if restrict is None:
            continue
        there = model if method.zero else kept
        rungs = [
            problem_of(graph, there, restrict, True),
            problem_of(graph, there, restrict),
            problem_of(graph, there),
            free,
        ]
        yield method.name, rungs


def least(problem: Problem, objective: str, budget: float = np.inf) -> float:
    """Value of the optimum within the budget; inf where nothing fits."""
    if problem.is_infeasible:
        return float("inf")
    answer = search_within_budget(problem, objective=objective, budget=budget)
    return answer.value if answer.assignment is not None else float("inf")


def least_memory(problem: Problem) -> float:
    return float("inf") if problem.is_infeasible else search_within_budget(problem, budget=1.0).least_memory


@pytest.mark.parametrize("objective", ["time", "communication"])
@pytest.mark.parametrize("seed", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 9, 12))])
@pytest.mark.slow(only=("4-communication",))
def test_a_wider_space_is_never_worse(seed: int, objective: str) -> None:
    """Of any memory, within a budget halfway to the least memory of the narrow space, and in the least memory itself."""
    graph, seen = random_graph(seed), 0
    for name, spaces in chains(graph):
        for narrow, wide in pairwise(spaces):
            want = least(narrow, objective)
            assert least(wide, objective) <= want * (1 + TIE), name
            assert least_memory(wide) <= least_memory(narrow) * (1 + TIE), name
            if np.isfinite(want):
                free = search_within_budget(narrow, objective=objective).assignment
                assert free is not None
                budget = (memory_bytes(free) + least_memory(narrow)) / 2
                assert least(wide, objective, budget) <= least(narrow, objective, budget) * (1 + TIE), name
                seen += 1
    assert seen > 10, "too few spaces hold a plan"


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2-xl"])
@pytest.mark.slow(but=("gpt2-xl",))
def test_the_choice_of_recomputation_needs_no_more_memory(name: str) -> None:
    """Llama's block keeps what it reads only where it runs again: a copy that does not is not charged for it."""
    graph = load_snapshot(name, layers=3)
    model = replace(
        cost_model(load_cluster("1x8-h100"), DeviceMesh(("world",), (8,)), Workload(16, 1024)), stages=(0, 3)
    )
    free = problem_of(graph, replace(model, workload=replace(model.workload, recompute="auto")))
    for policy in RECOMPUTE[1:]:
        fixed = problem_of(graph, replace(model, workload=replace(model.workload, recompute=policy)))
        alone = search_within_budget(fixed)
        assert alone.assignment is not None
        assert least(free, "time") <= alone.value * (1 + TIE)
        assert least_memory(free) <= least_memory(fixed) * (1 + TIE)
        assert least(free, "time", memory_bytes(alone.assignment)) <= alone.value * (1 + TIE), "in the same memory"
