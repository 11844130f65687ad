"""The optimum, proven by independent solvers on the unfolded network; budgets; what no change for the better may do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_core.core import RECOMPUTE, Cluster, Workload, load_cluster
from planner_core.core.mesh import parse_mesh
from planner_core.cost import price as price_of
from planner_core.cost.model import cost_model
from planner_core.cost.step_time import Shares
from planner_core.models.zoo import ZOO, load_snapshot
from planner_core.planning.analysis.unfolded_network import unfold_problem
from planner_core.planning.request import THOROUGH
from planner_core.search.algebra import PointAllowance
from planner_core.search.budget import copy_points as copies
from planner_core.search.budget import gap_closing as closing
from planner_core.search.budget.limits import UNPROVEN, SearchLimits
from planner_core.search.budget.mixing import _crossed_entries
from planner_core.search.extract_plan import make_block_plans
from planner_core.search.folded_solver import priced_value, solve_folded
from planner_core.search.lagrangian import make_objective, memory_bytes, search_within_budget
from planner_core.search.network.folded import Problem, build_problem
from planner_core.search.objective import Objective
from tests.support.random_graphs import prepared, random_graph
from tests.support.solvers import highs, toulbar2

CLUSTERS = {
    "2": "1x8-h100",
    "8": "1x8-h100",
    "2x8": "2x8-h100",
    "2x2": "1x4-a100-pcie",
    "4x4": "2x8-h100",
    "16": "2x8-h100",
}
SHARES = (Shares(), Shares(0.0, 0.0, 0.0, 0.0), Shares(0.9, 0.6, 0.4, 0.8))
"""Sides of the step's maxima: compute, traffic, and something between."""
PRICE = 1e-12
"""Seconds per byte: memory at a price that matters."""
T5_SLOW = pytest.param("t5-large", marks=pytest.mark.slow)
QUICK_SEEDS = (0, 1, 3, 4, 5, 7, 9)
"""Random models whose best plans within budgets are proven in a second or two."""


@lru_cache(maxsize=64)
def zoo(name: str, mesh: str, layers: int | None) -> Problem:
    graph = load_snapshot(name, layers=None if name.startswith("resnet") else layers)
    return problem_of(graph, load_cluster(CLUSTERS[mesh]), mesh)


def problem_of(graph: Any, cluster: Cluster, mesh: str, **options: Any) -> Problem:
    workload = Workload(graph.workload["batch"], graph.workload["seq"], **options)
    coarse, strategies = prepared(graph)
    return build_problem(coarse, strategies, cost_model(cluster, parse_mesh(mesh, cluster.num_gpus), workload))


def relaxed(problem: Problem, kind: str = "time", shares: Shares = SHARES[0], price: float = 0.0) -> Objective:
    """A plain sum: the step's form at some shares of its maxima, memory at a price."""
    return replace(make_objective(problem, kind).with_prices(price, 0.0), fixed_shares=shares)


def claimed(problem: Problem, objective: Objective) -> float:
    answer = solve_folded(problem, objective)
    return float("inf") if answer is None else priced_value(objective, answer)


def assert_proven(problem: Problem, objective: Objective) -> None:
    want = toulbar2(unfold_problem(problem, objective))
    # Toulbar2 rounds every entry to 1e-12 s.
    assert claimed(problem, objective) == pytest.approx(want, rel=1e-7, abs=1e-10)


def drawn(few: int, many: int) -> list[Any]:
    """Seeds: `few` in make test, `many` in make test-all."""
    return [*range(few), *(pytest.param(n, marks=pytest.mark.slow) for n in range(few, many))]


QUICK = ((1, "8"), (2, "2x8"))


