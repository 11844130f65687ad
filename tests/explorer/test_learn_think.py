"""Lesson 24: its tables, products, prices and bounds, each worked out another way."""

import itertools
import math

import numpy as np
import pytest

from explorer.learn.blocks import placing
from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.planners import l13_choose, l24_think
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.planning.request import Request

LLAMA = Learner(Request("llama-3-8b"))
LESSON = LESSONS[23]


def shown(**values: int) -> dict[str, float]:
    return dict(LESSON.scene(LLAMA, {**LESSON.defaults(), **values}).numbers)


def test_ways_of_one_copy_are_the_product_of_what_each_part_may_be() -> None:
    problem = placing.neighbours(LLAMA, 4).problem(DeviceMesh(("gpus",), (4,)))
    sizes = problem.compiled("LlamaDecoderLayer").sizes.values()
    found = shown(t=4)
    assert found["ways"] == pytest.approx(math.log10(math.prod(sizes)))
    assert found["all_ways"] == pytest.approx(32 * found["ways"]) and found["copies"] == 32


def test_products_of_tables_are_the_least_over_all_ways_between() -> None:
    run = l24_think.thought(LLAMA, 4).run
    one, states = run.one, range(len(run.states))
    for n, table in l24_think.squares(run)[:3]:  # 1, 2, 4 copies: every way looked at
        for i, j in itertools.product(states, states):
            ways = [(i, *middle, j) for middle in itertools.product(states, repeat=n - 1)]
            least = min(sum(one[a, b] for a, b in itertools.pairwise(way)) for way in ways)
            assert table[i, j] == least or table[i, j] == pytest.approx(least)
    slow = one
    for _ in range(31):
        slow = np.min(slow[:, :, None] + one[None], axis=1)
    np.testing.assert_allclose(run.all, slow, rtol=1e-9)
    assert shown(t=4)["all_ms"] == pytest.approx(1e3 * slow.min())
    # it is told: the sum of two copies, and that of all
    steps = LESSON.scene(LLAMA, {**LESSON.defaults(), "t": 4}).steps
    i, j = divmod(int(slow.argmin()), len(slow))
    assert f"{1e3 * (one[i] + one[:, j]).min():,.3f} ms" in steps[2].says
    assert f"{1e3 * slow.min():,.3f} ms".replace(",", "\u202f") in steps[3].says


@pytest.mark.parametrize("copies, products", [(2, 1), (3, 2), (32, 5), (48, 6), (80, 7), (126, 11)])
def test_products_needed_by_squaring(copies: int, products: int) -> None:
    binary = f"{copies:b}"
    assert l24_think.products(copies) == products == len(binary) - 1 + binary.count("1") - 1


@pytest.mark.parametrize("room", l24_think.ROOMS)
def test_the_price_gives_the_highest_bound_and_the_rest_is_counted(room: int) -> None:
    found = l13_choose.scored(LLAMA, "LlamaDecoderLayer", 4)
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
    found, thought = shown(t=8), l24_think.thought(LLAMA, 8)
    assert found["proven"] == 1 and thought.answer.assignment is not None
    assert found["bound_s"] == pytest.approx(thought.answer.assignment.step_time_s, rel=1e-6)
    # the weighted mean of a layer's two sides is never more than its time
    assert found["all_ms"] / 1e3 <= thought.answer.value
    says = LESSON.scene(LLAMA, LESSON.defaults()).steps[-1]
    assert units.seconds(thought.answer.value) in says.picture and "yes" in says.picture
    assert "nothing to prove" in LESSON.scene(LLAMA, {**LESSON.defaults(), "t": 2}).steps[-1].picture  # it does not fit
