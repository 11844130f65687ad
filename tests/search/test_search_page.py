"""The worked example of docs/SEARCH.md: every number of it, computed with the functions that the page names."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from planner_core.search.algebra.elimination import eliminate
from planner_core.search.algebra.minplus import MinPlusPower, min_plus_power

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "SEARCH.md").read_text(encoding="utf-8")
PRODUCT_MS = 2.0


def table(head: str, columns: int) -> np.ndarray:
    """The numbers of the page's table with this head: the last `columns` of each row."""
    lines = iter(PAGE.splitlines())
    assert any(line.startswith(f"| {head} |") for line in lines), head
    rows = [line.strip("|").split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), lines)][1:]
    return np.array([[float(cell) for cell in row[-columns:]] for row in rows])


def test_a_block_becomes_a_table() -> None:
    sizes = {"x": 2, "w": 2, "y": 2}
    deliver, leave = table("cost of delivering x", 2), table("cost of leaving in y", 2)
    block = eliminate(sizes, [(("x", "w"), deliver), (("w", "y"), leave)], ["w"], ("x", "y"))
    assert np.array_equal(PRODUCT_MS + block.table, table("block", 2))
    assert block.assignment({"x": 0, "y": 1})["w"] == 1  # by rows, as the page says


def test_copies_are_powers_and_the_way_back_names_each() -> None:
    block = table("block", 2)
    four = min_plus_power(MinPlusPower(block[None]), 4)
    assert np.array_equal(min_plus_power(MinPlusPower(block[None]), 2).cost[0], table("two copies", 2))
    assert np.array_equal(four.cost[0], table("four copies", 2))
    ends = {(x, y): (0, 2)[x] + four.cost[0][x, y] + (0, 1)[y] for x in (0, 1) for y in (0, 1)}
    assert list(ends.values()) == [11, 10, 12, 11] and min(ends, key=lambda e: ends[e]) == (0, 1)
    assert [0, *four.cheapest_path(0, 0, 1), 1] == [0, 1, 1, 1, 1]  # R, S, S, S, S
    brute = min(
        sum(block[a, b] for a, b in itertools.pairwise(way)) + (0, 2)[way[0]] + (0, 1)[way[-1]]
        for way in itertools.product((0, 1), repeat=5)
    )
    assert brute == 10 and "**10 ms**" in PAGE


def test_weighted_means_bound_a_maximum() -> None:
    rows, k = table("way", 7), 0.1
    compute, traffic = rows[:, 0], rows[:, 1]
    sides = np.stack([compute + k * traffic, traffic])
    best = sides.max(axis=0)
    assert np.allclose(rows[:, 2], sides[0]) and np.allclose(rows[:, 3], best)
    for column, u in ((4, 1.0), (5, 0.0), (6, 0.87)):
        mean = u * sides[0] + (1 - u) * sides[1]
        assert np.allclose(rows[:, column], mean, atol=0.011) and (mean <= best + 1e-12).all()
    shares = np.linspace(0, 1, 10001)[:, None]
    means = shares * sides[0] + (1 - shares) * sides[1]
    assert shares[means[:, :2].min(axis=1).argmax()] == pytest.approx(0.87, abs=0.005)  # p and q are seen
    assert best.argmin() == 2 and best.min() == 9.9  # r


def test_a_price_bounds_what_fits_and_the_limit_holds_the_optimum() -> None:
    plans = dict(zip("abcd", table("plan", 3), strict=True))
    seconds, size, priced = (np.array([p[i] for p in plans.values()]) for i in range(3))
    assert np.allclose(seconds + 1 * size, priced)
    bound, fits = priced.min() - 1 * 8, size <= 8
    assert bound == 11 and all(s >= bound for s in seconds[fits])
    limit = plans["b"][0] + 8
    assert limit == 22 and (priced < limit).all()
    assert seconds[fits].min() == plans["c"][0] == 11.5 and "**c with 11.5 s is the optimum**" in PAGE


def test_two_copies_may_differ() -> None:
    one = ((3, 4), (5, 1))
    sums = {(a[0] + b[0], a[1] + b[1]) for a in one for b in one}
    said = {(int(s), int(g)) for s, g in re.findall(r"\((\d+) s, (\d+) GB\)", PAGE)}
    assert sums == said and min(p for p in sums if p[1] <= 6) == (8, 5)
