"""FLOPs and kernels of every product, against torch's own count; what one GPU does of it under every row."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from planner_core.core import Block, Op
from planner_core.models.adapters import scans
from planner_core.models.zoo import ZOO, load_snapshot
from planner_core.ops import Attention, Gemm, GroupedGemm, Kind, Work, is_free, operator, work_of
from planner_core.ops.operators import FLOPS_BOUND_KINDS
from tests.support.operators.cases import ids, t
from tests.support.operators.counted import counted_case, counted_op
from tests.support.operators.every_case import EVERY
from tests.support.operators.judge import Case, all_rows, even

SDPA = F.scaled_dot_product_attention
COUNTED = FLOPS_BOUND_KINDS - {Kind.SCAN}
PRODUCTS = [
    *(c for c in EVERY if operator(c.fn).kind in COUNTED),
    Case("linear", F.linear, (t(4, 4, 8), t(12, 8)), kinds="ac", name="linear with a frozen weight"),
    Case("linear", F.linear, (t(8), t(12, 8)), name="linear of one row"),
    Case("matmul", torch.matmul, (t(3, 1, 8, 4), t(5, 4, 12)), kinds="aa", name="matmul that broadcasts both"),
    Case("matmul", torch.matmul, (t(4), t(4)), kinds="aa", name="vector by vector"),
    Case("addmm", torch.addmm, (t(12), t(8, 4), t(4, 12)), kinds="acp", name="addmm of a constant"),
    Case("einsum", torch.einsum, ("abc,cd,de,be->a", t(4, 3, 5), t(5, 6), t(6, 2), t(3, 2)), name="einsum of four"),
    Case("einsum", torch.einsum, ("bij,jk->bk", t(4, 3, 5), t(5, 6)), name="einsum that sums first"),
    Case("einsum", torch.einsum, ("bi,bj->bij", t(4, 3), t(4, 5)), name="einsum without a sum"),
    Case(
        "conv2d",
        F.conv2d,
        (t(2, 6, 9, 7), t(4, 3, 3, 1)),
        {"groups": 2, "stride": 2, "dilation": (2, 1)},
        name="conv2d stretched",
    ),
    Case(
        "conv_transpose2d",
        F.conv_transpose2d,
        (t(2, 6, 5, 5), t(6, 4, 3, 3)),
        {"stride": 2, "padding": 1},
        name="conv_transpose2d padded",
    ),
    Case("conv_transpose1d", F.conv_transpose1d, (t(6, 5), t(6, 4, 3)), name="conv_transpose1d of one sample"),
    Case(
        "scaled_dot_product_attention",
        SDPA,
        (t(2, 4, 6, 8), t(2, 4, 10, 8), t(2, 4, 10, 16)),
        kinds="aaa",
        name="attention across, wider values",
    ),
    Case(
        "scaled_dot_product_attention",
        SDPA,
        (t(2, 4, 8, 8), t(2, 4, 8, 8), t(2, 4, 8, 8)),
        {"is_causal": True},
        "ccc",
        "attention of constants",
    ),
]


def whole(case: Case) -> Work:
    return work_of(*case.op())


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_flops_are_those_that_torch_counts(case: Case) -> None:
    forward, backward = counted_case(case)
    if case.kwargs.get("is_causal"):
        forward, backward = forward // 2, backward // 2
    assert (whole(case).flops, whole(case).backward_flops) == (forward, backward)


@pytest.mark.parametrize("name", ZOO)
def test_flops_of_every_op_of_the_zoo_are_those_that_torch_counts(name: str) -> None:
    graph = load_snapshot(name)
    seen = set()
    for block in (graph.top, *graph.blocks.values()):
        for op in block.ops:
            work = work_of(op, block.values)
            if operator(op.fn).kind not in COUNTED:
                assert not work.flops
                continue
            seen.add(op.fn)
            forward, backward = counted_op(op, block)
            half = 2 if op.attrs.get("is_causal") else 1
            assert (work.flops, work.backward_flops) == (forward // half, backward // half), op.name
    assert seen


def test_no_product_of_the_zoo_counts_as_nothing() -> None:
    found = {
        (op.fn, flops(op, b) > 0) for n in ZOO for b in blocks(n) for op in b.ops if operator(op.fn).kind in COUNTED
    }
    assert found and all(counts for _, counts in found)


def blocks(name: str) -> tuple[Block, ...]:
    graph = load_snapshot(name)
    return (graph.top, *graph.blocks.values())


def flops(op: Op, block: Block) -> int:
    return work_of(op, block.values).flops


@pytest.mark.parametrize("case", [*PRODUCTS, *(c for c in EVERY if operator(c.fn).kind is Kind.SCAN)], ids=str)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_each_gpu_does_its_share(case: Case, sizes: tuple[int, ...]) -> None:
    """Kernels on the shapes of one GPU: all GPUs together do the work of one, and of what is not split each does it all.

    Of a chain of products (einsum of three operands) those that lack the dim are done by every GPU.
    """
    op, values = case.op()
    all_work = whole(case)
    chain = len(all_work.forward) > 1 and operator(op.fn).kind is Kind.PRODUCT
    for chosen in itertools.product(all_rows(case), repeat=len(sizes)):
        if even(op, values, chosen, sizes):
            parts = 2 ** sum(row.splits_work for row in chosen)
            mine, labels = work_of(op, values, chosen, sizes), [r.name for r in chosen]
            for own, every in ((mine.flops, all_work.flops), (mine.backward_flops, all_work.backward_flops)):
                assert every / parts == own if not chain else every / parts <= own <= every, labels


# --- shapes of kernels -----------------------------------------------------------------------------------


def kernels(case: Case, label: str = "R") -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Kernels of one of two GPUs by the row of this label."""
    row = next(r for r in all_rows(case) if r.name == label)
    work = work_of(*case.op(), (row,), (2,))
    return work.forward, work.backward


