"""Attention as one fused kernel. Samples and heads may be sharded; queries only if the mask does not depend on their position."""

from __future__ import annotations

import math
from dataclasses import replace

from planner_core.core import Attr, Op
from planner_core.ops.operators import Kind, Local, Operator
from planner_core.ops.rules import DimOf, Rule, Shapes, aligned, split
from planner_core.ops.work import Attention, Part, Sizes, fused


def _attention(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Batch and heads may be sharded; the query length only without a causal mask. The number of parts must divide the key heads."""
    q, k = ins[0], ins[1]
    mask = ins[3] if len(ins) > 3 else None

    def at(dim: int, key: DimOf, value: DimOf) -> list[DimOf]:
        return [dim, key, value] + ([aligned(mask, len(q), dim)] if mask is not None else [])

    if len(q) != 4:
        return Rule((split("batch", at(0, 0, 0), [0], q[0]),) if len(q) > 2 else ())
    found = [split("batch", at(0, 0, 0), [0], q[0])] if q[0] > 1 else []
    if q[1] > 1 and k[1] > 1:
        found.append(split("heads", at(1, 1, 1), [1], q[1], k[1]))
    if not op.attrs.get("is_causal") and q[2] > 1:
        found.append(split("queries", at(2, None, None), [2], q[2]))
    return Rule(tuple(found))


def attention_shape(op: Op, sizes: Sizes) -> Attention:
    """The attention kernel for operands [..., heads, length, width]. A tensor without a dim of heads has one head.

    A mask that is a tensor does not save work: the kernel computes every pair of query and key, and then adds the mask. A causal
    mask counts half of the pairs. A window (`window_size`, keys before and behind, as flash attention names it) counts its band.
    """
    q, k, v = sizes.ins[:3]
    several = len(q) > 3
    heads, kv_heads = (q[-3], k[-3]) if several else (1, 1)
    batch = math.prod(q[: -3 if several else -2])
    window = op.attrs.get("window_size")
    before, behind = window if isinstance(window, tuple) and len(window) == 2 else (None, None)
    return Attention(
        batch,
        heads,
        kv_heads,
        q[-2],
        k[-2],
        q[-1],
        v[-1],
        causal=bool(op.attrs.get("is_causal")),
        window=(_bounded(before), _bounded(behind)),
    )


def _bounded(keys: Attr) -> int | None:
    return keys if isinstance(keys, int) and keys >= 0 else None


def _attention_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    forward = attention_shape(op, sizes)
    return (fused(forward, replace(forward, backward=True), (0, 1, 2)),)


OPERATORS = (
    Operator(
        name="scaled_dot_product_attention",
        kind=Kind.ATTENTION,
        rule=_attention,
        work=_attention_work,
        arguments="query key value attn_mask dropout_p is_causal",
        defaults={"is_causal": False, "enable_gqa": False},
        ignored=("dropout_p",),
        local=Local.MEMORY,
        title="attention",
    ),
)
