"""The optimum, proven by independent solvers on the unfolded network; budgets; what no change for the better may do."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_core.cluster import Cluster, load_cluster
from planner_core.hardware import Workload, cost_model
from planner_core.mesh import parse_mesh
from planner_core.models import ZOO, load_snapshot
from planner_core.network import MEMORY
from planner_core.problem import Problem, build_problem
from planner_core.search import memory_of, search, weights
from planner_core.solve import solve
from planner_core.unfolded import unfold_problem
from tests.random_graphs import prepared, random_graph
from tests.solvers import highs, toulbar2

CLUSTERS = {
    "2": "1x8-h100",
    "8": "1x8-h100",
    "2x8": "2x8-h100",
    "2x2": "1x4-a100-pcie",
    "4x4": "2x8-h100",
    "16": "2x8-h100",
}
ALL_COSTS = weights("time", 1e-12)
"""Time, with memory at a price that matters."""


@lru_cache(maxsize=64)
def zoo(name: str, mesh: str, layers: int | None) -> Problem:
    graph = load_snapshot(name, layers=None if name.startswith("resnet") else layers)
    return problem_of(graph, load_cluster(CLUSTERS[mesh]), mesh)


def problem_of(graph: Any, cluster: Cluster, mesh: str, **options: Any) -> Problem:
    workload = Workload(graph.workload["batch"], graph.workload["seq"], **options)
    coarse, strategies = prepared(graph)
    return build_problem(coarse, strategies, cost_model(cluster, parse_mesh(mesh, cluster.num_gpus), workload))


def claimed(problem: Problem, price: Any) -> float:
    answer = solve(problem, [price])
    return float("inf") if answer is None else float(np.dot(price, answer.totals))


def assert_proven(problem: Problem, price: Any) -> None:
    want = toulbar2(unfold_problem(problem, price))
    assert claimed(problem, price) == pytest.approx(want, rel=1e-7, abs=1e-10)  # toulbar2 rounds every entry to 1e-12 s


@pytest.mark.parametrize("mesh", ["8", "2x8", "2x2"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", ZOO)
def test_optimum_of_the_zoo_is_proven(name: str, layers: int, mesh: str) -> None:
    if name.startswith("resnet") and layers > 1:
        pytest.skip("ResNet-50 has one depth")
    for price in (weights("time"), weights("communication"), ALL_COSTS):
        assert_proven(zoo(name, mesh, layers), price)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8", "2x8", "4x4"])
@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith("resnet")])
def test_optimum_of_eight_layers_is_proven(name: str, mesh: str) -> None:
    assert_proven(zoo(name, mesh, 8), ALL_COSTS)


@pytest.mark.parametrize("seed", range(100))
def test_optimum_of_random_models_is_proven(seed: int) -> None:
    problem = problem_of(random_graph(seed), load_cluster("1x8-h100"), "8")
    for price in (weights("time"), ALL_COSTS):
        assert_proven(problem, price)


@pytest.mark.parametrize("seed", range(100, 115))
def test_optimum_of_random_models_on_two_axes_is_proven(seed: int) -> None:
    assert_proven(problem_of(random_graph(seed), load_cluster("1x4-a100-pcie"), "2x2"), ALL_COSTS)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large"])
def test_optimum_with_other_options_is_proven(name: str, recompute: str) -> None:
    graph = load_snapshot(name, layers=2)
    problem = problem_of(graph, load_cluster("2x8-v100-eth"), "2x8", recompute=recompute, zero=0, optimizer="sgd")
    assert_proven(problem, ALL_COSTS)


def test_the_proof_can_fail() -> None:
    problem = zoo("llama-3-8b", "8", 2)
    net = unfold_problem(problem, ALL_COSTS)
    name = next(v["name"] for v in net["variables"] if len(v["states"]) > 3)
    net["unary"][name] = [c + 1e-3 for c in net["unary"][name]]
    assert toulbar2(net) != pytest.approx(claimed(problem, ALL_COSTS), rel=1e-7)


def test_integer_program_proves_a_layer() -> None:
    problem = zoo("llama-3-8b", "8", 1)
    assert claimed(problem, ALL_COSTS) == pytest.approx(highs(unfold_problem(problem, ALL_COSTS)), rel=1e-5)


@pytest.mark.parametrize("mesh", ["8", "2x8"])
def test_lazy_shared_states_change_nothing(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's decoder layers all read the encoder's output: powers worked out for every state of it, or only where asked."""
    problem = zoo("t5-large", mesh, 3)
    lazy = claimed(problem, ALL_COSTS)
    monkeypatch.setattr("planner_core.solve.EAGER", 10**9)
    assert claimed(problem, ALL_COSTS) == lazy


