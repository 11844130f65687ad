"""Predictions that are drawn: their truths by hand, their expected mistakes, and that nothing is given away before."""

import html
import json
import re
from typing import Any

import pytest

from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.pictures.sketch import ExpectedMistake, Handle, Sketch, bars
from explorer.text import units
from planner_core.planning.request import Request
from tests.support.lessons import LLAMA, numbers

pytestmark = pytest.mark.lessons


GIB, PARAMS, GPUS, GROUP = 2**30, 8_030_261_248, 16, 8
DRAWN = {1: 6, 14: 3, 15: 1, 16: 1, 17: 2}
"""The step of each lesson that is drawn."""


def sketch(number: int, **values: int | str) -> dict[str, Any]:
    lesson = LESSONS[number - 1]
    step = lesson.scene(LLAMA, {**lesson.defaults(), **values}).steps[DRAWN[number] - 1]
    assert step.title.startswith("Draw it") and "does not wait" in step.says.split("\n")[0]
    found: dict[str, Any] = json.loads(html.unescape(re.search(r'data-sketch="([^"]*)"', step.picture)[1]))  # type: ignore[index]
    return found


def truths(number: int, **values: int | str) -> list[float]:
    return [h["truth"] for h in sketch(number, **values)["handles"]]


@pytest.mark.parametrize("number", DRAWN)
def test_nothing_is_given_away_and_mistakes_are_told_from_the_truth(number: int) -> None:
    found = sketch(number)
    handles, most = found["handles"], found["most"]
    assert all(0 <= h["truth"] <= most and 0 <= h["start"] <= most for h in handles)
    near = [abs(h["start"] - h["truth"]) <= max(0.1 * h["truth"], 0.04 * most) for h in handles]
    assert sum(near) <= len(handles) // 2, "whoever moves nothing is wrong in most"
    assert found["slips"] and found["why"] and all(slip["why"] for slip in found["slips"])
    for slip in found["slips"]:
        pairs = [(v, h["truth"]) for v, h in zip(slip["values"], handles, strict=True) if v is not None]
        assert all(0 <= v <= most for v, _ in pairs), slip
        assert sum(abs(v - t) for v, t in pairs) / len(pairs) / most > 0.02, slip
    assert len({slip["why"] for slip in found["slips"]}) == len(found["slips"])
    assert len({tuple(slip["values"]) for slip in found["slips"]}) == len(found["slips"])


@pytest.mark.parametrize("values", [{}, {"batch": 1}, {"recompute": "full"}])
def test_1_each_gpu_holds_the_planners_bytes(values: dict[str, Any]) -> None:
    of, found = numbers(1, **values), sketch(1, **values)
    whole, early = of["shared_whole"], of["1_early"]
    for n, truth in zip((2, 4, 8), truths(1, **values), strict=True):
        assert truth == of[f"{n}_peak"] / GIB
        assert truth * GIB == pytest.approx(max(whole + (early - whole) / n, of["1_peak"] / n), rel=0.03)
    divided = next(s for s in found["slips"] if "divided everything" in s["why"])["values"]
    assert divided == pytest.approx([of["1_peak"] / n / GIB for n in (2, 4, 8)])


@pytest.mark.parametrize("speed", [8, 2])
def test_14_a_gather_shows_what_compute_does_not_hide_and_sums_show_whole(speed: int) -> None:
    tokens, found = (512, 2048, 8192), truths(14, speed=speed)
    of = [numbers(14, tokens=t, speed=speed) for t in tokens]
    assert found[:3] == pytest.approx([1e3 * max(0.0, x["gather_s"] - x["compute_s"]) for x in of])
    assert found[3:] == pytest.approx([1e3 * x["sums_s"] for x in of])
    assert found[:3] == sorted(found[:3], reverse=True) and found[3:] == sorted(found[3:])


@pytest.mark.parametrize("tokens", [512, 2048])
def test_15_a_layer_begins_with_the_longer_of_both(tokens: int) -> None:
    of = numbers(15, tokens=tokens)
    each = 1e3 * max(of["forward_compute_s"] + 0.196 * of["forward_traffic_s"], of["forward_traffic_s"])
    assert each == pytest.approx(1e3 * of["forward_s"])
    assert truths(15, tokens=tokens) == pytest.approx([0, each, each, 2 * each])
    assert truths(15, tokens=tokens, way="data") == truths(15, tokens=tokens), "it is about FSDP, whatever is chosen"


def test_16_bytes_of_each_stage_by_hand() -> None:
    """bf16 copy 2, fp32 weights 4, averages 8, gradient 4; over 16 GPUs, or 8 of a group."""
    assert truths(16) == [2 + 12 / GPUS + 4, 2 + 16 / GPUS, 16 / GPUS, 16 / GROUP]
    assert truths(16, m=4) == truths(16)
    assert "2 + 12/16 + 4 = 6.75" in sketch(16)["why"]


@pytest.mark.parametrize("m", [1, 4])
def test_17_the_way_back_ends_with_weights_states_and_a_part_of_the_gradients(m: int) -> None:
    found, of = truths(17, m=m), numbers(17, m=m)
    stays, grads = 12 * PARAMS / GPUS, 4 * PARAMS / GPUS
    assert of["standing"] == pytest.approx(stays, rel=2e-3)
    assert found[-1] * GIB == pytest.approx(stays + grads, rel=2e-3)
    assert found == sorted(found, reverse=True) and found[0] * GIB < of["standing"] + of["kept"] + grads


def test_other_models_have_something_to_draw_that_is_true() -> None:
    """Heads of GPT-2 XL do not divide by 8: what each GPU holds is no share of one's, and is not told as one."""
    lesson, gpt = LESSONS[0], Learner(Request("gpt2-xl"))
    scene = lesson.scene(gpt, lesson.defaults())
    picture = html.unescape(scene.steps[5].picture)
    assert f"holds {units.memory(scene.numbers['8_peak'])}, one GPU {units.memory(scene.numbers['1_peak'])}" in picture
    found = bars(
        Sketch(
            "x",
            "GiB",
            10.0,
            (Handle("a", 1.0, 2.0),),
            (ExpectedMistake("a", (11.0,), "too far"), ExpectedMistake("b", (9.0,), "far")),
            "why",
        ),
        ("b", 1.0),
    )
    assert "too far" not in found and "far" in found, "nobody can draw beyond the scale"
