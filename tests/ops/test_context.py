"""Causal attention with its queries split: balanced by mirrored blocks, and the same numbers, forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch.nn.functional as F

from planner_core.core import P, R, Shard
from planner_core.ops import Attention, work_of
from planner_core.ops.catalog.attention import CONTEXT
from planner_core.ops.rules import Row
from planner_core.runtime.write import operators
from tests.support.operators.cases import t
from tests.support.operators.judge import Case, all_rows, even, judge
from tests.support.operators.local_judge import judge_local

SDPA = F.scaled_dot_product_attention


def causal(length: int = 24, kv_length: int = 24, **options: object) -> Case:
    """Two samples, four query heads of width 4 on two key-value heads of width 4, values of width 6."""
    q, k, v = t(2, 4, length, 4), t(2, 2, kv_length, 4), t(2, 2, kv_length, 6)
    return Case(
        "scaled_dot_product_attention", SDPA, (q, k, v), {"enable_gqa": True, "is_causal": True, **options}, "aaa"
    )


def context(case: Case) -> Row:
    return next(r for r in all_rows(case) if r.name == CONTEXT)


def test_queries_are_split_and_keys_are_whole() -> None:
    """The gradients of whole keys and values are terms of a sum, which a reduce_scatter brings back to the split."""
    row = context(causal())
    assert row.inputs == ((Shard(2), Shard(2)), (R, P), (R, P)) and row.outputs == ((Shard(2), Shard(2)),)


SIZES = [(2,), (3,), (4,), (6,), (2, 2), (3, 2), (2, 3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_computes_its_rows(sizes: tuple[int, ...]) -> None:
    """An odd axis has a rank that is its own mirror; on two axes a block goes along both."""
    case = causal(scale=0.3)
    chosen = (context(case),) * len(sizes)
    assert judge(case, chosen, sizes) == ""
    assert judge_local(case, chosen, sizes) == ""


def test_it_goes_together_with_every_other_row() -> None:
    case = causal()
    op, values = case.op()
    for other in all_rows(case):
        for chosen in itertools.permutations((context(case), other)):
            if even(op, values, chosen, (2, 2)):
                assert judge(case, chosen, (2, 2)) == judge_local(case, chosen, (2, 2)) == "", other.name


def test_a_block_that_is_computed_as_if_it_came_first_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: torch's own function, which aligns its mask with the first key."""
    monkeypatch.setitem(operators._RULES, "scaled_dot_product_attention", operators.LocalCall.unchanged)
    assert judge_local(causal(), (context(causal()),), (2,)).startswith("result 0")


@pytest.mark.parametrize(
    "case", [causal(23, 23), causal(24, 20), causal(24, 24, is_causal=False)], ids=["odd", "across", "not causal"]
)
def test_where_it_does_not_apply(case: Case) -> None:
    assert CONTEXT not in {r.name for r in all_rows(case)}


def test_rows_that_cannot_be_cut_in_two_blocks_are_uneven() -> None:
    case = causal(12, 12)
    op, values = case.op()
    assert even(op, values, (context(case),), (6,)) and not even(op, values, (context(case),), (4,))


# --- price ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_gpu_has_its_share_of_the_pairs(sizes: tuple[int, ...]) -> None:
    """GPU 0 has the first block of 2n and the last one: together 1 / n of the whole."""
    op, values = causal().op()
    n = math.prod(sizes)
    whole, own = work_of(op, values), work_of(op, values, (context(causal()),) * len(sizes), sizes)
    assert (own.flops, own.backward_flops) == (whole.flops // n, whole.backward_flops // n)
    block = 24 // (2 * n)
    first = Attention(2, 4, 2, block, block, 4, 6, causal=True)
    assert own.forward == (first, dataclasses.replace(first, kv_len=24, first=24 - block))


@pytest.mark.parametrize("window", [(None, None), (5, None), (3, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_queries_add_up(is_causal: bool, window: tuple[int | None, int | None]) -> None:
    whole = Attention(1, 1, 1, 24, 24, 1, 1, is_causal, window)
    blocks = [dataclasses.replace(whole, q_len=6, first=first).pairs for first in range(0, 24, 6)]
    assert sum(blocks) == whole.pairs
    if window == (None, None) and is_causal:
        assert blocks == [18, 54, 90, 126], "contiguous parts would be unequal"


def test_what_is_exchanged_is_priced() -> None:
    """Queries and results, and their gradients: 2 samples x 4 heads x 24 tokens x 4 or 6 numbers of 8 bytes."""
    sent = context(causal()).internal
    assert [(c.phase, c.kind, c.num_bytes) for c in sent] == [
        (phase, "all_to_all", 2 * 4 * 24 * width * 8) for phase in ("forward", "backward") for width in (4, 6)
    ]
    constant = dataclasses.replace(causal(), kinds="ccc")
    assert {c.phase for c in context(constant).internal} == {"forward"}, "nothing goes back"