@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large", "mixtral-8x7b"])
def test_deeper_models_cost_one_layer_more_each(name: str) -> None:
    """In the long run every further layer costs the same: the powers lose nothing at depth."""
    few, more, most = (claimed(zoo(name, "8", n), weights("time")) for n in (20, 40, 60))
    assert most - more == pytest.approx(more - few, rel=1e-6)


# --- budgets ---------------------------------------------------------------------------------------------


@lru_cache
def ends(name: str, mesh: str, layers: int) -> tuple[float, float]:
    """Memory of the fastest assignment, and the least there is."""
    free = search(zoo(name, mesh, layers)).assignment
    assert free is not None
    tight = search(zoo(name, mesh, layers), budget=1.0)
    assert tight.assignment is None
    return memory_of(free), tight.least_memory


@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large", "mixtral-8x7b", "gpt2-xl"])
def test_a_budget_is_kept_and_more_never_hurts(name: str) -> None:
    problem = zoo(name, "8", 4)
    most, least = ends(name, "8", 4)
    before = float("inf")
    for share in np.linspace(0.0, 1.0, 12):
        budget = least + share * (most - least)
        answer = search(problem, budget=budget)
        assert answer.assignment is not None
        assert memory_of(answer.assignment) <= budget
        assert answer.bound <= answer.value * (1 + 1e-9)
        if answer.optimal:
            assert answer.value <= before * (1 + 1e-6)
            before = answer.value
    assert search(problem, budget=least * (1 - 1e-6)).assignment is None


@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large", "mixtral-8x7b"])
def test_one_byte_under_a_plan_never_returns_it(name: str) -> None:
    problem = zoo(name, "8", 4)
    budget = float("inf")
    for _ in range(8):
        answer = search(problem, budget=budget)
        if answer.assignment is None:
            break
        assert memory_of(answer.assignment) <= budget
        budget = memory_of(answer.assignment) - 1
    else:
        budget = 0.0
    assert budget < float("inf")


@pytest.mark.parametrize("seed", range(12))
def test_what_is_called_optimal_under_a_budget_is(seed: int) -> None:
    """An integer program with the memory as a constraint, on small random models."""
    problem = problem_of(random_graph(seed), load_cluster("1x8-h100"), "8")
    free = search(problem).assignment
    assert free is not None
    least = search(problem, budget=1.0).least_memory
    budget = (memory_of(free) + least) / 2
    answer = search(problem, budget=budget)
    assert answer.assignment is not None
    one = tuple(1.0 if i == MEMORY else 0.0 for i in range(len(answer.assignment.totals)))
    ending = tuple(1.0 if i == len(one) - 1 else 0.0 for i in range(len(one)))
    price = weights("time")
    bound = highs(unfold_problem(problem, price), unfold_problem(problem, one), budget)
    assert bound <= answer.value * (1 + 1e-5)
    if answer.optimal and answer.assignment.totals[MEMORY] >= np.dot(ending, answer.assignment.totals):
        assert answer.value <= bound * (1 + 1e-5)


# --- nothing better makes it worse -----------------------------------------------------------------------


def value_on(cluster: Cluster, mesh: str, name: str = "llama-3-8b") -> float:
    return search(problem_of(load_snapshot(name, layers=2), cluster, mesh)).value


@settings(max_examples=12)
@given(st.sampled_from(["1x8-h100", "2x8-h100", "2x8-v100-eth", "4x8-a100"]), st.floats(1.0, 20.0), st.integers(0, 1))
def test_more_bandwidth_never_hurts(cluster: str, factor: float, level: int) -> None:
    c = load_cluster(cluster)
    mesh = str(c.num_gpus)
    assert value_on(c.with_bandwidth(factor, min(level, len(c.levels) - 1)), mesh) <= value_on(c, mesh) * (1 + 1e-6)


@settings(max_examples=12)
@given(st.sampled_from(["2x8", "4x4", "16"]), st.floats(0.05, 1.0))
def test_less_latency_never_hurts(mesh: str, factor: float) -> None:
    c = load_cluster("2x8-h100")
    assert value_on(c.with_latency(factor), mesh, "bert-large") <= value_on(c, mesh, "bert-large") * (1 + 1e-6)
