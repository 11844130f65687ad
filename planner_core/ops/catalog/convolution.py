"""Convolutions. Samples and output channels may be sharded, and input channels, whose products are summed (Partial)."""

from __future__ import annotations

import math

from planner_core.core import Op
from planner_core.ops.operators import Kind, LocalExecution, operators
from planner_core.ops.rules import DimOf, Rule, Shapes, int_attr, split
from planner_core.ops.work import Gemm, Part, Sizes, product_part


def _conv(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Batch, output channels or input channels (Partial). A depthwise convolution shards both channels together."""
    x, w = ins[0], ins[1]
    has_bias = len(ins) > 2
    if len(x) != len(w):
        return Rule(())
    none: list[DimOf] = [None] * has_bias
    splits = [split("d0", [0, None, *none], [0], x[0])] if x[0] > 1 else []
    groups = int_attr(op, "groups", 1)
    if groups == 1:
        splits.append(split("out", [None, 0, *([0] * has_bias)], [1], w[0]))
        if x[1] > 1:
            splits.append(split("in", [1, 1, *none], [None], x[1], bias=(2,) if has_bias else ()))
    elif groups == x[1] == w[0]:
        splits.append(split("channel", [1, 0, *([0] * has_bias)], [1], w[0]))
    return Rule(tuple(splits))


def _conv_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    """One product for each group. Its rows are output pixels; its inner extent is input channels times the kernel's size."""
    x, w, out = sizes.ins[0], sizes.ins[1], sizes.outs[0]
    samples = x[0] if len(x) == len(w) else 1
    groups = x[1 - len(w)] // w[1]  # the groups that this GPU holds of a sharded depthwise convolution
    pixels, k = samples * math.prod(out[2 - len(w) :]), math.prod(w[1:])
    return (product_part(Gemm(pixels, w[0] // groups, k, groups), (0,), (1,)),)


def _conv_transpose(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """The batch may be sharded."""
    x, w = ins[0], ins[1]
    none: list[DimOf] = [None] * (len(ins) - 2)
    return Rule((split("d0", [0, None, *none], [0], x[0]),) if len(x) == len(w) and x[0] > 1 else ())


def _conv_transpose_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    """One product for each group, whose rows are input pixels: each is multiplied with the whole kernel. The weight is
    [in, out / groups, kernel]."""
    x, w = sizes.ins[0], sizes.ins[1]
    samples = x[0] if len(x) == len(w) else 1
    groups = int_attr(op, "groups", 1)
    pixels = samples * math.prod(x[2 - len(w) :])
    return (product_part(Gemm(pixels, math.prod(w[1:]), w[0] // groups, groups), (0,), (1,)),)


OPERATORS = (
    *operators(
        "conv1d conv2d conv3d",
        kind=Kind.CONVOLUTION,
        rule=_conv,
        work=_conv_work,
        arguments="input weight bias stride padding dilation groups",
        local_execution=LocalExecution.SIZES,
    ),
    *operators(
        "conv_transpose1d conv_transpose2d conv_transpose3d",
        kind=Kind.CONVOLUTION,
        rule=_conv_transpose,
        work=_conv_transpose_work,
        arguments="input weight bias stride padding output_padding groups dilation",
    ),
)
