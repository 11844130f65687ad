"""Lesson 24: its tables, products, prices and bounds, each worked out another way."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from explorer.learn.blocks import placing
from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.planners import l13_choose, l24_think
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.planning.request import Request

pytestmark = pytest.mark.lessons


LLAMA = Learner(Request("llama-3-8b"))
LESSON = LESSONS[23]


def shown(**values: int) -> dict[str, float]:
    return dict(LESSON.scene(LLAMA, {**LESSON.defaults(), **values}).numbers)


def test_ways_of_one_copy_are_the_product_of_what_each_part_may_be() -> None:
    planner = placing.on_neighbours(LLAMA, 4)
    problem = planner.problem(planner.cost_model(DeviceMesh(("gpus",), (4,)), zero=3))
    sizes = problem.first_variant("LlamaDecoderLayer").sizes.values()
    found = shown(t=4)
    assert found["ways"] == pytest.approx(math.log10(math.prod(sizes)))
    assert found["all_ways"] == pytest.approx(32 * found["ways"]) and found["copies"] == 32


def test_products_of_tables_are_the_least_over_all_ways_between() -> None:
    run = l24_think.search_model(LLAMA, 4).run
    one, states = run.copy_seconds, range(len(run.states))
    for n, table in l24_think.table_powers(run)[:3]:  # 1, 2, 4 copies: every way looked at
        for i, j in itertools.product(states, states):
            ways = [(i, *middle, j) for middle in itertools.product(states, repeat=n - 1)]
            least = min(sum(one[a, b] for a, b in itertools.pairwise(way)) for way in ways)
            assert table[i, j] == least or table[i, j] == pytest.approx(least)
    slow = one
    for _ in range(31):
        slow = np.min(slow[:, :, None] + one[None], axis=1)
    np.testing.assert_allclose(run.run_seconds, slow, rtol=1e-9)
    assert (
        f"has {1e3 * slow.min():,.3f} ms)".replace(",", "\u202f")
        in LESSON.scene(LLAMA, {**LESSON.defaults(), "t": 4}).steps[3].says
    )


@pytest.mark.parametrize("t", [2, 4, 8])
def test_what_is_printed_adds_up_as_it_is_printed(t: int) -> None:
    """The table of a copy, the sums through each state, and all copies: in whole microseconds, to the last digit."""
    steps = LESSON.scene(LLAMA, {**LESSON.defaults(), "t": t}).steps
    table, sums, doubled = (figures(step.picture) for step in steps[1:4])
    least = min(map(min, table))
    assert f"**{least / 1000:.3f} ms**" in steps[1].says
    assert len(sums) == len(table) and all(a + b == together for a, b, together in sums)
    assert f"**{min(s[2] for s in sums) / 1000:.3f} ms**" in steps[2].says
    one = np.array(l24_think.search_model(LLAMA, t).run.copy_seconds * 1e6).round()
    all_ = one
    for row in doubled:
        assert row[-1] == (copies := 2 ** doubled.index(row)) * least and row[-2] == all_.min()
        all_ = np.min(all_[:, :, None] + all_[None], axis=1)
    found, exact = shown(t=t)["all_ms"], 1e3 * l24_think.search_model(LLAMA, t).run.run_seconds.min()
    assert round(1e3 * found) == doubled[-1][-2] and abs(found - exact) <= copies * 0.5e-3


@pytest.mark.parametrize("copies", [2, 3, 6, 32, 48])
def test_copies_that_are_no_power_of_two_are_put_together(copies: int) -> None:
    run = replace(l24_think.search_model(LLAMA, 4).run, copies=copies)
    slow = run.copy_seconds
    for _ in range(copies - 1):
        slow = l24_think.then(slow, run.copy_seconds)
    n, made = l24_think.table_powers(run)[-1]
    assert n == copies
    np.testing.assert_allclose(made, slow, rtol=1e-9)


def figures(table: str) -> list[list[int]]:
    """The milliseconds in the rows of a table, in microseconds."""
    rows = [re.findall(r"<td[^>]*>([\d\u202f]+\.\d{3})</td>", row) for row in table.split("<tr")]
    return [[round(1000 * float(x.replace("\u202f", ""))) for x in row] for row in rows if row]


@pytest.mark.parametrize("copies, products", [(2, 1), (3, 2), (32, 5), (48, 6), (80, 7), (126, 11)])
def test_products_needed_by_squaring(copies: int, products: int) -> None:
    binary = f"{copies:b}"
    assert l24_think.num_products(copies) == products == len(binary) - 1 + binary.count("1") - 1


@pytest.mark.parametrize("room", LESSONS[23].controls[1].options)
def test_the_price_gives_the_highest_bound_and_the_rest_is_counted(room: int) -> None:
    found = l13_choose.score_choices(LLAMA, "LlamaDecoderLayer", 4)
    ms, gib = found.comm_s * 1e3, found.memory_bytes / units.GIB
    quick = gib[ms == ms.min()].min()
    allowed = gib.min() + room / 100 * (quick - gib.min())
    prices = np.linspace(0, 20, 2001)
    bounds = [(ms + p * gib).min() - p * allowed for p in prices]
    shown_ = shown(t=4, room=room)
    assert shown_["room_gib"] == pytest.approx(allowed)
    assert max(bounds) <= shown_["bound_ms"] * (1 + 1e-9) and shown_["bound_ms"] == pytest.approx(max(bounds), rel=0.02)
    best = min(m for m, g in zip(ms, gib, strict=True) if g <= allowed)
    assert shown_["best_ms"] == best >= shown_["bound_ms"]
    line = [p_ms + shown_["price"] * (g - allowed) for p_ms, g in zip(ms, gib, strict=True)]
    assert shown_["left"] == sum(x < best - 1e-9 for x in line) and min(line) == pytest.approx(shown_["bound_ms"])


def test_the_proof_is_the_planners() -> None:
    found, thought = shown(t=8), l24_think.search_model(LLAMA, 8)
    assert found["proven"] == 1 and thought.answer.assignment is not None
    assert found["bound_s"] == pytest.approx(thought.answer.assignment.step_time_s, rel=1e-6)
    # the weighted mean of a layer's two sides is never more than its time
    assert found["all_ms"] / 1e3 <= thought.answer.value
    says = LESSON.scene(LLAMA, LESSON.defaults()).steps[-1]
    assert units.seconds(thought.answer.value) in says.picture and "yes" in says.picture
    assert "nothing to prove" in LESSON.scene(LLAMA, {**LESSON.defaults(), "t": 2}).steps[-1].picture  # it does not fit