@pytest.mark.parametrize(
    ("layers", "mesh"),
    [
        pytest.param(n, m, marks=() if (n, m) in QUICK else pytest.mark.slow)
        for n in (1, 2, 3)
        for m in ("8", "2x8", "2x2")
    ],
)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.slow(only=("bert-large-2-2x8", "llama-3-70b-2-2x8", "t5-large-2-2x8", "vit-large-2-2x8"))
def test_optimum_of_the_zoo_is_proven(name: str, layers: int, mesh: str) -> None:
    if name.startswith("resnet") and layers > 1:
        pytest.skip("ResNet-50 has one depth")
    problem = zoo(name, mesh, layers)
    assert_proven(problem, relaxed(problem, "communication"))
    for price, shares in zip((0.0, 0.0, PRICE), SHARES, strict=True):
        assert_proven(problem, relaxed(problem, shares=shares, price=price))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8", "2x8", "4x4"])
@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith("resnet")])
def test_optimum_of_eight_layers_is_proven(name: str, mesh: str) -> None:
    problem = zoo(name, mesh, 8)
    assert_proven(problem, relaxed(problem, shares=SHARES[2], price=PRICE))


@pytest.mark.parametrize("seed", drawn(40, 100))
def test_optimum_of_random_models_is_proven(seed: int) -> None:
    problem = problem_of(random_graph(seed), load_cluster("1x8-h100"), "8")
    assert_proven(problem, relaxed(problem))
    assert_proven(problem, relaxed(problem, shares=SHARES[2], price=PRICE))


@pytest.mark.parametrize("seed", range(100, 115))
def test_optimum_of_random_models_on_two_axes_is_proven(seed: int) -> None:
    problem = problem_of(random_graph(seed), load_cluster("1x4-a100-pcie"), "2x2")
    assert_proven(problem, relaxed(problem, shares=SHARES[2], price=PRICE))


@pytest.mark.parametrize("mesh", ["3", "6", "3x2"])
def test_optimum_where_no_dim_has_equal_parts_is_proven(mesh: str) -> None:
    """Weights are gathered in parts of which the last is shorter, and what the search says is what the plan costs."""
    graph = load_snapshot("llama-3-8b", batch=6, layers=2)
    problem = problem_of(graph, load_cluster(f"1x8-h100:gpus={3 if mesh == '3' else 6}"), mesh)
    for price in (0.0, PRICE):
        assert_proven(problem, relaxed(problem, price=price))
    answer = search_within_budget(problem)
    assert answer.assignment is not None
    blocks = make_block_plans(problem, answer.assignment)
    assert any((4096,) in param.segments.values() for bp in blocks.values() for param in bp.params.values())
    assert price_of(blocks, graph, problem.model).step_time_s == pytest.approx(answer.value)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large"])
@pytest.mark.slow(only=("t5-large-full", "t5-large-selective"))
def test_optimum_with_other_options_is_proven(name: str, recompute: str) -> None:
    graph = load_snapshot(name, layers=2)
    problem = problem_of(graph, load_cluster("2x8-v100-eth"), "2x8", recompute=recompute, zero=0, optimizer="sgd")
    assert_proven(problem, relaxed(problem, price=PRICE))


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("mesh", ["8", "2x4"])
def test_the_choice_of_zero_stages_is_proven(mesh: str, zero: int) -> None:
    """Each weight at stage 0 or `zero` on each axis, over two micro-batches, at a price of memory that makes it shard some."""
    graph = load_snapshot("llama-3-8b", layers=2)
    problem = problem_of(graph, load_cluster("1x8-h100"), mesh, zero=zero, accumulate=2)
    objective = relaxed(problem, shares=SHARES[2], price=PRICE)
    assert_proven(problem, objective)
    answer = solve_folded(problem, objective)
    assert answer is not None
    once = [p.once_gathered_axes for b in make_block_plans(problem, answer).values() for p in b.params.values()]
    assert any(once), "no weight has the stage"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_choice_of_chunks_is_proven(recompute: str) -> None:
    """Two samples on eight GPUs, of which four share each: a result is there sooner if it is summed in chunks."""
    graph = load_snapshot("llama-3-8b", layers=2, batch=2)
    cluster = load_cluster("1x8-h100:intra=150")
    problem = problem_of(graph, cluster, "2x4", chunks=4, recompute=recompute)
    assert_proven(problem, relaxed(problem))
    at_once = claimed(once := problem_of(graph, cluster, "2x4", recompute=recompute), relaxed(once))
    answer = solve_folded(problem, relaxed(problem))
    assert answer is not None and priced_value(relaxed(problem), answer) < at_once
    assert {
        e.chunks for p in make_block_plans(problem, answer).values() for s in p.sites.values() for e in s.outputs
    } == {1, 4}


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("seed", [0, 3, 7])
@pytest.mark.slow(but=("0-2", "3-2", "7-1"))
def test_zero_stages_within_a_budget_are_proven(seed: int, zero: int) -> None:
    problem = problem_of(random_graph(seed), load_cluster("1x8-h100"), "8", zero=zero, accumulate=2)
    assert_best_within(problem, (0.2, 0.6))


