"""The least true cost of a unit by points against brute force, and the bound against what it bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from planner_core.cost import NUM_COMPONENTS, Shares
from planner_core.cost.step_time import StepTime
from planner_core.search.algebra.elimination_order import choose_elimination_order
from planner_core.search.algebra.pareto_points import PointAllowance
from planner_core.search.network.factors import Factor, Network
from planner_core.search.network.folded import CompiledNetwork
from planner_core.search.objective import TIE, Objective
from planner_core.search.units.pruned_unit import PrunedUnit, prune_by_limit
from planner_core.search.units.unit import sum_factors
from planner_core.search.units.unit_points import TimeSums, least_by_points, sums_around

PAIRS = (("a", "b"), ("b", "c"), ("c", "d"), ("a", "d"))


def random_unit(seed: int) -> CompiledNetwork:
    """Four variables of three states in a ring; some entries impossible, all components between 0 and 1."""
    dice = np.random.default_rng(seed)
    factors = [Factor(pair, dice.random((NUM_COMPONENTS, 3, 3)), dice.random((3, 3)) > 0.1) for pair in PAIRS]
    sizes = dict.fromkeys("abcd", 3)
    sequence = choose_elimination_order(sizes, [f.vars for f in factors], ())
    return CompiledNetwork(Network(sizes, factors), (), {v: np.arange(3) for v in sizes}, factors, sequence)


def every(unit: CompiledNetwork, objective: Objective) -> Iterator[tuple[dict[str, int], float]]:
    """Each possible one of all 81 assignments, and its true cost."""
    for states in itertools.product(range(3), repeat=4):
        at = dict(zip("abcd", states, strict=True))
        if all(f.allowed[tuple(at[v] for v in f.vars)] for f in unit.factors):
            yield at, float(objective.priced_cost(sum_factors(unit.factors, at)))


def brute_force(unit: CompiledNetwork, objective: Objective) -> float:
    """The least of all assignments."""
    return min(cost for _, cost in every(unit, objective))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_the_least_and_its_bound(seed: int, accumulate: int) -> None:
    """What is found is the least, and no bound is above it: with work enough, with little, and with a limit below it."""
    unit = random_unit(seed)
    objective = Objective("time", StepTime(accumulate, contention=0.19), after_forward=0.1, after_backward=0.2)
    least = brute_force(unit, objective)
    for limit, work in itertools.product((1.5 * least, 1.001 * least, 0.9 * least), (0, 5, 30, 100_000)):
        states, bound = least_by_points(unit, unit.sequence, {}, objective, Shares(), limit, PointAllowance(work))
        assert bound <= max(least, limit if limit < least else 0.0) * (1 + TIE)
        if work == 100_000:
            assert (states is not None) == (limit > least)
            assert bound == pytest.approx(min(least, limit), rel=TIE)
        if states is not None:
            assert float(objective.priced_cost(sum_factors(unit.factors, states))) == pytest.approx(bound, rel=TIE)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_state_that_is_dropped_is_in_no_assignment_within_the_limit(accumulate: int) -> None:
    """And a state that is dear at every share is dropped."""
    objective = Objective("time", StepTime(accumulate, contention=0.19), after_forward=0.1, after_backward=0.2)
    sums = sums_around(Shares(), TimeSums(objective))
    for seed, wide in itertools.product(range(8), (1.02, 1.3)):
        unit = random_unit(seed)
        unit.factors[0].costs.rows[:, 2] += 5.0  # state 2 of a
        limit = wide * brute_force(unit, objective)
        part = PrunedUnit.from_network(unit, unit.sequence, {})
        part, _ = prune_by_limit(part, part.bucket_tree(objective, Shares()), sums, limit)
        within = [at for at, cost in every(unit, objective) if cost <= limit]
        for v in "abcd":
            assert {at[v] for at in within} <= set(part.alive[v].tolist())
        assert 2 not in part.alive["a"]
