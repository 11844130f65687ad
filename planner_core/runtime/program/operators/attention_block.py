"""Attention of queries to one block of keys, with the log-sum-exp by which blocks are merged, and its backward.

torch's own kernels run where they can: flash attention on a GPU in half precision, and the flash kernel for CPUs. Elsewhere the
block is written out, with scores of [queries, keys] for each head.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

Pair = tuple[torch.Tensor, torch.Tensor]
ThreeTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_can_run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, gqa: bool) -> bool:
    """Return whether the flash kernel of a GPU takes these operands."""
    if not query.is_cuda or query.shape[-1] % 8:
        return False
    return bool(can_use_flash_attention(SDPAParams(query, key, value, None, dropout_p, False, gqa)))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def empty_flash_layout(like: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor [sample, head, token, width] with the tokens of `like`, in the memory order of a flash kernel."""
    samples, heads, tokens, _ = like.shape
    return like.new_empty((samples, tokens, heads, width), dtype=dtype).transpose(1, 2)


def attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> Pair:
    """Return the result [sample, head, query, width] and the log-sum-exp [sample, head, query] of one block of keys.

    `key` and `value` may have fewer heads than `query`. With `causal`, there are as many keys as queries, at the same
    positions.
    """
    if query.is_meta:
        return empty_flash_layout(query, value.shape[-1], query.dtype), query.new_empty(
            query.shape[:-1], dtype=torch.float32
        )
    if flash_can_run(query, key, value, 0.0, key.shape[1] != query.shape[1]):
        flash = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return flash[0], flash[1]
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    if _cpu_flash_can_run(query, value):
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, sums
    scores = _attention_scores(query, key, causal, scale)
    # In `accumulation_dtype`, since parts of many blocks are merged by it.
    sums = scores.logsumexp(-1)
    return ((scores - sums[..., None]).exp() @ value.to(scores.dtype)).to(query.dtype), sums


def attend_block_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> ThreeTensors:
    """Return the gradients of the queries, and the terms of these queries in the gradients of the block's keys and values.

    `out` and `sums` are the result and the log-sum-exp over all blocks, and `gradient` is that of the result.
    """
    if query.is_meta:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    sums = sums.contiguous()
    if flash_can_run(query, key, value, 0.0, key.shape[1] != query.shape[1]):
        rng_state = torch.empty(2, dtype=torch.uint64, device=query.device)  # not read without dropout
        flash: ThreeTensors = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            sums,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            rng_state,
            rng_state,
            scale=scale,
        )
        return flash
    heads = key.shape[1]
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    if _cpu_flash_can_run(query, value):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, sums, 0.0, causal, scale=scale
        )
    else:
        gradients = _explicit_backward(gradient, query, key, value, out, sums, causal, scale)
    return gradients[0], _sum_heads(gradients[1], heads), _sum_heads(gradients[2], heads)


def _explicit_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> ThreeTensors:
    weights = (_attention_scores(query, key, causal, scale) - sums[..., None]).exp()
    q, k, v, out, d = (t.to(weights.dtype) for t in (query, key, value, out, gradient))
    # Softmax's gradient subtracts the sum of weights * gradient over all keys, and that sum is d * out. So with `out` and `sums` of all
    # blocks, each block's backward needs no other block.
    score_gradient = weights * (d @ v.mT - (d * out).sum(-1, keepdim=True)) * _softmax_scale(query, scale)
    return (score_gradient @ k).to(query.dtype), (score_gradient.mT @ q).to(key.dtype), (weights.mT @ d).to(value.dtype)


def _cpu_flash_can_run(query: torch.Tensor, value: torch.Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _softmax_scale(query: torch.Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _attention_scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    dtype = accumulation_dtype(query.dtype)
    scores = query.to(dtype) @ key.to(dtype).mT * _softmax_scale(query, scale)
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf)


def _repeat_heads(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat heads of keys or values, so that each head of the queries has one."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _sum_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum the gradients of heads that `_repeat_heads` repeated."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