@pytest.mark.parametrize("price", [5e-12, 8e-12, 2e-11])
@pytest.mark.slow(only=("8e-12",))
def test_the_choice_of_recomputation_is_proven(price: float) -> None:
    """Every way in which two copies may run, each solved by itself, against the search that is free to choose."""
    problem = problem_of(load_snapshot("llama-3-8b", layers=2), load_cluster("1x8-h100"), "8", recompute="auto")
    objective = relaxed(problem, price=price)
    found = solve_folded(problem, objective)
    assert found is not None
    (variants,) = problem.blocks.values()
    assert set(variants) == set(RECOMPUTE[1:])
    least = {}
    for ways in product(variants, repeat=2):
        copies = tuple(replace(c, variant=way) for c, way in zip(found.copies, ways, strict=True))
        least[ways] = toulbar2(unfold_problem(problem, objective, replace(found, copies=copies)))
    assert priced_value(objective, found) == pytest.approx(min(least.values()), rel=1e-7)
    assert least[tuple(c.variant for c in found.copies)] == pytest.approx(min(least.values()), rel=1e-7)


def test_the_proof_can_fail() -> None:
    problem = zoo("llama-3-8b", "8", 2)
    objective = relaxed(problem, price=PRICE)
    net = unfold_problem(problem, objective)
    name = next(v["name"] for v in net["variables"] if len(v["states"]) > 3)
    net["unary"][name] = [c + 1e-3 for c in net["unary"][name]]
    assert toulbar2(net) != pytest.approx(claimed(problem, objective), rel=1e-7)


def assert_true_form_proven(problem: Problem) -> None:
    """The step's true form, a sum of maxima, has no lower value than the search says."""
    answer = search_within_budget(problem)
    assert answer.assignment is not None
    assert answer.optimal
    net = unfold_problem(problem, make_objective(problem, "time"), answer.assignment)
    assert answer.assignment.step_time_s == pytest.approx(highs(net, near=answer.value), rel=3e-6)


@pytest.mark.parametrize("seed", drawn(8, 20))
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_step_of_random_models_is_proven(seed: int, accumulate: int) -> None:
    """Slow links, so that traffic binds in some units and compute in others."""
    cluster = load_cluster("1x8-h100").with_bandwidth(10.0 ** -(seed % 4), 0)
    assert_true_form_proven(problem_of(random_graph(seed), cluster, "8", accumulate=accumulate))


