"""Attention in a ring: keys and values go round the ranks, and the numbers are the same, forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from planner_core.core import Shard
from planner_core.ops import Attention, Merge, can_run_together, work_of
from planner_core.ops.catalog.attention import ALONG, RING
from planner_core.ops.rules import Row
from planner_core.runtime.program.operators import attention_block
from tests.support.operators.cases import t
from tests.support.operators.judge import Case, all_rows, even, judge
from tests.support.operators.local_judge import judge_local

SDPA = F.scaled_dot_product_attention


def attention(length: int = 24, keys: int = 24, width: int = 6, kinds: str = "aaa", **options: object) -> Case:
    """Two samples, four query heads of width 4 on two key-value heads of width 4, values of width 6."""
    q, k, v = t(2, 4, length, 4), t(2, 2, keys, 4), t(2, 2, keys, width)
    return Case("scaled_dot_product_attention", SDPA, (q, k, v), {"enable_gqa": True, **options}, kinds)


def causal(length: int = 24, keys: int = 24, **options: object) -> Case:
    return attention(length, keys, is_causal=True, **options)


def ring(case: Case) -> Row:
    return next(r for r in all_rows(case) if r.name == RING)


def test_everything_is_split_by_sequence() -> None:
    row = ring(causal())
    assert row.inputs == ((Shard(2), Shard(2)),) * 3 and row.outputs == ((Shard(2), Shard(2)),)


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize(
    "case",
    [
        causal(),
        causal(scale=0.3),
        causal(width=4),
        attention(),
        attention(24, 12, 4),
        causal(kinds="caa"),
        causal(kinds="acc"),
    ],
    ids=["causal", "scaled", "as wide", "all see all", "across", "keys alone", "queries alone"],
)
def test_every_rank_computes_its_rows(case: Case, n: int) -> None:
    """An odd axis has a rank that is its own mirror. Values as wide as keys run the flash kernel for CPUs, others are written out."""
    assert judge(case, (ring(case),), (n,)) == ""
    assert judge_local(case, (ring(case),), (n,)) == ""


@pytest.mark.parametrize("case", [causal(), attention()], ids=["causal", "all see all"])
def test_it_goes_together_with_every_other_row_that_leaves_the_sequence(case: Case) -> None:
    """Heads, samples, or no split on another axis. Nothing else may split the sequence there."""
    op, values = case.op()
    refused = set()
    for other in all_rows(case):
        for chosen in itertools.permutations((ring(case), other)):
            if not can_run_together(chosen, (2, 2)):
                refused.add(other.name)
            elif even(op, values, chosen, (2, 2)):
                assert judge(case, chosen, (2, 2)) == judge_local(case, chosen, (2, 2)) == "", other.name
    assert refused == {r.name for r in all_rows(case)} & set(ALONG) and RING in refused


def test_blocks_that_are_merged_without_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: every block is merged as if its sums of exponentials were 1."""
    whole = attention_block.attend_block

    def alike(*args: object) -> object:
        out, sums = whole(*args)  # type: ignore[arg-type]
        return out, torch.zeros_like(sums)

    monkeypatch.setattr("planner_core.runtime.program.operators.ring.attend_block", alike)
    assert judge_local(causal(), (ring(causal()),), (2,)).startswith("result 0")


@pytest.mark.parametrize(
    "case",
    [
        causal(23, 23),
        causal(24, 20),
        Case("scaled_dot_product_attention", SDPA, (*causal().args, t(24, 24)), {"enable_gqa": True}, "aaac"),
    ],
    ids=["odd", "across", "mask"],
)
def test_where_it_does_not_apply(case: Case) -> None:
    assert RING not in {r.name for r in all_rows(case)}


def test_dropout_is_refused() -> None:
    case = dataclasses.replace(causal(), kwargs={"enable_gqa": True, "is_causal": True, "dropout_p": 0.5})
    with pytest.raises(NotImplementedError, match="dropout"):
        judge_local(case, (ring(case),), (2,))


def test_the_kernel_for_cpus_makes_the_same_as_the_block_that_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, d = t(2, 4, 6, 8), t(2, 2, 6, 8), t(2, 2, 6, 8), t(2, 4, 6, 8)
    for is_causal in (True, False):
        found = []
        for kernel in (True, False):
            monkeypatch.setattr(attention_block, "_cpu_flash_can_run", lambda *given, kernel=kernel: kernel)
            out, sums = attention_block.attend_block(q, k, v, is_causal, 0.3)
            found.append((out, sums, *attention_block.attend_block_backward(d, q, k, v, out, sums, is_causal, 0.3)))
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(*found, strict=True))


# --- price ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("case", [causal(), attention()], ids=["causal", "all see all"])
def test_every_gpu_has_its_share_of_the_pairs(case: Case, n: int) -> None:
    op, values = case.op()
    whole, own = work_of(op, values), work_of(op, values, (ring(case),), (n,))
    assert (own.flops, own.backward_flops) == (whole.flops // n, whole.backward_flops // n)
    first, others, merged = own.forward
    assert isinstance(first, Attention) and isinstance(others, Attention) and isinstance(merged, Merge)
    assert first.times == 1 and others.times == merged.times == n - 1


def test_what_goes_round_is_priced() -> None:
    """Keys and values: 2 samples x 2 heads x 24 tokens x 10 numbers of 8 bytes, n - 1 times; backward their sums too, n times."""
    sent = [c for c in ring(causal()).internal if c.kind == "send_recv"]
    assert {c.num_bytes for c in sent} == {2 * 2 * 24 * 10 * 8}
    assert [(c.phase, c.runs(4)) for c in sent] == [("forward", 3), ("backward", 3), ("backward", 3), ("backward", 1)]
    assert math.isclose(sum(c.share for c in sent if c.phase == "backward"), 1.0)
    fixed = ring(causal(kinds="acc")).internal
    assert [c.phase for c in fixed if c.kind == "send_recv"] == ["forward", "backward"], "no sums of keys and values"
