"""Attention as one fused kernel. Samples, heads and queries may be sharded, and keys and values beside the queries.

A causal mask gives late queries more keys than early ones. So a split of causal queries is balanced (`context`): of 2n blocks of
queries GPU i computes blocks 2i and 2n-1-2i, which see 2n+1 blocks of keys together, whatever i is. It holds blocks 2i and 2i+1, so
it exchanges the second one with GPU n-1-i, its mirror: queries before the kernels and results behind them. Keys and values are whole.

A ring (`ring`) shards keys and values too. Blocks of them go round the ranks, each behind the kernel of the block before. Causal, a rank
exchanges halves of queries, keys and values with its mirror first. Then each step has half of the pairs of two blocks, on every rank.

Example: 8 queries on two GPUs, in blocks of 2. GPU 0 holds blocks 0 and 1, and GPU 1 blocks 2 and 3. GPU 0 computes blocks 0 and 3,
which see 2 and 8 keys; GPU 1 computes blocks 2 and 1, which see 6 and 4.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner_core.core import Attr, Op
from planner_core.ops.operators import Kind, LocalExecution, Operator
from planner_core.ops.rules import DimOf, Internal, Rule, Shapes, Split, operand_dim, split
from planner_core.ops.work import Attention, Merge, Part, Sizes, fused_part

CONTEXT = "context"
"""The name of a split of causal queries."""
RING = "ring"
"""The name of a split of queries, keys and values alike."""
ALONG = (RING, CONTEXT, "queries")
"""The splits of a sequence that do not go together with a ring on another axis."""
SUMS = 4
"""Bytes of an element, at least, of the sums of gradients that go round."""
MERGED, SUMMED = 18, 10
"""Bytes of memory traffic for an element in half precision: to cast it and merge it into a result, and to add it to a sum."""


def _attention(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Batch, heads and the query length may be sharded. The number of parts must divide the key heads."""
    q, k = ins[0], ins[1]
    mask = ins[3] if len(ins) > 3 else None

    def at(dim: int, key: DimOf, value: DimOf) -> list[DimOf]:
        return [dim, key, value] + ([operand_dim(mask, len(q), dim)] if mask is not None else [])

    if len(q) != 4:
        return Rule((split("batch", at(0, 0, 0), [0], q[0]),) if len(q) > 2 else ())
    splits = [split("batch", at(0, 0, 0), [0], q[0])] if q[0] > 1 else []
    if q[1] > 1 and k[1] > 1:
        splits.append(split("heads", at(1, 1, 1), [1], q[1], k[1]))
    if not op.attrs.get("is_causal") and q[2] > 1:
        splits.append(split("queries", at(2, None, None), [2], q[2]))
    # With other numbers of queries and keys the mask is aligned otherwise, and an odd number has no two equal blocks.
    if op.attrs.get("is_causal") and q[2] == k[2] and q[2] % 2 == 0 and op.attrs.get("window_size") is None:
        splits.append(_context(q, outs[0], len(ins)))
    if len(ins) == 3 and q[2] > 1 and k[2] > 1 and op.attrs.get("window_size") is None:
        causal = bool(op.attrs.get("is_causal"))
        if not causal or (q[2] == k[2] and q[2] % 2 == 0):
            splits.append(_ring(ins, outs[0], causal))
    return Rule(tuple(splits))