@pytest.mark.parametrize("mesh", ["8", pytest.param("2x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2-xl"])
def test_the_step_of_a_layer_is_proven(name: str, mesh: str) -> None:
    graph = load_snapshot(name, layers=1, seq=256)
    assert_true_form_proven(problem_of(graph, load_cluster(CLUSTERS[mesh]), mesh))


@pytest.mark.parametrize("mesh", ["8", "2x8"])
def test_lazy_shared_states_change_nothing(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's decoder layers all read the encoder's output: powers worked out for every state of it, or only where asked."""
    problem = zoo("t5-large", mesh, 3)
    lazy = claimed(problem, relaxed(problem, price=PRICE))
    monkeypatch.setattr("planner_core.search.repeated_block.MAX_EAGER_STATES", 10**9)
    problem.cache.exact.clear()
    assert claimed(problem, relaxed(problem, price=PRICE)) == lazy


@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large", "mixtral-8x7b"])
def test_deeper_models_cost_one_layer_more_each(name: str) -> None:
    """In the long run every further layer costs the same: the powers lose nothing at depth."""
    few, more, most = (search_within_budget(zoo(name, "8", n)).value for n in (20, 40, 60))
    assert most - more == pytest.approx(more - few, rel=1e-6)


# --- budgets ---------------------------------------------------------------------------------------------


@lru_cache
def ends(name: str, mesh: str, layers: int) -> tuple[float, float]:
    """Memory of the fastest assignment, and the least there is."""
    free = search_within_budget(zoo(name, mesh, layers)).assignment
    assert free is not None
    tight = search_within_budget(zoo(name, mesh, layers), budget=1.0)
    assert tight.assignment is None
    return memory_bytes(free), tight.least_memory


@pytest.mark.parametrize("name", ["llama-3-8b", T5_SLOW, "mixtral-8x7b", "gpt2-xl"])
@pytest.mark.slow(only=("mixtral-8x7b",))
def test_a_budget_is_kept_and_more_never_hurts(name: str) -> None:
    problem = zoo(name, "8", 4)
    most, least = ends(name, "8", 4)
    before = float("inf")
    for share in np.linspace(0.0, 1.0, 12):
        budget = least + share * (most - least)
        answer = search_within_budget(problem, budget=budget)
        assert answer.assignment is not None
        assert memory_bytes(answer.assignment) <= budget
        assert answer.bound <= answer.value * (1 + 1e-9)
        assert answer.optimal
        assert answer.value <= before * (1 + 1e-6)
        before = answer.value
    assert search_within_budget(problem, budget=least * (1 - 1e-6)).assignment is None


@pytest.mark.parametrize("name", ["llama-3-8b", T5_SLOW, "mixtral-8x7b"])
def test_one_byte_under_a_plan_never_returns_it(name: str) -> None:
    problem = zoo(name, "8", 4)
    budget = float("inf")
    for _ in range(8):
        answer = search_within_budget(problem, budget=budget)
        if answer.assignment is None:
            break
        assert memory_bytes(answer.assignment) <= budget
        budget = memory_bytes(answer.assignment) - 1
    else:
        budget = 0.0
    assert budget < float("inf")


@pytest.mark.parametrize("name", ["llama-3-8b", T5_SLOW])
def test_what_was_asked_before_changes_no_answer(name: str) -> None:
    """A problem keeps what it solved; the next search starts from there."""
    problem = zoo(name, "8", 3)
    most, least = ends(name, "8", 3)
    for share in (0.8, 0.2, 0.5):
        budget = least + share * (most - least)
        later = search_within_budget(problem, budget=budget)
        problem.cache.exact.clear()
        first = search_within_budget(problem, budget=budget)
        assert later.optimal and first.optimal
        assert later.value == pytest.approx(first.value, rel=2e-6)
        assert later.solves <= first.solves


def test_a_search_without_proof_mixes_the_copies() -> None:
    """Where the solutions at prices lie far apart, plans between them are mixtures of their copies; one is found without a proof."""
    problem = problem_of(load_snapshot("gpt2-xl", layers=12), load_cluster("2x8-h100"), "2x8", recompute="auto")
    fast = search_within_budget(problem)
    small = search_within_budget(problem, budget=1.0)
    budget = small.least_memory + 0.6 * (memory_bytes(fast.assignment) - small.least_memory) if fast.assignment else 0.0
    rough = search_within_budget(problem, budget=budget, limits=UNPROVEN)
    assert rough.assignment is not None and memory_bytes(rough.assignment) <= budget
    assert len({c.variant for c in rough.assignment.copies}) > 1
    assert rough.gap < 0.1 * (
        search_within_budget(problem, budget=small.least_memory + 1, limits=UNPROVEN).value / fast.value - 1
    )


def test_a_search_leaves_no_cycle_behind() -> None:
    """A server plans all day: what a search made must go when it is dropped, not when the collector comes by."""
    problem = problem_of(load_snapshot("gpt2-xl", layers=4), load_cluster("2x8-h100"), "2x8")
    free, least = search_within_budget(problem), search_within_budget(problem, budget=1.0).least_memory
    assert free.assignment is not None
    gc.collect()
    gc.disable()
    try:
        answer = search_within_budget(problem, budget=(least + memory_bytes(free.assignment)) / 2)
        assert answer.solves > 2
        left = weakref.ref(problem)
        del problem
        assert left() is None
    finally:
        gc.enable()


def assert_best_within(problem: Problem, shares: Sequence[float], gap: float = 0.0) -> None:
    """The search is called optimal at budgets between the least memory and that of the fastest, and an integer program with both
    ends of the step as constraints finds nothing better. Where less than `gap` is left open, its answer lies within what is."""
    free, none = search_within_budget(problem).assignment, search_within_budget(problem, budget=1.0)
    assert free is not None
    assert none.assignment is None
    for share in shares:
        budget = none.least_memory + share * (memory_bytes(free) - none.least_memory)
        answer = search_within_budget(problem, budget=budget)
        assert answer.assignment is not None
        assert answer.optimal or answer.gap < gap
        assert memory_bytes(answer.assignment) <= budget
        net = unfold_problem(problem, make_objective(problem, "time"))
        limits = dict.fromkeys(("after_forward", "after_backward"), budget)
        best = highs(net, limits, near=answer.value)
        assert answer.bound * (1 - 3e-6) <= best <= answer.assignment.step_time_s * (1 + 3e-6)
        assert not answer.optimal or answer.assignment.step_time_s == pytest.approx(best, rel=3e-6)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n in QUICK_SEEDS else pytest.mark.slow) for n in range(30)]
)
@pytest.mark.slow(only=("0", "1", "7", "9"))
def test_best_within_a_budget_of_random_models_is_proven(seed: int) -> None:
    assert_best_within(problem_of(random_graph(seed), load_cluster("1x8-h100"), "8"), (0.1, 0.3, 0.5, 0.7, 0.9))


@pytest.mark.parametrize("name", ["gpt2-xl", "llama-3-8b", "bert-large", "vit-large", "mixtral-8x7b"])
@pytest.mark.slow(only=("llama-3-8b",))
def test_best_within_a_budget_of_the_zoo_is_proven(name: str) -> None:
    assert_best_within(zoo(name, "8", 2), (0.2, 0.6))


@pytest.mark.parametrize("seed", [3, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in range(30, 40))])
@pytest.mark.slow(only=("7",))
def test_copies_put_together_of_long_parts_are_proven_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are gone along one by one where they are few: here parts of two, four, eight are made first, as for a deep model."""
    monkeypatch.setattr(copies, "MAX_LONGEST_PARTS_LOG2", 1)
    monkeypatch.setattr(closing, "MAX_FIRST_POINTS", 50)
    assert_best_within(problem_of(random_graph(seed), load_cluster("1x8-h100"), "8"), (0.1, 0.3, 0.5, 0.7, 0.9))


LEFT_OPEN = {
    ("resnet50-100k", "8"): 0.001,
    ("t5-large", "2x8"): 0.03,
    ("resnet50-100k", "16"): 0.002,
    ("resnet50-100k", "2x8"): 0.06,
    ("mixtral-8x7b", "16"): 0.0015,
}
"""What is left open at most, since a point holds the sides of all maxima of the step's time, and what nothing hides at its ends."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_long_parts_of_the_zoo_are_proven_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_LONGEST_PARTS_LOG2", 1)
    assert_best_within(zoo(name, "8", 3), (0.1, 0.3, 0.5, 0.7, 0.9), LEFT_OPEN.get((name, "8"), 0.0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("llama-3-8b", 1000), ("gpt2-xl", 100), ("t5-large", 100)])
def test_no_budget_leaves_a_gap_in_a_deep_model(name: str, layers: int) -> None:
    """T5's 100 encoder and 100 decoder layers leave more to compare in mixed precision, where more forms of a weight differ."""
    assert_no_gap(name, "16", layers, gap=0.0025 if name == "t5-large" else 0.0)


@pytest.mark.parametrize("share", [0.1, pytest.param(0.37, marks=pytest.mark.slow)])
def test_what_is_left_open_in_a_deep_model_is_little(share: float) -> None:
    """Copies that differ bring a plan near the bound: what neither price nor sample would do alone."""
    problem = zoo("mixtral-8x7b", "16", 1000)
    free, least = search_within_budget(problem).assignment, search_within_budget(problem, budget=1.0).least_memory
    assert free is not None
    answer = search_within_budget(problem, budget=least + share * (memory_bytes(free) - least))
    assert answer.assignment is not None
    assert answer.gap < 0.01  # 18 % before samples were taken
    assert len(set(answer.assignment.copies)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_best_within_a_budget_of_three_layers_is_proven(name: str) -> None:
    assert_best_within(zoo(name, "8", 3), (0.1, 0.3, 0.5, 0.7, 0.9), LEFT_OPEN.get((name, "8"), 0.0))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            n, m, marks=pytest.mark.slow if n in ("t5-large", "resnet50-100k", "llama-3-70b", "vit-large") else ()
        )
        for n in ZOO
        for m in ("16", "2x8")
    ],
)
@pytest.mark.slow(only=("bert-large-2x8", "llama-3-8b-16", "llama-3-8b-2x8", "mixtral-8x7b-2x8"))
def test_no_budget_leaves_a_gap(name: str, mesh: str) -> None:
    """At full depth, on a whole cluster; where blocks that all differ leave too much to compare, a small one that is said."""
    assert_no_gap(name, mesh, gap=LEFT_OPEN.get((name, mesh), 0.0))


