"""Ring attention: each rank has a part of the queries, and the same part of the keys and values.

A rank computes its queries against its own block of keys and values. Meanwhile it sends the block to the next rank, and
receives one from the rank before. After n - 1 sends every rank has seen every block. The parts of the result are merged by
their log-sum-exp. In backward the blocks go round once more. The sums of their gradients follow one step later, and a last send
brings them home.

Causal: a rank exchanges its second half with its mirror, as in `attention`, so that it has a low and a high part of the
sequence. Of a block from a lower rank all queries see the low half of the keys; of any other block the high half of the queries
sees all keys. So each step has half of the pairs of a block, on every rank.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.collectives.ranks import Axes
from planner_core.runtime.program.operators.attention import exchange_with_mirror
from planner_core.runtime.program.operators.attention_block import (
    accumulation_dtype,
    attend_block,
    attend_block_backward,
    empty_flash_layout,
)
from planner_core.runtime.program.operators.selective import in_transit

Receive = Callable[[], torch.Tensor]
LOW, HIGH = 0, 1


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    ring: Axes,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attend this rank's queries [sample, head, token, width]. The axis `ring` shards queries, keys and values by token.

    Heads of keys and values may be fewer than those of queries. Raises NotImplementedError for dropout, and on two axes.
    """
    if dropout_p:
        raise NotImplementedError(
            "attention whose keys and values are passed around a ring cannot drop weights out; set the model's attention dropout "
            "to 0, or edit the plan so that this attention takes whole keys and values"
        )
    if len(ring) != 1:
        raise NotImplementedError("attention can be passed around a ring along one mesh axis; plan this model again")
    out: torch.Tensor = _RingAttention.apply(query, key, value, ring[0], is_causal, scale)
    return out


class _RingAttention(torch.autograd.Function):
    _shardscope = True  # not an op of the model

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        axis: Axis,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        if causal:
            query, key, value = (_to_ends(t, axis, -2) for t in (query, key, value))
        with in_transit():
            merged, sums = _ring_forward(query, key, value, axis, causal, scale)
        # Copies outside of `in_transit`: of what is made inside, a recomputed block keeps the shapes alone, and backward reads these.
        result, sums = merged.to(query.dtype, copy=True), sums.clone()
        out = _from_ends(result.transpose(1, 2), axis, -3).transpose(1, 2) if causal else result
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.how = axis, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        axis, causal, scale = ctx.how
        saved = ctx.saved_tensors
        if causal:
            gradient = _to_ends(gradient.transpose(1, 2), axis, -3).transpose(1, 2)
        summed = any(ctx.needs_input_grad[1:3])
        gradients = _ring_backward(gradient, saved, axis, causal, scale, summed)
        returned = [g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False)]
        if causal:
            returned = [None if g is None else _from_ends(g, axis, -2) for g in returned]
        return *returned, None, None, None


def _ring_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: Axis, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result over all blocks and its log-sum-exp, both in the dtype of sums."""
    block = _pack_block(key, value)
    merged, sums = empty_flash_layout(query, value.shape[-1], accumulation_dtype(query.dtype)), query.new_empty(0)
    for step in range(axis.size):
        received = axis.start_send_recv(block) if step < axis.size - 1 else None
        rows, keys = _visible_halves(axis, step, causal)
        k, v = (_select_half(t, keys) for t in _unpack_block(block, key, value))
        part, part_sums = attend_block(_select_half(query, rows), k, v, causal and not step, scale)
        # The first block gives the result its first values, so nothing has to be set to zero or to minus infinity before.
        if step:
            _merge_block(_select_half(merged, rows), _select_half(sums[..., None], rows), part, part_sums[..., None])
        else:
            merged.copy_(part)
            sums = part_sums.to(merged.dtype)
        block = block if received is None else received()
    return merged, sums


def _merge_block(merged: torch.Tensor, sums: torch.Tensor, part: torch.Tensor, part_sums: torch.Tensor) -> None:
    """Add one block's part to a result, in place. Both are weighted by their sums of exponentials."""
    total = torch.logaddexp(sums, part_sums)
    # The weights exp(sums - total) and exp(part_sums - total) add up to 1, so one lerp does it. Sums of 3 and 1 give 3/4 and 1/4.
    merged.lerp_(part.to(merged.dtype), (part_sums - total).exp())
    sums.copy_(total)


