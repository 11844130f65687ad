"""States that are not in the best assignment go, and the best assignment stays: judged by plain elimination."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planner_core.cost import Floats
from planner_core.search.algebra import reduced_costs
from planner_core.search.algebra.elimination import Table, eliminate
from planner_core.search.algebra.reduced_costs import eliminate_possible, least_cost_bound, possible_states


def random_tables(seed: int, forbidden: float) -> tuple[dict[str, int], list[Table]]:
    """A chain of layers that pass two tensors on, and a third that skips every second one; `forbidden` of the entries are impossible."""
    rng = np.random.default_rng(seed)
    sizes: dict[str, int] = {}
    scopes = []
    for k in range(5):
        scopes.append((f"h{k}", f"r{k}", f"h{k + 1}", f"r{k + 1}"))
        scopes += [(f"h{k}",), (f"r{k}", f"h{k}")]
        if k % 2 == 0:
            scopes.append((f"h{k}", f"m{k}", f"m{k + 2}"))
    for scope in scopes:
        sizes.update({v: int(rng.integers(1, 6)) for v in scope if v not in sizes})
    tables = []
    for scope in scopes:
        shape = [sizes[v] for v in scope]
        table = rng.integers(0, 9, shape) + rng.random(shape)
        tables.append((scope, np.where(rng.random(shape) < forbidden, np.inf, table)))
    return sizes, tables


def cost(tables: list[Table], states: dict[str, int]) -> float:
    return sum(float(table[tuple(states[v] for v in names)]) for names, table in tables)


@pytest.mark.parametrize("largest", [0, 60, 20_000])
@pytest.mark.parametrize("forbidden", [0.0, 0.2, 0.5])
def test_the_optimum_stays(monkeypatch: pytest.MonkeyPatch, largest: int, forbidden: float) -> None:
    """Also where large tables are replaced by their pairs of variables, and where no assignment is possible."""
    monkeypatch.setattr(reduced_costs, "MAX_PLAIN_ENTRIES", largest)
    for seed in range(25):
        sizes, tables = random_tables(seed, forbidden)
        least = float(eliminate(sizes, tables, [*sizes], ()).table)
        solution = eliminate_possible(sizes, tables, range(len(tables)))
        assert float(solution.table) == pytest.approx(least, rel=1e-12)
        if math.isfinite(least):
            states = solution.assignment({})
            assert states.keys() == sizes.keys() and cost(tables, states) == pytest.approx(least, rel=1e-12)


def test_every_optimal_state_stays_and_others_go() -> None:
    """Each state stays through which an assignment is as good as the best, and of wide tables few states stay."""
    gone = 0
    for seed in range(25):
        sizes, tables = random_tables(seed, 0.1)
        alive = possible_states(tables, range(len(tables)))
        least = float(eliminate(sizes, tables, [*sizes], ()).table)
        assert least * 0.8 <= least_cost_bound(tables, range(len(tables))) <= least * (1 + 1e-12) or math.isinf(least)
        for v, n in sizes.items():
            for s in range(n):
                only: Floats = np.where(np.arange(n) == s, 0.0, np.inf)
                through = float(eliminate(sizes, [*tables, ((v,), only)], [*sizes], ()).table)
                assert s in alive[v] or not through <= least or math.isinf(least)
                gone += s not in alive[v]
    assert gone > 500


def test_equal_tables_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with one table share the tables over its pairs of variables."""
    monkeypatch.setattr(reduced_costs, "MAX_PLAIN_ENTRIES", 10)
    calls = []
    original = reduced_costs._narrow_tables

    def narrow_tables(table: Floats) -> list[tuple[tuple[int, ...], Floats]]:
        calls.append(table.shape)
        return original(table)

    monkeypatch.setattr(reduced_costs, "_narrow_tables", narrow_tables)
    table = np.random.default_rng(1).random((4, 4, 4))
    tables: list[Table] = [((f"a{k}", f"b{k}", f"a{k + 1}"), table) for k in range(6)]
    monkeypatch.setattr(reduced_costs, "MAX_ROUNDS", 1)
    possible_states(tables, [0] * len(tables))
    assert calls == [(4, 4, 4)]


@pytest.mark.parametrize(("copied", "work", "rank"), [(1e9, 1e9, 2), (0, 1e9, 2), (1e9, 0, 1), (0, 0, 1)])
def test_narrow_tables_are_nowhere_above_the_wide_one(
    monkeypatch: pytest.MonkeyPatch, copied: float, work: float, rank: int
) -> None:
    """In each of the ways in which they are made; they leave no more than is left at the least entry."""
    monkeypatch.setattr(reduced_costs, "MAX_COPIED_ENTRIES", copied)
    monkeypatch.setattr(reduced_costs, "MAX_WORK", work)
    rng = np.random.default_rng(2)
    table = np.where(rng.random((3, 4, 2, 5)) < 0.2, np.inf, rng.random((3, 4, 2, 5)))
    total = np.zeros(table.shape)
    for dims, part in reduced_costs._narrow_tables(table):
        assert len(dims) == rank
        total = total + part.reshape([n if d in dims else 1 for d, n in enumerate(table.shape)])
    assert (total <= table + 1e-12).all() and total.max() > 0