def assert_no_gap(name: str, mesh: str, layers: int | None = None, gap: float = 0.0) -> None:
    problem = zoo(name, mesh, layers)
    free, least = search_within_budget(problem).assignment, search_within_budget(problem, budget=1.0).least_memory
    assert free is not None
    before = float("inf")
    for share in (0.02, 0.2, 0.5, 0.8, 0.98):
        answer = search_within_budget(
            problem,
            budget=least + share * (memory_bytes(free) - least),
            limits=SearchLimits(points=PointAllowance(THOROUGH.request)),
        )
        assert answer.optimal or answer.gap < gap
        assert answer.value <= before * (1 + 1e-6 + gap)
        before = answer.value


# --- nothing better makes it worse -----------------------------------------------------------------------


def value_on(cluster: Cluster, mesh: str, name: str = "llama-3-8b") -> float:
    return search_within_budget(problem_of(load_snapshot(name, layers=2), cluster, mesh)).value


@settings(max_examples=12)
@given(st.sampled_from(["1x8-h100", "2x8-h100", "2x8-v100-eth", "4x8-a100"]), st.floats(1.0, 20.0), st.integers(0, 1))
def test_more_bandwidth_never_hurts(cluster: str, factor: float, level: int) -> None:
    c = load_cluster(cluster)
    mesh = str(c.num_gpus)
    assert value_on(c.with_bandwidth(factor, min(level, len(c.levels) - 1)), mesh) <= value_on(c, mesh) * (1 + 1e-6)


@settings(max_examples=6)
@given(st.sampled_from(["2x8", "4x4", "16"]), st.floats(0.05, 1.0))
def test_less_latency_never_hurts(mesh: str, factor: float) -> None:
    c = load_cluster("2x8-h100")
    assert value_on(c.with_latency(factor), mesh, "bert-large") <= value_on(c, mesh, "bert-large") * (1 + 1e-6)


def test_known_ways_are_crossed_and_none_gives_none() -> None:
    """From every state in which a known way begins to every one in which one ends; a shared state may have no known way."""
    assert _crossed_entries({1, 5}, (3, 3)).tolist() == [1, 2, 4, 5]
    assert _crossed_entries(set(), (3, 3)).tolist() == _crossed_entries(set(), (3,)).tolist() == []
