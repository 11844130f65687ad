"""The block that lessons draw and let build: placements and messages by hand, and every state in its lesson."""

import re

import numpy as np
import pytest

from explorer.figures.svg_tensors import svg
from explorer.graph.stripes import split_of
from explorer.learn.blocks import arranged, placing
from explorer.learn.blocks.arranged import WEIGHTS, ArrangedBlock
from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.planners import l13_choose
from explorer.learn.lessons.times import l16_zero
from explorer.learn.pictures import block
from planner_core.planning.request import Request

pytestmark = pytest.mark.lessons


LLAMA = Learner(Request("llama-3-8b"))
SIZE = 16 * 4096 * 4096 * 2
"""Bytes of the activations of a layer's stream: samples, tokens, features, two bytes each."""
COLUMNS_ROWS = dict(zip(WEIGHTS, ("S(0)", "S(0)", "S(0)", "S(1)", "S(0)", "S(0)", "S(1)"), strict=True))
MEGATRON = dict(zip(WEIGHTS, COLUMNS_ROWS.values(), strict=True))
FULL = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
"""Bytes of a layer's seven weights in bf16."""


def at_gates(case: ArrangedBlock) -> list[tuple[int, str, str, str]]:
    return sorted((m.half, m.gate, m.sent.phase, m.sent.kind) for m in case.messages if m.sent.num_bytes >= 2**20)


def test_f_stands_before_the_first_products_and_g_behind_the_last() -> None:
    case = arranged.arrange_megatron(LLAMA, 4, False)
    assert case and case.weights == MEGATRON and not case.gathered
    assert at_gates(case) == [
        (h, gate, phase, "all_reduce") for h in (0, 1) for gate, phase in (("end", "forward"), ("in", "backward"))
    ]
    assert {m.sent.num_bytes for m in case.messages} == {SIZE}
    for h in (0, 1):  # whole, cut by features, terms, whole
        assert [case.wires[h, p] for p in ("start", "in", "middle", "last", "end", "sum")] == [
            "R",
            "R",
            "S(2)",
            "S(2)",
            "P",
            "R",
        ]


def test_sequence_parallelism_halves_each_message_and_cuts_what_lies_between() -> None:
    case = arranged.arrange_megatron(LLAMA, 4, True)
    assert case and case.weights == MEGATRON
    there, back = {"in": "all_gather", "end": "reduce_scatter"}, {"in": "reduce_scatter", "end": "all_gather"}
    assert at_gates(case) == sorted(
        (h, gate, phase, kinds[gate])
        for h in (0, 1)
        for phase, kinds in (("forward", there), ("backward", back))
        for gate in kinds
    )
    assert [case.wires[0, p] for p in ("start", "in", "end", "sum")] == ["S(1)", "R", "P", "S(1)"]
    norms = [m.sent.num_bytes for m in case.messages if m.gate == "norm"]
    assert norms == [4 * 4096] * 2  # the norms' own weights are whole, their tokens are not; summed in float32


def test_fsdp_goes_around_the_block() -> None:
    case = l16_zero.arrange_block(LLAMA, {"m": 1})
    assert case and (case.devices, case.groups) == (8, 2) and case.gathered == set(WEIGHTS)
    moved = block.weight_traffic(m for m in case.messages if block.carries_weight(case, m))
    # a GPU's slices of the weights in bf16, twice; their gradients in fp32
    assert moved == {
        ("forward", "all_gather"): FULL // 8,
        ("backward", "all_gather"): FULL // 8,
        ("backward", "reduce_scatter"): 2 * FULL // 8,
    }
    assert {m.sent.axes for m in case.messages if block.carries_weight(case, m)} == {(0,)}


def test_no_group_of_neighbours_no_block() -> None:
    assert arranged.arrange_megatron(LLAMA, 3, False) is None  # 32 heads
    assert arranged.arrange_by_hand(LLAMA, 4, ("S(0)",) * 7) is not None
    bare = arranged.arrange_unrunnable(LLAMA, 4, ("R",) * 7)
    assert not bare.messages and "down_proj" in svg(block.draw_block(bare, block.PLACED), "a block")


CASES = {
    5: lambda values: arranged.arrange_megatron(LLAMA, 2, False),
    6: lambda values: arranged.arrange_megatron(LLAMA, values["t"], False),
    7: lambda values: arranged.arrange_megatron(LLAMA, values["n"], True),
    13: lambda values: l13_choose.arrange_choice(LLAMA, values),
    16: lambda values: l16_zero.arrange_block(LLAMA, values),
}
"""The block that a lesson draws at its settings."""


@pytest.mark.parametrize("lesson, letters", [(5, 2), (6, 4), (7, 0), (16, 0), (13, 0)])
def test_each_lesson_draws_its_state(lesson: int, letters: int) -> None:
    """A plate for each message that an activation waits for, in the place where the plan has it."""
    found = LESSONS[lesson - 1]
    case = CASES[lesson](found.defaults())
    assert case
    pictures = [s.picture for s in found.scene(LLAMA, found.defaults()).steps if 'class="messages"' in s.picture]
    assert pictures and len(re.findall(r">[fg]</text>", pictures[0])) == letters
    halves = (1,) if lesson == 5 else (0, 1)
    told = [m for m in case.messages if m.half in halves and not block.carries_weight(case, m)]
    assert len(re.findall(r"<title>", pictures[0])) == len(told)
    assert all(re.search(rf"<title>{m.sent.kind}, {m.sent.phase}", pictures[0]) for m in told)


def test_the_builder_holds_the_cost_of_every_choice() -> None:
    lesson = LESSONS[12]
    picture = lesson.scene(LLAMA, lesson.defaults()).steps[0].picture
    found = l13_choose.score_choices(LLAMA, "LlamaDecoderLayer", 4)
    table = re.search(r'data-seconds="([^"]*)"', picture)
    assert table and len(cells := table[1].split(",")) == 3**7
    assert all((cell == "") == (not np.isfinite(s)) for cell, s in zip(cells, found.comm_s, strict=True))
    row = l13_choose.row_of_choice(lesson.defaults())
    assert int(cells[row]) == round(found.comm_s[row] * 1e6)
    assert picture.count('role="spinbutton"') == 7 and picture.count('class="cut"') == 3


def test_a_weight_is_called_the_same_in_the_lessons_and_on_the_overview() -> None:
    """Columns of the mathematics are dim 0 of PyTorch's weight, in the block of the lessons, in their prose, and in the graph's words."""
    case = arranged.arrange_megatron(LLAMA, 2, False)
    assert case and case.plan
    for name, placed in case.plan.blocks[case.block].params.items():
        short = placing.short_name(name)
        if short in WEIGHTS:
            dim = {"columns": 0, "rows": 1}[block.CUTS[case.weights[short]]]
            assert split_of(placed, case.plan.mesh).words == f"dim {dim} / 2" and case.weights[short] == f"S({dim})"
    for cut, dim in (("columns", 0), ("rows", 1)):
        says = LESSONS[1].scene(LLAMA, {**LESSONS[1].defaults(), "cut": cut, "devices": 2}).steps[1].says
        assert f"a cut by {cut} is one along dim {dim} there" in says and f"“dim {dim} / 2” on the Overview" in says
    for number in (5, 6):
        scene = LESSONS[number - 1].scene(LLAMA, LESSONS[number - 1].defaults())
        assert any(re.search("S\\(0\\)[^.]*“dim 0” on the Overview[^.]*by columns", step.says) for step in scene.steps)