LINEAR = Case("linear", F.linear, (t(4, 2, 6), t(10, 6), t(10)))


@pytest.mark.parametrize(
    ("label", "m", "n", "k"), [("R", 8, 10, 6), ("d0", 4, 10, 6), ("d1", 4, 10, 6), ("out", 8, 5, 6), ("in", 8, 10, 3)]
)
def test_a_linear_layer_is_three_products(label: str, m: int, n: int, k: int) -> None:
    """dx [m, k] sums over n, dw [k, n] over the rows m."""
    assert kernels(LINEAR, label) == ((Gemm(m, n, k),), (Gemm(m, k, n), Gemm(k, n, m)))


def test_shapes_of_other_products() -> None:
    batched = Case("bmm", torch.bmm, (t(4, 8, 6), t(4, 6, 10)), kinds="aa")
    assert kernels(batched, "b0") == ((Gemm(8, 10, 6, 2),), (Gemm(8, 6, 10, 2), Gemm(6, 10, 8, 2)))
    shared = Case("matmul", torch.matmul, (t(4, 8, 6), t(6, 10)))  # the batch joins the rows
    assert kernels(shared)[0] == (Gemm(32, 10, 6),)
    pixels = Case("conv2d", F.conv2d, (t(4, 8, 6, 6), t(10, 8, 3, 3)), {"stride": 2}, "cp")  # 2 x 2 pixels come out
    assert kernels(pixels) == ((Gemm(16, 10, 72),), (Gemm(72, 10, 16),))
    depthwise = Case("conv1d", F.conv1d, (t(4, 8, 9), t(8, 1, 3)), {"groups": 8})
    assert kernels(depthwise)[0] == (Gemm(28, 1, 3, 8),) and kernels(depthwise, "channel")[0] == (Gemm(28, 1, 3, 4),)
    three = Case("einsum", torch.einsum, ("ij,jk,kl->il", t(2, 4), t(4, 6), t(6, 8)))
    assert kernels(three)[0] == (Gemm(2, 6, 4), Gemm(2, 8, 6))


def test_shapes_of_experts() -> None:
    """16 tokens, each to 2 of 4 experts [8 -> 16 gated, 8 -> 8]: 8 rows an expert."""
    experts = next(c for c in EVERY if str(c) == "moe_experts")
    up, down = GroupedGemm(32, 16, 8, 4), GroupedGemm(32, 8, 8, 4)
    (forward, backward) = kernels(experts)
    assert forward == (up, down)
    turned = GroupedGemm(32, 8, 16, 4)
    assert backward == (
        turned,
        dataclasses.replace(up, sums_rows=True),
        down,
        dataclasses.replace(down, sums_rows=True),
    )
    assert kernels(experts, "experts")[0] == (GroupedGemm(16, 16, 8, 2), GroupedGemm(16, 8, 8, 2))
    assert kernels(experts, "tokens")[0] == (GroupedGemm(16, 16, 8, 4), GroupedGemm(16, 8, 8, 4))
    assert kernels(experts, "inner")[0] == (GroupedGemm(32, 8, 8, 4), GroupedGemm(32, 8, 4, 4))


# --- attention -------------------------------------------------------------------------------------------


def grouped_attention(**options: object) -> Case:
    return Case(
        "scaled_dot_product_attention",
        SDPA,
        (t(4, 8, 6, 2), t(4, 4, 6, 2), t(4, 4, 6, 2)),
        {"enable_gqa": True, **options},
        "aaa",
    )


