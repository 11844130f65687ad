"""Variants of a block that are eliminated together, and the least memory that is told without a search."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from planner_core.core import DeviceMesh
from planner_core.cost import NUM_COMPONENTS
from planner_core.planning import Planner, Request, prepare_planner
from planner_core.planning.methods import METHODS
from planner_core.search import find_least_memory, memory_bytes, no_plan_fits
from planner_core.search.algebra.elimination import eliminate, fix_variables
from planner_core.search.algebra.elimination_order import _eliminate_chains
from planner_core.search.algebra.minplus import MinPlusPower, min_plus_power
from planner_core.search.budget.memory_fit import MAX_SIMULATED_FACTOR
from planner_core.search.network.factors import Factor, Network
from planner_core.search.network.folded import CompiledNetwork
from planner_core.search.units import reduction
from planner_core.search.units.reduction import ReducedVariant, eliminate_inside
from planner_core.search.units.tables import weighted_tables

MODELS = ("gpt2-xl", "mixtral-8x7b", "t5-large")


def planner(model: str) -> Planner:
    return prepare_planner(Request(model, recompute="auto", zero=None))


def alone(c: CompiledNetwork, weights: np.ndarray) -> np.ndarray:
    """[boundary]: one variant, eliminated by itself."""
    return eliminate(c.sizes, weighted_tables(c.factors, weights), c.sequence, c.boundary).table


@pytest.mark.parametrize("largest", [reduction.MAX_JOINT_ENTRIES, 2_000])
@pytest.mark.parametrize("model", MODELS)
def test_variants_together_are_each_alone(model: str, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the inside is not eliminated to the end, since a table would be too large."""
    monkeypatch.setattr(reduction, "MAX_JOINT_ENTRIES", largest)
    problem = planner(model).problem(DeviceMesh(("world",), (16,)))
    weights = np.random.default_rng(0).random(NUM_COMPONENTS)
    for variants in problem.blocks.values():
        assert len(variants) == 5
        together = eliminate_inside(list(variants.values()), weights)
        for k, c in enumerate(variants.values()):
            inside = ReducedVariant(together, k)
            rest = eliminate(c.sizes, fix_variables(inside.remaining_tables, {}), inside.remaining, c.boundary)
            assert rest.table == pytest.approx(alone(c, weights), rel=1e-12)
            rest.previous = inside
            at = np.unravel_index(int(rest.table.argmin()), rest.table.shape)
            states = rest.assignment(dict(zip(c.boundary, map(int, at), strict=True)))
            cost = sum(float(t[tuple(states[v] for v in names)]) for names, t in weighted_tables(c.factors, weights))
            assert cost == pytest.approx(float(rest.table.min()), rel=1e-12)


def chain(links: int, states: int, seed: int) -> CompiledNetwork:
    """A chain of links with equal costs, the ends of which are kept. Its variables are eliminated as `_eliminate_chains` says."""
    chance = np.random.default_rng(seed)
    cost, allowed = chance.random((NUM_COMPONENTS, states, states)), chance.random((states, states)) < 0.9
    names = [f"v{i}" for i in range(links + 1)]
    factors = [Factor(pair, cost.copy(), allowed.copy()) for pair in pairwise(names)]
    keep, sizes = (names[0], names[-1]), dict.fromkeys(names, states)
    head, near = _eliminate_chains(sizes, tuple(pairwise(names)), keep)
    assert sorted(near) == sorted(keep)
    return CompiledNetwork(Network(), keep, {v: np.arange(states) for v in names}, factors, list(head.sequence))


