"""Matrix products: rows, features out, features in (whose products are summed)."""

from __future__ import annotations

import string

from planner_core.core import Op
from planner_core.ops.registry import (
    DimOf,
    Rule,
    Shapes,
    Split,
    aligned,
    batch_splits,
    rule,
    split,
)


@rule("linear")
def _linear(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`...i,oi->...o`; the bias of a split contraction is added once."""
    x, w = ins[0], ins[1]
    has_bias = len(ins) > 2
    none: list[DimOf] = [None] * has_bias
    found = [split(f"d{d}", [d, None, *none], [d], x[d]) for d in range(len(x) - 1) if x[d] > 1]
    found.append(split("out", [None, 0, *([0] * has_bias)], [len(x) - 1], w[0]))
    found.append(split("in", [len(x) - 1, 1, *none], [None], w[1], bias=(2,) if has_bias else ()))
    return Rule(tuple(found))


@rule("addmm", "baddbmm")
def _addmm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`bias + a @ b` (transformers' Conv1D stores b as [in, out])."""
    bias, a, b = ins
    rank = len(a)
    lead = [split(f"b{d}", [aligned(bias, rank, d), d, d], [d], a[d]) for d in range(rank - 2)]
    rows_ = split("rows", [aligned(bias, rank, rank - 2), rank - 2, None], [rank - 2], a[-2])
    cols = split("out", [aligned(bias, rank, rank - 1), None, rank - 1], [rank - 1], b[-1])
    inner = split("in", [None, rank - 1, rank - 2], [None], a[-1], bias=(0,))
    return Rule((*lead, rows_, cols, inner))


@rule("matmul", "bmm", "mm")
def _matmul(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    a, b = ins
    if len(a) < 2 or len(b) < 2:
        return Rule((), linear=(0,))
    out, rank = outs[0], len(outs[0])
    found = batch_splits([a, b], out, rank - 2, "b")
    if a[-2] > 1:
        found.append(split("rows", [len(a) - 2, None], [rank - 2], a[-2]))
    if b[-1] > 1:
        found.append(split("out", [None, len(b) - 1], [rank - 1], b[-1]))
    found.append(split("in", [len(a) - 1, len(b) - 2], [None], a[-1]))
    return Rule(tuple(found), linear=(0,))


@rule("einsum")
def _einsum(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """A letter that stands for the same extent wherever it is may be split."""
    *operands, result = einsum_letters(op, ins)
    if any(len(set(t)) != len(t) for t in operands):
        return Rule((), known=False)
    extents: dict[str, set[int]] = {}
    for t, shape in zip(operands, ins, strict=True):
        for c, n in zip(t, shape, strict=True):
            extents.setdefault(c, set()).add(n)
    found = [
        split(c, [t.index(c) if c in t else None for t in operands], [result.index(c) if c in result else None], *n)
        for c, n in sorted(extents.items()) if n != {1} and len(n) == 1
    ]  # fmt: skip
    return Rule(tuple(found), linear=(0,))


def einsum_letters(op: Op, ins: Shapes) -> list[str]:
    """The letters of each operand and of the result; capitals in place of `...`, aligned at the last."""
    terms, _, result = str(op.attrs["equation"]).replace(" ", "").partition("->")
    operands = terms.split(",")
    ranks = [len(shape) - len(t) + 3 for t, shape in zip(operands, ins, strict=True) if "..." in t]
    wild = string.ascii_uppercase[: max(ranks, default=0)]
    own = [t.replace("...", wild[len(wild) + len(t) - 3 - len(s) :]) for t, s in zip(operands, ins, strict=True)]
    return [*own, result.replace("...", wild)]


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
def _conv(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Batch, output channels, input channels (Partial); a depthwise convolution splits both channels together."""
    x, w = ins[0], ins[1]
    has_bias = len(ins) > 2
    none: list[DimOf] = [None] * has_bias
    found = [split("d0", [0, None, *none], [0], x[0])] if len(x) == len(w) and x[0] > 1 else []
    groups = int(op.attrs.get("groups", 1) or 1)  # type: ignore[arg-type]
    if "transpose" in op.fn or len(x) != len(w):
        return Rule(tuple(found))
    if groups == 1:
        found.append(split("out", [None, 0, *([0] * has_bias)], [1], w[0]))
        if x[1] > 1:
            found.append(split("in", [1, 1, *none], [None], x[1], bias=(2,) if has_bias else ()))
    elif groups == x[1] == w[0]:
        found.append(split("channel", [1, 0, *([0] * has_bias)], [1], w[0]))
    return Rule(tuple(found))


@rule("moe_experts")
def _moe_experts(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Tokens; the experts' inner width (gate and up are fused, so dealt part by part); the experts themselves.

    Operands: hidden, index, weights, up, down[, up bias][, down bias].
    """
    (t, _), up, down = ins[0], ins[3], ins[4]
    turned, gated = bool(op.attrs.get("transposed")), bool(op.attrs.get("gated", True))
    inner = down[1 if turned else 2]
    none: list[DimOf] = [None] * (len(ins) - 5)
    biases: list[DimOf] = [
        1 if shape[-1] == up[2 if turned else 1] and k == 0 else None for k, shape in enumerate(ins[5:])
    ]
    tokens = split("tokens", [0, 0, 0, None, None, *none], [0], t)
    fused: dict[int, tuple[int, ...]] = {}
    if gated:
        fused = dict.fromkeys((3, *(5 + k for k, d in enumerate(biases) if d is not None)), (inner, inner))
    added = tuple(5 + k for k, d in enumerate(biases) if d is None)
    width = Split(
        "inner", (None, None, None, *((2, 1) if turned else (1, 2)), *biases), (None,), (inner,), bias=added, segments=fused
    )  # fmt: skip
    experts = split("experts", [None, None, None, 0, 0, *[0] * len(none)], [None], up[0])
    return Rule((tokens, width, experts))


@rule("expert_linear")
def _expert_linear(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Rows; features out; features in, whose products are summed. Operands: hidden [t, i], index [t], weight [E, o, i]."""
    (t, i), _, (_, o, _) = ins
    return Rule(
        (
            split("tokens", [0, 0, None], [0], t),
            split("out", [None, None, 1], [1], o),
            split("in", [1, None, 2], [None], i),
        )
    )
