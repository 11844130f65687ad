"""Every row of every rule, on one and two mesh axes, against the unsharded op: results and gradients (see `judge`)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_core.core.placement import P, R, Shard
from planner_core.models.zoo import ZOO, load_snapshot
from planner_core.ops.registry import known_functions, operator, rows, rule_of
from planner_core.ops.rules import Row
from tests.support.operators.cases import CASES, t
from tests.support.operators.every_case import EVERY, mark_repetitions
from tests.support.operators.judge import Case, all_rows, even, judge


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_row_on_one_axis(case: Case) -> None:
    op, values = case.op()
    for row in all_rows(case):
        if even(op, values, (row,), (2,)):
            assert judge(case, (row,), (2,)) == "", f"{case} by row {row.name}: {row}"


@pytest.mark.parametrize("case", mark_repetitions(), ids=str)
def test_every_two_rows_on_two_axes(case: Case) -> None:
    pairs = list(itertools.product(all_rows(case), repeat=2))
    op, values = case.op()
    for chosen in random.Random(0).sample(pairs, min(len(pairs), 20)):
        if even(op, values, chosen, (2, 2)):
            assert judge(case, chosen, (2, 2)) == "", f"{case} by rows {[r.name for r in chosen]}: {chosen}"


def test_three_parts_and_unequal_axes() -> None:
    case = Case("linear", F.linear, (t(6, 12), t(12, 12), t(12)))
    for chosen in itertools.product(all_rows(case), repeat=2):
        assert judge(case, chosen, (3, 2)) == ""
    fused = Case("split", torch.split, (t(6, 24), [6, 12, 6], 1))
    for chosen in itertools.product(all_rows(fused), repeat=2):
        assert judge(fused, chosen, (3, 2)) == ""


def test_every_rule_is_judged() -> None:
    assert known_functions() - {operator(c.fn).name for c in EVERY} == set()


def test_every_function_of_the_zoo_has_a_rule() -> None:
    for name in ZOO:
        graph = load_snapshot(name)
        for block in (graph.top, *graph.blocks.values()):
            for op in block.ops:
                assert rule_of(op, block.values).is_known, f"{name}: {op.name}"


def test_the_cases_split_what_can_be_split() -> None:
    """A judge that is shown no splits proves nothing: the labels that matter are there."""
    expected = {
        "linear with bias": {"R", "d0", "d1", "out", "in"},
        "addmm": {"R", "rows", "out", "in"},
        "embedding": {"R", "G", "d0", "d1", "vocab", "width"},
        "attention grouped": {"R", "batch", "heads", "context", "ring"},
        "attention": {"R", "batch", "heads", "queries", "ring"},
        "cross_entropy": {"R", "tokens", "classes"},
        "moe_experts": {"R", "tokens", "inner", "experts", "dispatch"},
        "batch_norm": {"R", "d0", "d1"},
        "conv2d depthwise": {"R", "d0", "channel"},
        "conv2d": {"R", "d0", "out", "in"},
        "mul (4, 8, 4) (4,) ap": {"R", "d0", "d1", "d2", "P", "G"},
        "cat of two 0": {"R", "d0", "d1", "P", "G"},
        "split 29": {"R", "d0", "d1", "d2", "P", "G"},
        "sum (1,)": {"R", "d0", "d1", "d2", "P", "G"},
        "moe_experts transposed with bias": {"R", "tokens", "inner", "experts", "dispatch"},
    }
    found = {str(c): {r.name for r in all_rows(c)} for c in CASES}
    assert {k: found[k] for k in expected} == expected


@settings(max_examples=15)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.data())
def test_any_reshape(dims: list[int], data: st.DataObject) -> None:
    total = int(torch.tensor(dims).prod())
    target: list[int] = []
    while total > 1:
        target.append(data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0])))
        total //= target[-1]
    case = Case("reshape", torch.reshape, (t(*dims), tuple(target) or (1,)))
    op, values = case.op()
    for row in all_rows(case):
        if even(op, values, (row,), (2,)):
            assert judge(case, (row,), (2,)) == "", (dims, target, row)


# --- the judge itself ----------------------------------------------------------------------------------

LINEAR = Case("linear", F.linear, (t(4, 8), t(12, 8), t(12)))
GROUPED = next(c for c in CASES if str(c) == "attention grouped")
LOOKUP = next(c for c in CASES if str(c) == "embedding")
LOSS = next(c for c in CASES if str(c) == "cross_entropy")
PRODUCT = next(c for c in CASES if str(c) == "mul (4, 8, 4) (4, 8, 4) aa")
S0, S1 = Shard(0), Shard(1)


def planted(case: Case, label: str, **changes: Any) -> Row:
    return replace(next(r for r in all_rows(case) if r.name == label), **changes)


@pytest.mark.parametrize(
    ("case", "row", "says"),
    [
        (LINEAR, planted(LINEAR, "in", inputs=((S1, S1), (S1, S1), (R, R))), "result 0"),  # the bias counted twice
        (
            LINEAR,
            planted(LINEAR, "d0", inputs=((S0, S0), (R, R), (R, P))),
            "gradient of operand 1",
        ),  # its gradient is a term only
        (LINEAR, planted(LINEAR, "out", inputs=((R, R), (S0, S0), (S0, S0))), "gradient of operand 0"),
        (LINEAR, planted(LINEAR, "in", outputs=((R, R),)), "result 0"),  # a term passed off as the whole
        (LINEAR, planted(LINEAR, "in", inputs=((S1, S1), (Shard(0), Shard(0)), (P, R))), "do not run"),
        (
            GROUPED,
            planted(GROUPED, "heads", inputs=((S1, S1), (R, P), (R, P))),
            "result 0",
        ),  # whole keys beside half the queries
        (LOOKUP, planted(LOOKUP, "vocab", outputs=((R, R),)), "result 0"),
        (LOSS, planted(LOSS, "tokens", outputs=((R, R),)), "result 0"),
        (PRODUCT, Row("P", ((P, R), (P, R)), ((P, R),)), "result 0"),  # a product is linear in one factor at a time
        (PRODUCT, Row("P", ((P, R), (R, R)), ((P, R),)), "gradient of operand 1"),
    ],
)
def test_a_wrong_row_is_caught(case: Case, row: Row, says: str) -> None:
    assert says in judge(case, (row,), (2,))


def test_fused_parts_must_be_dealt() -> None:
    """A contiguous half of q, k, v is q and half of k: cutting it later mixes the parts."""
    fused = Case("split", torch.split, (t(4, 12), [4, 4, 4], 1))
    good = next(r for r in all_rows(fused) if r.segments)
    assert judge(fused, (good,), (2,)) == ""
    assert judge(fused, (replace(good, segments={}),), (2,)) != ""


def test_unknown_functions_run_whole() -> None:
    case = Case("diag_embed", torch.diag_embed, (t(4, 8),), kinds="a")
    op, values = case.op()
    assert not rule_of(op, values).is_known
    assert [r.name for r in rows(op, values)] == ["R"]
