"""The best cut into stages, against every cut and against HiGHS."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from planner_core.search.algebra import StageOption, best_partition

Table = dict[tuple[int, int, int], list[StageOption]]


def case(seed: int, copies: int, stages: int, *, kinds: int = 0, tied: bool = False) -> Table:
    """Random seconds of uneven layers, in a quick way and a small one; memory of ranges that are too long for a stage.

    `kinds`: of how many kinds of blocks the layers are, one kind behind the other; 0: each is of its own. `tied`: embedding and head share
    a weight, whose gradient the first and the last stage sum once a step."""
    chance = random.Random(seed)
    number = kinds or copies
    kind_of = [at * number // copies for at in range(copies)]
    seconds_of, bytes_of = ([chance.uniform(1, most) for _ in range(number)] for most in (3, 2))
    each, need = [seconds_of[k] for k in kind_of], [bytes_of[k] for k in kind_of]
    tied_s = chance.uniform(1, 6) if tied else 0.0
    room = [chance.uniform(1.2, 2.5) * sum(need) / stages for _ in range(stages)]
    m = chance.choice([2, 4, 16])
    found: Table = {}
    for stage, first, last in itertools.product(range(stages), range(copies), range(copies + 1)):
        if first < last:
            seconds, size = sum(each[first:last]), sum(need[first:last])
            ways = [(1.0, 1.0), (1.4, 0.5)]
            once_s = tied_s * ((first == 0) + (last == copies))
            found[stage, first, last] = [
                StageOption(slow * m * seconds + once_s, slow * seconds + 0.1, slow)
                for slow, small in ways
                if small * size <= room[stage]
            ]
    return found


def by_force(table: Table, copies: int, stages: int) -> float:
    least = float("inf")
    for inner in itertools.combinations(range(1, copies), stages - 1):
        cuts = (0, *inner, copies)
        for ways in itertools.product(*(table[k, cuts[k], cuts[k + 1]] for k in range(stages))):
            before = np.cumsum([0.0, *(w.delay_s for w in ways)])
            least = min(least, max(b + w.work_s for b, w in zip(before, ways, strict=False)))
    return least


def by_highs(table: Table, copies: int, stages: int) -> float:
    """A path through (stage, copies), one option an edge; the step is above each stage's own seconds and those before it."""
    edges = [(k, a, b, w) for (k, a, b), ways in table.items() for w in ways]
    n = len(edges)
    rows, low, high = [], [], []

    def add(row: np.ndarray, least: float, most: float) -> None:
        rows.append(row), low.append(least), high.append(most)

    for k, at in itertools.product(range(stages + 1), range(copies + 1)):
        row = np.zeros(n + 1)
        for i, (stage, a, b, _) in enumerate(edges):
            row[i] = (stage == k and a == at) - (stage == k - 1 and b == at)
        wanted = 1.0 if (k, at) == (0, 0) else -1.0 if (k, at) == (stages, copies) else 0.0
        add(row, wanted, wanted)
    for k in range(stages):
        row = np.array([(w.work_s if s == k else 0.0) + (w.delay_s if s < k else 0.0) for s, _, _, w in edges] + [-1.0])
        add(row, -np.inf, 0.0)
    cost = np.append(np.zeros(n), 1.0)
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.append(np.ones(n), 0),
        bounds=Bounds(np.zeros(n + 1), np.append(np.ones(n), np.inf)),
        options={"mip_rel_gap": 0},
    )
    return float(found.fun) if found.success else float("inf")


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_better(seed: int) -> None:
    copies, stages = [(5, 2), (7, 3), (8, 4), (9, 3)][seed % 4]
    table = case(seed, copies, stages)
    found = best_partition(copies, stages, lambda k, a, b: table[k, a, b])
    least = by_force(table, copies, stages)
    assert (found.seconds if found else float("inf")) == pytest.approx(least, rel=1e-12)
    if found:
        assert sum(found.copies) == copies and len(found.copies) == stages


@pytest.mark.parametrize("seed", range(8))
def test_highs_finds_no_better_cut(seed: int) -> None:
    copies, stages = [(6, 2), (7, 3)][seed % 2]
    table = case(100 + seed, copies, stages)
    found = best_partition(copies, stages, lambda k, a, b: table[k, a, b])
    assert (found.seconds if found else float("inf")) == pytest.approx(by_highs(table, copies, stages), rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kinds", "tied"), [(2, False), (0, True), (2, True)])
def test_highs_finds_no_better_cut_of_two_kinds_of_blocks_or_tied_weights(seed: int, kinds: int, tied: bool) -> None:
    copies, stages = [(6, 2), (7, 3)][seed % 2]
    table = case(200 + seed, copies, stages, kinds=kinds, tied=tied)
    found = best_partition(copies, stages, lambda k, a, b: table[k, a, b])
    least = by_highs(table, copies, stages)
    assert (found.seconds if found else float("inf")) == pytest.approx(least, rel=1e-6)
    assert least == pytest.approx(by_force(table, copies, stages), rel=1e-6)


def test_only_cuts_below_a_value_are_looked_for() -> None:
    table = case(3, 7, 3)
    best = best_partition(7, 3, lambda k, a, b: table[k, a, b])
    assert best is not None
    assert best_partition(7, 3, lambda k, a, b: table[k, a, b], best.seconds) is None
    assert best_partition(7, 3, lambda k, a, b: table[k, a, b], best.seconds * 1.001) == best


def test_the_example() -> None:
    found = best_partition(4, 2, lambda k, a, b: [StageOption(2.0 * (b - a), 1.0 * (b - a))])
    assert found is not None and found.seconds == 6