def _context(q: tuple[int, ...], out: tuple[int, ...], num_inputs: int) -> Split:
    """Return the split of causal queries. Each part is two blocks, of which one is exchanged."""
    sent = _mirrored(CONTEXT, ((0, q),), num_inputs, out)
    return Split(CONTEXT, (2, None, None), (2,), (q[2], q[2] // 2), internal=sent, exchanged=(0,))


def _ring(ins: Shapes, out: tuple[int, ...], causal: bool) -> Split:
    """Return the split of queries, keys and values. Keys and values go round, and in backward they and their gradients.

    On n ranks each block takes n - 1 sends. So do its gradients, and one more to come home. If causal, each part is two blocks, of which
    one is exchanged first.
    """
    q, k, v = ins
    sizes = (math.prod(k) + math.prod(v), ("batch", "heads", RING))
    # count + each_rank * n = n - 1 sends, and the last one below brings the gradients home once, whatever n is.
    blocks = Internal("forward", "send_recv", *sizes, count=-1, sends=(1,), each_rank=1, share=1.0)
    returning = replace(blocks, phase="backward", sends=(0, 1, 2), share=1 / 3)
    follow = replace(returning, sends=(1, 2), least_item=SUMS, share=2 / 3)
    round_trip = (blocks, returning, follow, replace(follow, count=1, each_rank=0, share=0.0))
    if not causal:
        return Split(RING, (2, 2, 2), (2,), (q[2], k[2]), internal=round_trip, excludes=ALONG)
    sent = _mirrored(RING, tuple(enumerate(ins)), 3, out)
    return Split(
        RING, (2, 2, 2), (2,), (q[2], q[2] // 2), internal=(*sent, *round_trip), exchanged=(0, 1, 2), excludes=ALONG
    )


def _mirrored(
    name: str, operands: tuple[tuple[int, tuple[int, ...]], ...], num_inputs: int, out: tuple[int, ...]
) -> tuple[Internal, ...]:
    """Return the exchange of halves with the mirror: of some operands and the result forward, and of their gradients backward."""
    return tuple(
        Internal(phase, "all_to_all", math.prod(shape), ("batch", "heads", name), sends=(value,))
        for phase in ("forward", "backward")
        for value, shape in (*operands, (num_inputs, out))
    )


def attention_shape(op: Op, sizes: Sizes) -> Attention:
    """Return the attention kernel for operands [..., heads, length, width]. A tensor without a dim of heads has one head.

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
    """One kernel. If causal queries are split, two: those of the first GPU, which has the first block of queries and the last."""
    whole = attention_shape(op, sizes)
    n = sizes.whole[1][-2] // whole.kv_len
    if n > 1:
        return _ring_work(whole, n)
    kernels = [whole]
    if whole.causal and sizes.whole[0][-2] != whole.q_len:
        block, keys = whole.q_len // 2, whole.kv_len
        # Example: 8 queries on 2 GPUs. GPU 0 has 4: two that see 2 keys, and two from place 6 on that see all 8.
        kernels = [replace(whole, q_len=block, kv_len=block), replace(whole, q_len=block, first=keys - block)]
    return tuple(fused_part(kernel, replace(kernel, backward=True), (0, 1, 2)) for kernel in kernels)


def _ring_work(block: Attention, n: int) -> tuple[Part, ...]:
    """Return the rank's own block, n - 1 other blocks, and their merging: of results forward, and of all gradients backward."""
    half = replace(block, kv_len=block.kv_len // 2, causal=False) if block.causal else block
    other = replace(half, times=n - 1)
    rows, keys = block.batch * block.heads * block.q_len, block.batch * block.kv_heads * block.kv_len
    merged = Merge(MERGED * rows * block.value_dim, n - 1)
    summed = Merge(SUMMED * (rows * block.head_dim + keys * (block.head_dim + block.value_dim)), n)
    kernels = [fused_part(kernel, replace(kernel, backward=True), (0, 1, 2)) for kernel in (block, other)]
    return *kernels, fused_part(merged, summed, (0, 1, 2))


OPERATORS = (
    Operator(
        name="scaled_dot_product_attention",
        kind=Kind.ATTENTION,
        rule=_attention,
        work=_attention_work,
        arguments="query key value attn_mask dropout_p is_causal",
        defaults={"is_causal": False, "enable_gqa": False},
        ignored=("dropout_p",),
        local_execution=LocalExecution.EXCHANGE,
        title="attention",
    ),
)
