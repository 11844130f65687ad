"""FLOPs as torch counts them: a call is run under `torch.utils.flop_counter`, forward and then backward.

torch counts the products of the ATen ops that a call is made of, and knows nothing of our operators. Where it
sees nothing (attention on a CPU, a product with a vector) another spelling is counted; a grouped convolution is counted
group by group, since of its weight gradient torch counts every group as large as the whole. It counts every pair of a
causal mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from planner_core.core import Block, Op, Value
from planner_core.ops import Kind, operator
from tests.support.operators.judge import Case, results

Call = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def counted(call: Call, values: Sequence[Value], tensors: list[torch.Tensor]) -> tuple[int, int]:
    """FLOPs of a call on `tensors`, and of its backward to those that have a gradient by `values`."""
    leaves = [t.detach().requires_grad_(v.grad) for t, v in zip(tensors, values, strict=True)]
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        made = call(leaves)
    wanted = [t for t in leaves if t.requires_grad]
    outs = [o for o in made if o.requires_grad]
    if wanted and outs:
        with backward:
            torch.autograd.grad(outs, wanted, [torch.ones_like(o) for o in outs], allow_unused=True)
    return forward.get_total_flops(), backward.get_total_flops()


def counted_case(case: Case) -> tuple[int, int]:
    """FLOPs of a case on real tensors."""
    op, values = case.op()
    call = _COUNTABLE[op.fn](op) if op.fn in _COUNTABLE else case.call
    groups = op.attrs.get("groups", 1)
    if isinstance(groups, int) and groups > 1 and operator(op.fn).kind is Kind.CONVOLUTION:
        call = _group_by_group(case, groups)
    return counted(call, values[: len(op.inputs)], list(case.tensors))


def counted_op(op: Op, block: Block) -> tuple[int, int]:
    """FLOPs of an op of a graph, on meta tensors of its shapes."""
    values = [block.values[i] for i in op.inputs]
    tensors = [torch.empty(v.meta.shape, dtype=getattr(torch, v.meta.dtype), device="meta") for v in values]
    return counted(spelled(op), values, tensors)


def spelled(op: Op) -> Call:
    """Return the call that an op of a graph stands for."""
    attrs: dict[str, Any] = dict(op.attrs)
    if op.fn == "scaled_dot_product_attention":
        return attention_of(op)
    if op.fn == "moe_experts":
        return balanced_experts(gated=attrs["gated"])
    if op.fn.startswith("conv"):
        options = {n: attrs[n] for n in ("stride", "padding", "dilation", "groups")}
        return lambda ts: [getattr(F, op.fn)(*ts, **options)]
    if op.fn == "einsum":
        return lambda ts: [torch.einsum(attrs["equation"], *ts)]
    function = getattr(F, op.fn, None) if op.fn in ("linear", "bilinear") else getattr(torch, op.fn)
    return lambda ts: results(function(*ts))


def attention_of(op: Op) -> Call:
    """Attention as a GPU runs it: one flash kernel forward and one backward."""
    return lambda ts: [_Flash.apply(*ts[:3])]  # type: ignore[no-untyped-call]


class _Flash(torch.autograd.Function):
    """torch's own flash kernels on meta tensors, which the counter knows by name (a CPU would pick others)."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> torch.Tensor:
        heads = [t.unsqueeze(-3) if t.dim() == 3 else t for t in operands]
        q, k, v = (torch.empty(t.shape, dtype=torch.bfloat16, device="meta") for t in heads)
        ctx.kernel, ctx.like = (q, k, v), operands
        ctx.made = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
        return operands[0].new_empty((*operands[0].shape[:-1], v.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, sums, lengths_q, lengths_k, max_q, max_k, seed, offset, _ = ctx.made
        out = ctx.kernel[0].new_empty((*ctx.kernel[0].shape[:-1], ctx.kernel[2].shape[-1]))
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            torch.empty_like(out), *ctx.kernel, out, sums, lengths_q, lengths_k, max_q, max_k, 0.0, False, seed, offset
        )
        return tuple(torch.empty_like(t) for t in ctx.like)


def balanced_experts(gated: bool) -> Call:
    """Return every expert by itself, on its equal share of the rows."""

    def call(ts: list[torch.Tensor]) -> list[torch.Tensor]:
        hidden, index, weights, up, down = ts[:5]
        rows = index.numel() // len(up)
        total = hidden * weights.sum()
        for e in range(len(up)):
            x = hidden.repeat(index.shape[1], 1)[:rows] * weights.flatten()[:rows, None]
            inner = F.linear(x, up[e])
            inner = inner[:, : inner.shape[1] // 2] * inner[:, inner.shape[1] // 2 :] if gated else inner
            total = total + F.linear(inner, down[e]).sum()
        return [total]

    return call


def _group_by_group(case: Case, groups: int) -> Call:
    """Return a grouped convolution as one convolution for each group."""

    def call(ts: list[torch.Tensor]) -> list[torch.Tensor]:
        options = {**case.kwargs, "groups": 1}
        parts = zip(ts[0].chunk(groups, 1), ts[1].chunk(groups, 0), strict=True)
        return [torch.cat([case.func(x, w, **options) for x, w in parts], 1)]

    return call


def _matmul(op: Op) -> Call:
    """A product with a vector is one with a matrix of one column, which torch counts."""
    return lambda ts: [ts[0] @ (ts[1] if ts[1].dim() > 1 else ts[1][:, None])]


def _bilinear(op: Op) -> Call:
    """torch's own multiplies and sums; this is the same as two products."""
    return lambda ts: [torch.einsum("...i,oij,...j->...o", ts[0], ts[2], ts[1])]


def _as(spelling: Callable[..., torch.Tensor]) -> Callable[[Op], Call]:
    """Products of vectors, and all pairs, spelled as products of matrices."""
    return lambda op: lambda tensors: [spelling(*tensors)]


_COUNTABLE: dict[str, Callable[[Op], Call]] = {
    "mv": _as(lambda a, v: a @ v[:, None]),
    "dot": _as(lambda a, b: a[None] @ b[:, None]),
    "vdot": _as(lambda a, b: a[None] @ b[:, None]),
    "outer": _as(lambda a, b: a[:, None] @ b[None]),
    "addmv": _as(lambda c, a, v: torch.addmm(c[:, None], a, v[:, None])),
    "linalg_vecdot": _as(lambda a, b: a[..., None, :] @ b[..., None]),
    "cdist": _as(lambda a, b: a @ b.mT),
    "scaled_dot_product_attention": attention_of,
    "matmul": _matmul,
    "bilinear": _bilinear,
}
"""Calls that torch's counter sees, in place of some that it does not."""