def _ring_backward(
    gradient: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    axis: Axis,
    causal: bool,
    scale: float | None,
    summed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values. Without `summed` those of keys and values are not sent, and mean
    nothing."""
    query, key, value, out, sums = saved
    block = _pack_block(key, value)
    query_gradient = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))
    block_gradient = torch.zeros_like(block, dtype=accumulation_dtype(query.dtype))
    for step in range(axis.size):
        received = axis.start_send_recv(block) if step < axis.size - 1 else None
        # At step s the sum that comes has the terms of the s ranks that had this block before. At step 0 there are none to send.
        received_gradient = axis.start_send_recv(block_gradient) if step and summed else None
        rows, keys = _visible_halves(axis, step, causal)
        k, v = (_select_half(t, keys) for t in _unpack_block(block, key, value))
        at_rows = [_select_half(t, rows) for t in (gradient, query, out, sums[..., None])]
        dq, dk, dv = attend_block_backward(
            at_rows[0], at_rows[1], k, v, at_rows[2], at_rows[3].squeeze(-1), causal and not step, scale
        )
        block = block if received is None else received()
        block_gradient = block_gradient if received_gradient is None else received_gradient()
        _select_half(query_gradient, rows).add_(dq)
        for total, more in zip(_unpack_block(block_gradient, key, value), (dk, dv), strict=True):
            _select_half(total, keys).add_(more)
    if summed:
        block_gradient = axis.start_send_recv(block_gradient)()
    key_gradient, value_gradient = _unpack_block(block_gradient, key, value)
    return query_gradient.to(query.dtype), key_gradient.to(key.dtype), value_gradient.to(value.dtype)


def _pack_block(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a block of keys and values as one flat tensor, so that it is one message."""
    return torch.cat([key.flatten(), value.flatten()])


def _unpack_block(block: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a block, as views."""
    keys, values = block.split([key.numel(), value.numel()])
    return keys.view(key.shape), values.view(value.shape)


# --- who sees what ------------------------------------------------------------------------------------------


def _visible_halves(axis: Axis, step: int, causal: bool) -> tuple[int | None, int | None]:
    """Return which half of the queries and which half of the keys take part in a step; None: all."""
    if not causal or step == 0:
        return None, None
    sender = (axis.rank - step) % axis.size
    # Example with 2 ranks: rank 0 has blocks 0 and 3 of the sequence, rank 1 has 1 and 2. On rank 0 block 3 sees all of 1 and 2;
    # on rank 1 blocks 1 and 2 see block 0. Either way half of the 2 x 2 pairs of blocks are computed.
    return (None, LOW) if _low_block(sender, axis.size) < _low_block(axis.rank, axis.size) else (HIGH, None)


def _low_block(rank: int, size: int) -> int:
    """Return the index of the lower of the two blocks that a rank has after the exchange, of 2 * size blocks."""
    return min(2 * rank, 2 * size - 1 - 2 * rank)


def _select_half(x: torch.Tensor, which: int | None) -> torch.Tensor:
    """Return one half of the tokens (dim -2), or all, as a view."""
    return x if which is None else x.narrow(-2, which * (x.shape[-2] // 2), x.shape[-2] // 2)


def _to_ends(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Exchange this rank's part of a sequence for its lower and its higher block, in this order."""
    with in_transit():
        first, second = x.chunk(2, dim)
        first_half, received = exchange_with_mirror(first, second, [axis])
    # Low block first. Example with 2 ranks: rank 0 keeps 0 and gets 3; rank 1 has 2 and 3, keeps 2 and gets 1, so its order is 1 2.
    return torch.cat((first_half, received) if 2 * axis.rank < axis.size else (received, first_half), dim)


def _from_ends(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Invert `_to_ends`."""
    low, high = x.chunk(2, dim)
    with in_transit():
        halves = (
            exchange_with_mirror(low, high, [axis])
            if 2 * axis.rank < axis.size
            else exchange_with_mirror(high, low, [axis])
        )
    return torch.cat(halves, dim)
