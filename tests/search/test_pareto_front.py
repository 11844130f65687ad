"""Every point of the trade-off between cost and memory, proven by an integer program and against the search within budgets."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_core.core import Workload, load_cluster
from planner_core.core.mesh import parse_mesh
from planner_core.cost.model import cost_model
from planner_core.cost.step_time import Component
from planner_core.models.zoo import load_snapshot
from planner_core.planning.analysis.unfolded_network import unfold_problem
from planner_core.search.algebra.convex_hull import find_hull_corners, lower_hull, slope
from planner_core.search.budget.pareto_front import ParetoFront, find_corners, find_corners_below, find_pareto_front
from planner_core.search.lagrangian import make_objective, search_within_budget
from planner_core.search.network.folded import Problem, build_problem
from tests.support.random_graphs import prepared, random_graph
from tests.support.solvers import highs


def problem_of(graph: Any, mesh: str = "8", cluster: str = "1x8-h100", **options: Any) -> Problem:
    c = load_cluster(cluster)
    workload = Workload(graph.workload["batch"], graph.workload["seq"])
    coarse, strategies = prepared(graph)
    return build_problem(coarse, strategies, cost_model(c, parse_mesh(mesh, c.num_gpus), workload), **options)


def assert_complete(problem: Problem, found: ParetoFront, objective: str, points: list[int]) -> None:
    """A little under a point's memory, by more than HiGHS may break a limit (1e-6 of it), the least cost is that of the next."""
    net = unfold_problem(problem, make_objective(problem, objective))
    for i in points:
        budget = found.memory_bytes[i] * (1 - 5e-6)
        near = float(found.cost_s[min(i + 1, len(found.cost_s) - 1)])
        want = float("inf") if i == len(found.cost_s) - 1 else float(found.cost_s[i + 1])
        assert highs(net, {"after_forward": budget}, of=objective, near=near) == pytest.approx(want, rel=1e-5, abs=1e-7)


def some_points(found: ParetoFront) -> list[int]:
    """A few of the points that an integer program tells from the next one, and the last."""
    steps = np.diff(found.memory_bytes) / found.memory_bytes[:-1]
    apart = [i for i in range(len(found.cost_s) - 1) if steps[i] < -1e-5]
    return [*apart[:: max(1, len(apart) // 4)], len(found.cost_s) - 1]


@pytest.mark.parametrize("objective", ["time", "communication"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
@pytest.mark.slow(only=("0-communication",))
def test_front_of_random_models_is_complete(seed: int, objective: str) -> None:
    problem = problem_of(random_graph(seed))
    found = find_pareto_front(problem, objective)
    assert_complete(problem, found, objective, some_points(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-xl", "llama-3-8b", "bert-large"])
def test_front_of_one_layer_is_complete(name: str) -> None:
    problem = problem_of(load_snapshot(name, layers=1))
    found = find_pareto_front(problem)
    assert found.exact
    assert_complete(problem, found, "communication", some_points(found))


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b"])
def test_points_are_what_the_search_finds_within_their_memory(name: str, uniform: bool) -> None:
    problem = problem_of(load_snapshot(name, layers=6), uniform=uniform)
    found = find_pareto_front(problem, "time")
    assert found.exact
    for i in range(len(found.cost_s)):
        answer = search_within_budget(problem, budget=float(found.memory_bytes[i]) + 1)
        assert answer.optimal
        assert answer.value == pytest.approx(found.cost_s[i], rel=1e-5)


def test_a_point_is_what_it_says() -> None:
    problem = problem_of(load_snapshot("gpt2-xl", layers=4), "2x8", "2x8-h100", uniform=True)
    for objective in ("time", "communication"):
        found = find_pareto_front(problem, objective)
        assert (np.diff(found.cost_s) > 0).all()
        assert (np.diff(found.memory_bytes) < 0).all()
        for i in range(0, len(found.cost_s), 7):
            a = found.assignment(i)
            assert a.seconds == pytest.approx(found.cost_s[i], rel=1e-6, abs=1e-10)
            own = a.step_time_s if objective == "time" else a.totals[Component.COMMUNICATION]
            assert own <= found.cost_s[i] * (1 + 1e-6)  # the rest breaks ties
            assert a.totals[Component.AFTER_FORWARD] == pytest.approx(found.memory_bytes[i], rel=1e-9)


def test_copies_of_a_uniform_front_are_alike() -> None:
    problem = problem_of(load_snapshot("llama-3-8b", layers=4), uniform=True)
    found = find_pareto_front(problem)
    for i in range(0, len(found.cost_s), 9):
        copies = found.assignment(i).copies
        assert all(c == copies[0] for c in copies)


def test_a_corner_that_is_beaten_is_none() -> None:
    """The search for the least memory may end at a point that another beats: between the two lies nothing to look through."""
    points = [(1.0, 9.0e9), (2.0, 5.0e9), (5.0, 2.0e9), (6.0, 2.0e9)]

    def below(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
        return min(points, key=lambda p: p[0] + slope(a, b) * p[1])

    assert find_hull_corners(points[0], points[-1], lambda p: p, below, 64, 1e-9) == points[:3]
    assert find_hull_corners(points[0], points[0], lambda p: p, below, 64, 1e-9) == points[:1]


def test_the_front_of_a_whole_model_on_two_axes_is_all_there_is() -> None:
    problem = problem_of(load_snapshot("gpt2-xl"), "2x8", "2x8-h100", uniform=True)
    assert find_pareto_front(problem, "communication").exact


def test_a_problem_above_a_known_hull_gives_its_fastest_corner_alone() -> None:
    """All its corners are looked for if and only if one lies below the line through two neighbouring known points."""
    made = {mesh: problem_of(load_snapshot("bert-large", layers=2), mesh, "2x8-h100") for mesh in ("16", "4x4", "8x2")}
    points = {
        mesh: [(a.seconds, float(a.totals[Component.AFTER_FORWARD])) for a in find_corners(p)]
        for mesh, p in made.items()
    }
    for mesh, problem in made.items():
        for other, known in points.items():
            both = lower_hull([*known, points[mesh][0]])
            below = any(
                cost + slope(a, b) * held < (a[0] + slope(a, b) * a[1]) * (1 - 1e-6)
                for a, b in itertools.pairwise(both)
                for cost, held in points[mesh]
            )
            found = find_corners_below(problem, known, step=0.0)
            assert found[0].seconds == pytest.approx(points[mesh][0][0])
            if below:
                assert len(found) == len(points[mesh]), (mesh, other)
    above = [(c * 0.5, held * 0.5) for c, held in points["8x2"]]
    assert len(find_corners_below(made["8x2"], above, step=0.0)) == 1 < len(points["8x2"])


@given(st.lists(st.tuples(st.floats(1, 9), st.floats(1, 9)), min_size=1, max_size=12))
def test_no_point_lies_below_its_lower_hull(points: list[tuple[float, float]]) -> None:
    points = [(c, held * 1e9) for c, held in points]
    found = lower_hull(points)
    assert set(found) <= set(points) and found[0][0] == min(c for c, _ in points)
    for a, b in itertools.pairwise(found):
        assert all(c + slope(a, b) * held >= (a[0] + slope(a, b) * a[1]) * (1 - 1e-9) for c, held in points)
