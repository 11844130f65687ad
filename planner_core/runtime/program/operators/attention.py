"""Causal attention in which each rank has some of the queries, and all keys and values."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from planner_core.runtime.program.collectives.ranks import Axes, num_shards, shard_index
from planner_core.runtime.program.operators.attention_block import flash_can_run
from planner_core.runtime.program.operators.selective import in_transit

Kernel = Callable[..., torch.Tensor]


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    queries: Axes,
    kernel: Kernel | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend this rank's queries [sample, head, token, width] causally; the axes `queries` shard the tokens of all queries.

    Of 2n blocks of queries this rank i holds 2i and 2i+1, and computes 2i and 2n-1-2i, so that all ranks have equally many
    pairs of a query and a key (`ops/catalog/attention.py`). Example with n = 2, keys seen per block 1 2 | 3 4: rank 0 computes
    blocks 0 and 3 (1 + 4), rank 1 blocks 2 and 1 (3 + 2).

    `options` are those of torch's function. `kernel` runs in its place.
    """
    kernel = kernel or F.scaled_dot_product_attention
    n, i, block = num_shards(queries), shard_index(queries), query.shape[-2] // 2
    # The last query of block b sees the keys of blocks 0 to b. For blocks 2i and 2n-1-2i these are 2i+1 and 2n-2i blocks of keys.
    ends = (block * (2 * i + 1), block * (2 * n - 2 * i))
    blocks = _SendToMirror.apply(query, -2, queries)
    keys, values = _KeyPrefixes.apply(key, ends), _KeyPrefixes.apply(value, ends)
    parts = [
        _attend_last_queries(kernel, *each, options).transpose(-2, -3)
        for each in zip(blocks, keys, values, strict=True)
    ]
    result: torch.Tensor = _ReturnFromMirror.apply(*parts, -3, queries)
    return result.transpose(-2, -3)  # laid out as a flash kernel lays it out


def _attend_last_queries(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Attend the last queries causally: the last query sees all of these keys.

    torch's function aligns a causal mask with the first key; the flash kernel aligns it with the last one, which is right here.
    Where the flash kernel cannot run, the mask is a tensor.
    """
    rows, columns = query.shape[-2], key.shape[-2]
    # With as many queries as keys the first and the last key are aligned at once, so torch's own mask is right.
    if query.is_meta or rows == columns:
        return kernel(query, key, value, is_causal=True, **options)
    dropout_p, scale = options.get("dropout_p", 0.0), options.get("scale")
    if flash_can_run(query, key, value, dropout_p, bool(options.get("enable_gqa", False))):
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, True, scale=scale
        )[0]
        return out
    mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    return kernel(query, key, value, attn_mask=mask, **options)


def exchange_with_mirror(retained: torch.Tensor, sent: torch.Tensor, axes: Axes) -> tuple[torch.Tensor, torch.Tensor]:
    """Send a tensor to this rank's mirror on all `axes`, and return the one that is kept and the one received. Both lie in one
    new tensor."""
    for axis in axes:
        mirror = axis.size - 1 - axis.rank
        # Of an odd number of ranks the middle one is its own mirror, and exchanges both pieces with itself.
        counts = [int(r == axis.rank) + int(r == mirror) for r in range(axis.size)]
        # An all_to_all takes its pieces in the order of the ranks to which they go.
        order = (retained, sent) if axis.rank <= mirror else (sent, retained)
        with in_transit():
            pieces = torch.stack(order)
        first, second = axis.exchange(pieces, counts).unbind(0)
        retained, sent = (first, second) if axis.rank <= mirror else (second, first)
    return retained, sent


class _SendToMirror(torch.autograd.Function):
    """The first half of a tensor along `dim`, and the second half of the mirror's."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axes: Axes) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.where = dim, axes
        first, second = x.chunk(2, dim)
        return exchange_with_mirror(first, second, axes)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        dim, axes = ctx.where
        return torch.cat(exchange_with_mirror(first, second, axes), dim), None, None


class _ReturnFromMirror(torch.autograd.Function):
    """The inverse of `_SendToMirror`."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
        ctx.where = dim, axes
        with in_transit():
            halves = exchange_with_mirror(first, second, axes)
        return torch.cat(halves, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dim, axes = ctx.where
        first, second = gradient.chunk(2, dim)
        return *exchange_with_mirror(first, second, axes), None, None


class _KeyPrefixes(torch.autograd.Function):
    """The first tokens of keys or values up to each of two `ends`, as views. Backward adds both gradients into one tensor."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ends: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.length = x.shape[-2]
        return x[..., : ends[0], :], x[..., : ends[1], :]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        short, long = sorted(gradients, key=lambda g: g.shape[-2])
        total = long.new_zeros((*long.shape[:-2], ctx.length, long.shape[-1]))
        total[..., : long.shape[-2], :] = long
        total[..., : short.shape[-2], :] += short
        return total, None
