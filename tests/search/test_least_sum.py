"""Sums of which only the least over one variable is wanted: sparse tables, large ones, and several variants give what a plain sum gives."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from planner_core.search.algebra import least_sum as module
from planner_core.search.algebra.least_sum import least_over, least_sum

SHAPES = [
    [(1, 9, 1, 1), (1, 9, 5, 1), (1, 9, 1, 7)],
    [(2, 9, 1, 1), (2, 9, 1, 7), (2, 9, 5, 7)],
    [(1, 40, 30, 1, 1), (1, 40, 1, 6, 8), (1, 40, 30, 1, 8)],
    [(2, 12, 1, 1, 20), (2, 12, 30, 4, 1), (2, 12, 1, 4, 20)],
    [(1, 70)],
]


def plain(tables: list[np.ndarray]) -> np.ndarray:
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total.min(axis=1)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("share", [1.0, 0.3, 0.02])
@pytest.mark.parametrize("bounds", [(100_000, 4_000, 20_000, 400), (50, 10, 1, 400), (50, 1, 1, 1)])
def test_least_sum_is_that_of_the_plain_sum(shapes, share, bounds, monkeypatch):
    for name, value in zip(
        ("MAX_ROW_ENTRIES", "MIN_ENTRIES_BY_STATE", "MIN_SPARSE_ENTRIES", "MIN_ENTRIES_BY_PAIR"), bounds, strict=True
    ):
        monkeypatch.setattr(module, name, value)
    random = np.random.default_rng(len(shapes))
    tables = [random.random(shape) for shape in shapes]
    for table in tables:
        if sum(n > 1 for n in table.shape[1:]) == 2:  # all variants have the same possible pairs
            table[:, random.random(table.shape[1:]) > share] = np.inf
    found = least_sum(tables)
    assert found.shape == np.broadcast_shapes(*shapes)[:1] + np.broadcast_shapes(*shapes)[2:]
    assert np.array_equal(found, plain(tables))


def test_pairs_that_cannot_be_are_not_formed(monkeypatch):
    formed = []
    add = module._add_in_order
    monkeypatch.setattr(module, "_add_in_order", lambda tables: formed.append(add(tables).size) or add(tables))
    states = np.full((1, 40, 30, 1), np.inf)
    states[0, np.arange(40), np.arange(40) % 30] = 1.0
    assert least_sum([states, np.ones((1, 40, 1, 500))]).min() == 2.0
    assert sum(formed) == 40 * 500


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_the_least_over_dims_is_that_of_numpy(layout: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    table = random.random((3, 4, 1, 5)).transpose(layout)
    table[random.random(table.shape) < 0.3] = np.inf
    for size in range(5):
        for dims in combinations(range(4), size):
            assert np.array_equal(least_over(table, dims), table.min(axis=dims))
