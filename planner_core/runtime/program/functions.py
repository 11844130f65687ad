"""Operators that need more than their local operands, since the vocabulary, the batch, the classes or the queries are sharded.
(If experts are: `dispatch/experts.py`.)

Each takes the axes that shard the dim. Without such axes it is torch's own function. Generated code and the dispatch mode both
call these functions.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from planner_core.runtime.dispatch.kept import passing
from planner_core.runtime.dispatch.ranks import Axes, part, parts

Kernel = Callable[..., torch.Tensor]


def _sum(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    for axis in axes:
        x = axis.all_reduce(x)
    return x


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# --- losses -------------------------------------------------------------------------------------------


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, reduction: str = "mean", samples: Axes = (),
    classes: Axes = (),
) -> torch.Tensor:  # fmt: skip
    """This rank's term of the loss. `logits` are [token, class]; the axes `samples` shard tokens, the axes `classes` the vocabulary."""
    if classes:
        start = part(classes) * logits.shape[1]
        total: torch.Tensor = _ClassParallel.apply(logits, target, ignore_index, start, classes)
    else:
        total = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
    return total if reduction == "sum" else _per_target(total, target, ignore_index, samples)


def nll_loss(
    logs: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, reduction: str = "mean", samples: Axes = ()
) -> torch.Tensor:
    """This rank's term of the loss; the axes `samples` shard the tokens."""
    total = F.nll_loss(logs, target, ignore_index=ignore_index, reduction="sum")
    return total if reduction == "sum" else _per_target(total, target, ignore_index, samples)


def _per_target(total: torch.Tensor, target: torch.Tensor, ignore_index: int, samples: Axes) -> torch.Tensor:
    """This rank's sum over its tokens, divided by the number of valid targets on all ranks."""
    count = _sum((target != ignore_index).sum().float(), samples)  # 4 bytes
    return (total / count).to(total.dtype)


class _ClassParallel(torch.autograd.Function):
    """The sum of token losses, if each rank holds the logits of some classes. This rank's classes begin at `start`."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, start: int, axes: Axes
    ) -> torch.Tensor:
        valid = target != ignore_index
        index = target - start
        own = (index >= 0) & (index < logits.shape[1]) & valid
        index = torch.where(own, index, 0).unsqueeze(1)
        wide = _wide(logits)
        top = logits.amax(1).to(wide)
        for axis in axes:
            top = axis.all_reduce(top, "max")
        shifted = logits.to(wide) - top.unsqueeze(1)
        picked = shifted.gather(1, index).squeeze(1).where(own, 0)  # not a product: a masked class is -inf
        weights = shifted.exp_()
        norm = _sum(weights.sum(1), axes)
        picked = _sum(picked, axes)
        ctx.save_for_backward(weights.div_(norm.unsqueeze(1)), index, own, valid)
        ctx.dtype = logits.dtype
        return (norm.log() - picked).where(valid, 0).sum().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weights, index, own, valid = ctx.saved_tensors
        share = weights * valid.unsqueeze(1)
        share.scatter_add_(1, index, -own.unsqueeze(1).to(share.dtype))
        return share.mul_(gradient).to(ctx.dtype), None, None, None, None


# --- lookups and norms ----------------------------------------------------------------------------------


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, padding_idx: int | None = None, scale_grad_by_freq: bool = False,
    sparse: bool = False, rows: Axes = (),
) -> torch.Tensor:  # fmt: skip
    """Look up ids in this rank's rows of the table; the axes `rows` shard the rows. Ids in other ranks' rows give zeros."""
    start = part(rows) * len(weight)
    index = ids - start
    outside = (index < 0) | (index >= len(weight))
    if padding_idx is not None:
        padding_idx = padding_idx % (len(weight) * parts(rows)) - start
        padding_idx = padding_idx if 0 <= padding_idx < len(weight) else None
    found = F.embedding(index.masked_fill(outside, 0), weight, padding_idx, None, 2.0, scale_grad_by_freq, sparse)
    return found.masked_fill_(outside.unsqueeze(-1), 0)


def batch_norm(
    x: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, *, momentum: float = 0.1, eps: float = 1e-5, samples: Axes = (),
) -> torch.Tensor:  # fmt: skip
    """Batch normalisation in training; the axes `samples` shard the samples. Statistics are those of all samples."""
    out, mean, var, count = _SyncBatchNorm.apply(x, weight, bias, eps, samples)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    normed: torch.Tensor = out
    return normed


class _SyncBatchNorm(torch.autograd.Function):
    """Batch normalisation in which ranks exchange sums and sums of squares."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, axes: Axes
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        dims = [d for d in range(x.dim()) if d != 1]
        wide = [1, -1] + [1] * (x.dim() - 2)
        count = parts(axes) * x.numel() // x.shape[1]
        sums = _sum(torch.cat([x.sum(dims, dtype=_wide(x)), (x.to(_wide(x)) ** 2).sum(dims)]), axes)
        mean, square = (sums / count).chunk(2)
        var = square - mean**2
        scale = (var + eps).rsqrt()
        normed = (x - mean.view(wide)) * scale.view(wide)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.shape, ctx.axes, ctx.count = (dims, wide), axes, count
        out = normed if weight is None or bias is None else normed * weight.view(wide) + bias.view(wide)
        ctx.mark_non_differentiable(mean, var)
        return out.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *unused: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        dims, wide = ctx.shape
        normed = (x - mean.view(wide)) * scale.view(wide)
        by_bias, by_weight = gradient.to(mean.dtype).sum(dims), (gradient * normed).to(mean.dtype).sum(dims)
        shift, slope = (_sum(torch.cat([by_bias, by_weight]), ctx.axes) / ctx.count).chunk(2)
        factor = scale if weight is None else scale * weight
        dx = factor.view(wide) * (gradient - shift.view(wide) - normed * slope.view(wide))
        grads = (None, None) if weight is None else (by_weight.to(weight.dtype), by_bias.to(weight.dtype))
        return dx.to(x.dtype), *grads, None, None


