"""The lessons on time and memory: every number computed again, prices by another way through the library."""

from __future__ import annotations

import re

import pytest

from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.times import l14_pays
from planner_core.planning import price
from planner_core.planning.request import Request
from tests.support.fitted import H100, inside_s, turn_s

LLAMA = Learner(Request("llama-3-8b"))
LAYERS, HIDDEN, INNER, SEQ = 32, 4096, 14336, 4096
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + 3 * HIDDEN * INNER
"""Weights of a layer's products: q and o, k and v, gate, up and down."""
FLOPS_PER_S = H100["flops_efficiency"] * 989e12


def numbers(number: int, **values: float | str) -> dict[str, float]:
    lesson = LESSONS[number - 1]
    return dict(lesson.scene(LLAMA, {**lesson.defaults(), **values}).numbers)


# --- 14: when does it pay? -------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [512, 1024, 8192])
def test_14_compute_gather_and_sums_of_a_layer(tokens: int) -> None:
    found = numbers(14, tokens=tokens)
    assert found["weights"] == LAYER
    assert found["compute_s"] == pytest.approx(2 * LAYER * tokens / FLOPS_PER_S)
    assert found["gather_s"] == pytest.approx(turn_s(2 * LAYER, 2))
    assert found["sums_s"] == pytest.approx(2 * inside_s(8 * tokens * HIDDEN * 2, 8))
    assert found["crossing"] == pytest.approx(turn_s(2 * LAYER, 2) * FLOPS_PER_S / (2 * LAYER))
    bytes_moved = 2 * (tokens * HIDDEN + HIDDEN * INNER + tokens * INNER)
    assert found["intensity"] == pytest.approx(2 * tokens * HIDDEN * INNER / bytes_moved)
    assert found["ridge"] == pytest.approx(FLOPS_PER_S / (3.35e12 * H100["memory_efficiency"]))


def test_14_slower_wires_move_the_crossing() -> None:
    """An eighth of the bandwidth: the transfer is eight times as long, the latency as before."""
    now, slow = (numbers(14, speed=speed)["crossing"] for speed in (1, 0.125))
    assert 6 < slow / now < 8


@pytest.mark.parametrize(
    "name, layout, micro_batch",
    [("data parallel", "dp=16,zero=1", 1), ("FSDP", "fsdp=16", 1), ("HSDP", "dp=2,fsdp=8", 1), ("tensor parallel 8", "fsdp=2,tp=8,sp", 8)],
)  # fmt: skip
def test_14_prices_are_those_of_the_command_price(name: str, layout: str, micro_batch: int) -> None:
    """8 samples of 1 024 tokens in a group of 8 GPUs, or one for each: the same tokens per GPU."""
    found = price("llama-3-8b", layout=layout, micro_batch=micro_batch, seq=1024, advise=False)
    assert found.plan is not None
    assert numbers(14, tokens=1024)[f"{name}_s"] == pytest.approx(found.plan.cost.step_time_s, rel=1e-6)


def test_14_the_map_has_its_regimes() -> None:
    """Few tokens and slow links: tensor parallelism in the node. Many: what does not fit whole is gathered."""
    cases = {tokens: l14_pays.priced(LLAMA, tokens) for tokens in l14_pays.TOKENS}
    slow, fast = (l14_pays.scaled(LLAMA.cluster, speed) for speed in (0.125, 2))
    assert l14_pays.winner(cases[512], slow) == "tensor parallel 8"
    assert l14_pays.winner(cases[8192], fast) == "FSDP" and l14_pays.winner(cases[8192], slow) == "HSDP"
    for found in cases.values():
        for cluster in (slow, fast):
            took = {name: sum(case.seconds(cluster)) for name, case in found.items() if case.plan.fits}
            assert l14_pays.cell(found, cluster).split(" ≈ ")[0] == min(took, key=lambda name: took[name])


def test_14_the_question_asks_for_the_crossing() -> None:
    question = LESSONS[13].question(LLAMA, LESSONS[13].defaults())
    told = re.sub(r"\D", "", question.options[question.answer])
    assert int(told) == pytest.approx(numbers(14)["crossing"], rel=0.05)
