"""Lesson 25: bubbles by the formula, the learner's stages by the command `price`, the film against the simulated step."""

import contextlib
import io
import re
from functools import cache

import pytest

from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.times import l25_pipeline as lesson
from explorer.learn.pictures.charts import WIDTH
from planner_core.cost import Pass
from planner_core.planning import Request, price

LLAMA = Learner(Request("llama-3-8b"))
SEQ = 4096


@cache
def numbers(**values: int | str) -> dict[str, float]:
    made = LESSONS[24]
    return dict(made.scene(LLAMA, {**made.defaults(), **values}).numbers)


@pytest.mark.parametrize("m", [4, 32])
def test_the_bubbles_by_hand_are_those_of_the_formula(m: int) -> None:
    """Turns of 1 forward and 2 backward on four ranks: 3 turns of three ranks are bubble, with two stages a rank half of them; zero
    bubble leaves the forwards alone."""
    for order, waits in (("gpipe", 9.0), ("1f1b", 9.0), ("interleaved", 4.5), ("zb", 3.0)):
        found = numbers(order=order, m=m)
        assert found["hand_step"] == pytest.approx(3 * m + waits), order
        assert found["hand_bubble"] == pytest.approx(waits / (3 * m + waits)), order
    assert numbers(order="gpipe", m=m)["held"] == m
    assert numbers(order="1f1b", m=m)["held"] == 4
    assert numbers()["alone_bubble"] == 0.75
    assert numbers()["alone_step"] == 12
    assert numbers(m=m)["hand_work"] == 3 * m
    assert numbers(m=m, stages=2)["formula"] == pytest.approx(1 / (m + 1))
    assert numbers(m=m, stages=4, order="interleaved")["formula"] == pytest.approx(3 / (2 * m + 3))
    made = LESSONS[24]
    asked = made.question(LLAMA, {**made.defaults(), "m": m})
    assert asked.values[asked.answer] == pytest.approx(100 * 3 / (2 * m + 3))


@pytest.mark.parametrize(
    ("order", "layout"),
    [
        ("1f1b", "dp=4,pp=4,schedule=1f1b,zero=1"),
        ("zb", "dp=4,pp=4,schedule=zb,zero=1"),
        ("interleaved", "dp=4,pp=4,vp=2,schedule=interleaved,zero=1"),
    ],
)
def test_the_simulated_step_is_what_price_says(order: str, layout: str) -> None:
    found = numbers(order=order, m=8)
    there = price("llama-3-8b", layout=layout, micro_batch=1, accumulate=8, seq=SEQ, advise=False).plan
    assert there
    assert found["step_s"] == pytest.approx(there.cost.step_time_s, rel=0.01)
    assert there.cost.pipeline
    assert found["bubble"] == pytest.approx(there.cost.pipeline.bubble_s / there.cost.step_time_s, rel=0.03)
    assert found["handed"] == SEQ * 4096 * 2, "one sample of 4 096 tokens, 4 096 numbers of two bytes each"
    assert found["batch"] == 32


def test_slower_links_turn_the_choice() -> None:
    fast, slow = numbers(speed=50, m=16), numbers(speed=1, m=16)
    assert slow["stages_s"] < slow["fsdp_s"] / 2
    assert fast["fsdp_s"] < fast["stages_s"]
    assert slow["stages_s"] < 2 * fast["stages_s"], "stages send little"


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved", "zb"])
def test_the_film_shows_the_simulated_work(order: str) -> None:
    time = lesson.simulate_by_hand(order, 8)
    film = lesson.pipeline_film(time)
    assert len(film.cells) == len(time.spans)
    assert all(cell.bodies[-1] is not None for cell in film.cells), "all work is done at the last stop"
    assert not any(cell.bodies[0] for cell in film.cells)
    for cell, span in zip(film.cells, time.spans, strict=True):
        assert cell.x == pytest.approx(lesson.NAMES_WIDTH + span.start_s / time.step_s * (WIDTH - lesson.NAMES_WIDTH))
        assert cell.y == span.rank * lesson.ROW
    idle = re.search(r"; (.+?) % of all time", film.said[-1])
    assert idle and float(idle[1]) == pytest.approx(100 * time.bubble_s / time.step_s, rel=0.05)
    kinds = {s.work.what for s in time.spans}
    assert (Pass.WEIGHT in kinds) is (order == "zb")


def test_what_is_handed_on_flies_to_the_next_rank() -> None:
    film = lesson.pipeline_film(lesson.simulate_by_hand("gpipe", 1), flights=True)
    assert len(film.flights) == 6, "three forward and three back"
    assert all(abs(f.end[1] - f.start[1]) == lesson.ROW for f in film.flights)


def test_the_listing_prints_the_step_by_hand() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(LESSONS[24].code, "lesson 25", "exec"), {"__name__": "__main__"})
    found = numbers(order="1f1b", m=4)
    assert f"step {found['hand_step']:g} turns" in out.getvalue()
    assert f"bubble {100 * found['hand_bubble']:.3g} %" in out.getvalue()


def test_gpus_that_ranks_cannot_share_and_short_models_are_replaced() -> None:
    three = Learner(Request("gpt2-xl", cluster="1x8-h100:gpus=2"))
    found, note = lesson.stageable_learner(three, 4)
    assert found.cluster.num_gpus == 16
    assert "two nodes" in note
    short = Learner(Request("gpt2-xl", layers=2))
    found, note = lesson.stageable_learner(short, 4)
    assert found.name == "Llama-3-8B"
    assert "too few layers" in note


def test_the_link_leads_to_the_same_stages() -> None:
    made = LESSONS[24]
    assert made.focus
    query = made.focus(LLAMA, {**made.defaults(), "m": 8})
    assert query["plan"] == "our-current-setup"
    assert query["setup"].split(",")[:2] == ["dp=4", "pp=4"]