def test_the_shape_of_attention() -> None:
    forward = Attention(4, 8, 4, 6, 6, 2, 2, causal=True)
    assert kernels(grouped_attention(is_causal=True)) == ((forward,), (dataclasses.replace(forward, backward=True),))
    assert kernels(grouped_attention(is_causal=True), "heads")[0] == (Attention(4, 4, 2, 6, 6, 2, 2, causal=True),)
    assert kernels(grouped_attention(), "queries")[0] == (Attention(4, 8, 4, 3, 6, 2, 2),)


def test_causal_attention_counts_half() -> None:
    full, causal = (whole(grouped_attention(is_causal=c)) for c in (False, True))
    assert (full.flops, full.backward_flops) == (2 * causal.flops, 2 * causal.backward_flops)
    assert full.backward_flops == 2.5 * full.flops


def test_a_mask_that_is_a_tensor_saves_nothing() -> None:
    plain, masked = (next(c for c in EVERY if str(c) == n) for n in ("attention", "attention with a mask"))
    assert whole(plain).flops == whole(masked).flops


@pytest.mark.parametrize("q_len", [1, 5, 64, 100])
@pytest.mark.parametrize("kv_len", [1, 7, 64, 150])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (16, None), (16, 0), (None, 5), (3, 3), (200, 200), (0, 0)])
def test_pairs_are_the_area_under_the_mask(
    q_len: int, kv_len: int, causal: bool, window: tuple[int | None, int | None]
) -> None:
    """Counted one by one; the area cuts cells on the two edges of the mask in half, one or two for each query."""
    rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)
    kept = torch.ones(q_len, kv_len, dtype=torch.bool)
    if causal:
        kept &= columns <= rows
    if window[0] is not None:
        kept &= columns >= rows - window[0]
    if window[1] is not None:
        kept &= columns <= rows + window[1]
    pairs = Attention(1, 1, 1, q_len, kv_len, 1, 1, causal, window).pairs
    edges = (causal or window[1] is not None) + (window[0] is not None)
    assert int(kept.sum()) - 0.5 * edges * q_len <= pairs <= int(kept.sum())
    if not edges:
        assert pairs == kept.sum()


def test_a_window_that_the_call_names_is_honoured() -> None:
    """As flash attention names it: keys before and behind, -1 for all."""
    op, values = grouped_attention(is_causal=True).op()
    near = dataclasses.replace(op, attrs={**op.attrs, "window_size": (2, 0)})
    far = dataclasses.replace(op, attrs={**op.attrs, "window_size": (-1, -1)})
    assert work_of(near, values).flops == 2 * 4 * 8 * 4 * (6 * 6 / 2 - 4 * 4 / 2)
    assert work_of(far, values).flops == work_of(op, values).flops


# --- scans, and what takes no FLOPs ----------------------------------------------------------------------


def test_the_delta_rule_counts_about_what_its_fallback_does() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    # A capture puts ours there.
    plain = getattr(torch_chunk_gated_delta_rule, "__wrapped__", torch_chunk_gated_delta_rule)
    q, k, v = (torch.empty(2, 256, 4, 128, device="meta") for _ in range(3))
    gates = [torch.empty(2, 256, 4, device="meta") for _ in range(2)]
    with FlopCounterMode(display=False) as count:
        plain(q, k, v, *gates)
    case = Case("delta_rule", scans.delta_rule, (q, k, v, *gates), {"plain": None}, "aaaaa")
    assert 0.85 < whole(case).flops / count.get_total_flops() < 1.15


def test_views_are_free_and_copies_are_not() -> None:
    x = t(4, 8, 12)
    free = {
        Case("getitem", torch.Tensor.__getitem__, (x, (slice(None), 3))): True,
        Case("getitem", torch.Tensor.__getitem__, (x, (slice(None), ids(8, 4))), kinds="ac"): False,
        Case("getitem", torch.Tensor.__getitem__, (x, ([0, 1],))): False,
        Case("unfold", torch.Tensor.unfold, (x, 1, 4, 2)): True,
        Case("unfold", F.unfold, (t(4, 2, 6, 6), 3)): False,
        Case("transpose", torch.transpose, (x, 0, 2)): True,
        Case("reshape", torch.reshape, (x, (4, 96))): False,
        Case("softmax", torch.softmax, (x, 1)): False,
        Case("cosine_similarity", F.cosine_similarity, (t(4, 8), t(4, 8)), kinds="aa"): False,
    }
    for case, expected in free.items():
        op, values = case.op()
        assert is_free(op) == work_of(op, values).free == expected, case