# --- causal attention -----------------------------------------------------------------------------------


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, queries: Axes, kernel: Kernel | None = None, **options: Any
) -> torch.Tensor:  # fmt: skip
    """Causal attention of this rank's queries [sample, head, token, width]; the axes `queries` shard the tokens of all queries.

    Of 2n blocks of queries this rank holds 2i and 2i+1, and computes 2i and 2n-1-2i: each rank then has equally many pairs of a query
    and a key (see `ops/catalog/attention.py`). `options` are those of torch's function. `kernel` runs in its place.
    """
    kernel = kernel or F.scaled_dot_product_attention
    n, i, block = parts(queries), part(queries), query.shape[-2] // 2
    ends = (block * (2 * i + 1), block * (2 * n - 2 * i))
    blocks = _ToMirror.apply(query, -2, queries)
    keys, values = _Beginnings.apply(key, ends), _Beginnings.apply(value, ends)
    made = [_last_rows(kernel, *each, options).transpose(-2, -3) for each in zip(blocks, keys, values, strict=True)]
    back: torch.Tensor = _FromMirror.apply(*made, -3, queries)
    return back.transpose(-2, -3)  # laid out as a flash kernel lays it out


def _last_rows(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Causal attention of the last queries: the last query sees all of these keys.

    torch's function aligns a causal mask with the first key. The flash kernel aligns it with the last one, as is needed here. Where it
    cannot run, the mask is a tensor.
    """
    rows, columns = query.shape[-2], key.shape[-2]
    if query.is_meta or rows == columns:
        return kernel(query, key, value, is_causal=True, **options)
    if query.is_cuda and _flash_can_run(query, key, value, options):
        dropout_p, scale = options.get("dropout_p", 0.0), options.get("scale")
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, True, scale=scale
        )[0]
        return out
    mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    return kernel(query, key, value, attn_mask=mask, **options)


def _flash_can_run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> bool:
    params = SDPAParams(
        query, key, value, None, options.get("dropout_p", 0.0), False, bool(options.get("enable_gqa", False))
    )
    return query.shape[-1] % 8 == 0 and can_use_flash_attention(params)


def _swap(kept: torch.Tensor, sent: torch.Tensor, axes: Axes) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank keeps, and what its mirror on all `axes` sends for what it gets. Both are parts of one new tensor."""
    for axis in axes:
        mirror = axis.size - 1 - axis.rank
        counts = [int(r == axis.rank) + int(r == mirror) for r in range(axis.size)]
        pair = (kept, sent) if axis.rank <= mirror else (sent, kept)
        with passing():
            pieces = torch.stack(pair)
        first, second = axis.exchange(pieces, counts).unbind(0)
        kept, sent = (first, second) if axis.rank <= mirror else (second, first)
    return kept, sent


class _ToMirror(torch.autograd.Function):
    """The first half of a tensor along `dim`, and the second half of the mirror's."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axes: Axes) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.where = dim, axes
        first, second = x.chunk(2, dim)
        return _swap(first, second, axes)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        dim, axes = ctx.where
        return torch.cat(_swap(first, second, axes), dim), None, None


class _FromMirror(torch.autograd.Function):
    """The inverse of `_ToMirror`."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
        ctx.where = dim, axes
        with passing():
            halves = _swap(first, second, axes)
        return torch.cat(halves, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dim, axes = ctx.where
        first, second = gradient.chunk(2, dim)
        return *_swap(first, second, axes), None, None


class _Beginnings(torch.autograd.Function):
    """The first tokens of keys or values up to each of two `ends`, as views. Backward adds both gradients into one tensor."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ends: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.length = x.shape[-2]
        return x[..., : ends[0], :], x[..., : ends[1], :]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        short, long = sorted(gradients, key=lambda g: g.shape[-2])
        whole = long.new_zeros((*long.shape[:-2], ctx.length, long.shape[-1]))
        whole[..., : long.shape[-2], :] = long
        whole[..., : short.shape[-2], :] += short
        return whole, None
