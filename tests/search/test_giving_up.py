"""A search that may give up above a value: its bounds hold, and it gives up no better plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner_core.core import DeviceMesh, axis_names
from planner_core.planning import Request, prepare
from planner_core.search import quick_bound, search
from planner_core.search.network import Problem
from planner_core.search.objective import TIE

CASES = (
    ("llama-3-8b", "2x8-h100:inter=50", (2, 8), 2, "none"),
    ("gpt2-xl", "2x8-h100:inter=10", (2, 8), 1, "auto"),
)


def fresh(model: str, cluster: str, sizes: tuple[int, ...], zero: int, recompute: str) -> Callable[[], Problem]:
    """Makes the same problem anew, with nothing kept of earlier searches."""
    planner = prepare(Request(model, cluster=cluster, layers=4, batch=8 * 2, recompute=recompute))
    mesh = DeviceMesh(axis_names(len(sizes)), sizes)
    return lambda: planner.changed().problem(mesh, zero=zero)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-zero{case[3]}")
def test_nothing_better_is_given_up(case: tuple[str, str, tuple[int, ...], int, str]) -> None:
    make = fresh(*case)
    best = search(make())
    assert best.optimal
    bound = quick_bound(make(), "time")
    assert bound <= best.value * (1 + TIE)
    for share in (0.5, 0.9):  # between what a quick search knows and the optimum
        problem, most = make(), bound + share * (best.value - bound)
        given_up = search(problem, abandon_above=most)
        assert given_up.bound <= best.value * (1 + TIE)
        assert given_up.bound > most or best.value - bound <= TIE * best.value
        later = search(problem)
        assert later.optimal and later.value == pytest.approx(best.value, rel=TIE)
    found = search(make(), abandon_above=best.value * 1.001)
    assert found.optimal and found.value == pytest.approx(best.value, rel=TIE)