@pytest.mark.parametrize("links", [2, 16, 61])
def test_equal_parts_of_a_block_are_eliminated_once(links: int) -> None:
    """A chain of equal links takes about as many sums as its length has digits, and the result is the same."""
    c, weights = chain(links, 6, seed=links), np.random.default_rng(2).random(NUM_COMPONENTS)
    plain = alone(c, weights)
    together = eliminate_inside([c], weights)
    assert set(c.kinds) == {0} and [t.cost.shape for t in c.pool.tables] == [(NUM_COMPONENTS, 6, 6)]
    assert len(together.recipe.steps) == links - 1 and len(together.recipe.sums) <= 5 * np.log2(links)
    inside = ReducedVariant(together, 0)
    found = eliminate(c.sizes, inside.remaining_tables, inside.remaining, c.boundary)
    assert found.table == pytest.approx(plain, rel=1e-12)
    found.previous = inside
    for i, j in np.argwhere(np.isfinite(plain)):
        states = found.assignment({c.boundary[0]: int(i), c.boundary[1]: int(j)})
        cost = sum(float(t[tuple(states[v] for v in names)]) for names, t in weighted_tables(c.factors, weights))
        assert cost == pytest.approx(float(plain[i, j]), rel=1e-12)


def test_variants_share_the_rows_of_equal_tables() -> None:
    """Of two variants that differ in the last link, all sums but the last have one row."""
    kept = chain(4, 3, seed=0)
    last = kept.factors[-1]
    other = replace(kept, factors=[*kept.factors[:-1], Factor(last.vars, 2 * last.cost, last.allowed)])
    weights = np.random.default_rng(3).random(NUM_COMPONENTS)
    together = eliminate_inside([kept, other], weights)
    assert together.recipe.rows.count((0, 1)) < len(together.recipe.rows) and (0, 0) in together.recipe.rows
    for k, c in enumerate((kept, other)):
        inside = ReducedVariant(together, k)
        table = eliminate(c.sizes, inside.remaining_tables, inside.remaining, c.boundary).table
        assert table == pytest.approx(alone(c, weights), rel=1e-12)


@pytest.mark.parametrize("mesh", [(16,), (2, 8)])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.slow(only=("t5-large-mesh1",))
def test_no_assignment_holds_less_than_the_least_bytes(model: str, mesh: tuple[int, ...]) -> None:
    """The bound is near the least sum. So what is far above a budget is told at once, and nothing else is."""
    there = planner(model)
    for build in there.builders(METHODS["exact"], DeviceMesh(("data", "tensor")[-len(mesh) :], mesh)):
        problem = build()
        least = find_least_memory(problem)
        assert least is not None
        assert 0.75 * memory_bytes(least) <= problem.least_bytes <= memory_bytes(least) * (1 + 1e-9)
        assert not no_plan_fits(problem, memory_bytes(least))
        assert no_plan_fits(problem, 0.75 * memory_bytes(least) / MAX_SIMULATED_FACTOR)


def test_a_path_is_the_cheapest_chain() -> None:
    """13 links between three states: the states on the way cost what the power says."""
    link = MinPlusPower(np.random.default_rng(1).random((1, 3, 3)))
    whole = min_plus_power(link, 13)
    for i in range(3):
        for j in range(3):
            way = [i, *whole.cheapest_path(0, i, j), j]
            assert len(way) == 14
            cost = sum(float(link.cost[0, a, b]) for a, b in pairwise(way))
            assert cost == pytest.approx(float(whole.cost[0, i, j]))


def test_what_cannot_fit_is_refused_without_a_search() -> None:
    """The answer names nearly the least memory, and none of the problems was priced."""
    there = prepare_planner(Request("llama-3-8b", layers=200, mesh="2x8", zero=3, recompute="auto"))
    problem = there.problem(DeviceMesh(("data", "tensor"), (2, 8)))
    there = replace(there, cluster=there.cluster.with_memory(int(problem.least_bytes / (2 * MAX_SIMULATED_FACTOR))))
    answer = there.solve(problem, "time")
    assert answer.assignment is None and answer.smallest is not None
    assert problem.least_bytes <= answer.least_memory <= 1.02 * problem.least_bytes
    assert not problem.cache.exact and answer is there.solve(problem, "time")
