"""Operators that need more than their local operands, since the vocabulary, the batch or the classes are sharded.
(If experts are: `experts`. If the sequence is: `attention` and `ring`.)

Each takes the axes that shard the dim. Without such axes it is torch's own function. Generated code calls
them.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from planner_core.runtime.program.collectives.ranks import Axes, num_shards, shard_index


def _sum_over(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    for axis in axes:
        x = axis.all_reduce(x)
    return x


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# --- losses -------------------------------------------------------------------------------------------


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    samples: Axes = (),
    classes: Axes = (),
) -> torch.Tensor:
    """This rank's term of the loss. `logits` are [token, class, ...]; the axes `samples` shard any dim but that of the classes, the axes
    `classes` that one."""
    if classes:
        start = shard_index(classes) * logits.shape[1]
        total: torch.Tensor = _ClassParallelLoss.apply(logits, target, ignore_index, start, classes)
    else:
        total = F.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=_sum_reduction(reduction),
            label_smoothing=label_smoothing,
        )
    if target.is_floating_point() and reduction == "mean":  # weights of all classes for each token, which counts as one
        return total / (target.numel() // target.shape[1] * num_shards(samples))
    return total if reduction != "mean" else _divide_by_targets(total, target, weight, ignore_index, samples)


def nll_loss(
    logs: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    samples: Axes = (),
) -> torch.Tensor:
    """This rank's term of the loss; the axes `samples` shard the tokens."""
    total = F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=_sum_reduction(reduction))
    return total if reduction != "mean" else _divide_by_targets(total, target, weight, ignore_index, samples)


def _sum_reduction(reduction: str) -> str:
    return "sum" if reduction == "mean" else reduction


def _divide_by_targets(
    total: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, samples: Axes
) -> torch.Tensor:
    """This rank's sum over its tokens, divided by the number of valid targets on all ranks, or by the weights of their classes."""
    valid = target != ignore_index
    each = valid if weight is None else weight[target.where(valid, 0)].where(valid, 0)
    count = each.sum(dtype=torch.float32 if weight is None else _wide(weight))  # 4 bytes, or those of a weight
    return (total / _sum_over(count, samples)).to(total.dtype)


class _ClassParallelLoss(torch.autograd.Function):
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
        shifted = logits - top.unsqueeze(1)  # in the wide dtype of `top`, without a copy of the logits in it
        picked = shifted.gather(1, index).squeeze(1).where(own, 0)  # not a product: a masked class is -inf
        weights = shifted.exp_()
        norm = _sum_over(weights.sum(1), axes)
        picked = _sum_over(picked, axes)
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
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    rows: Axes = (),
) -> torch.Tensor:
    """Look up ids in this rank's rows of the table; the axes `rows` shard the rows. Ids in other ranks' rows give zeros."""
    start = shard_index(rows) * len(weight)
    index = ids - start
    outside = (index < 0) | (index >= len(weight))
    if padding_idx is not None:
        padding_idx = padding_idx % (len(weight) * num_shards(rows)) - start
        padding_idx = padding_idx if 0 <= padding_idx < len(weight) else None
    found = F.embedding(index.masked_fill(outside, 0), weight, padding_idx, None, 2.0, scale_grad_by_freq, sparse)
    return found.masked_fill_(outside.unsqueeze(-1), 0)


def batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
    samples: Axes = (),
) -> torch.Tensor:
    """Batch normalisation in training; the axes `samples` shard the samples. Statistics are those of all samples."""
    out, mean, var, count = _SyncBatchNorm.apply(x, weight, bias, eps, samples)
    if running_mean is not None and running_var is not None:
        running_mean.data.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.data.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
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
        count = num_shards(axes) * x.numel() // x.shape[1]
        sums = _sum_over(torch.cat([x.sum(dims, dtype=_wide(x)), (x.to(_wide(x)) ** 2).sum(dims)]), axes)
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
        shift, slope = (_sum_over(torch.cat([by_bias, by_weight]), ctx.axes) / ctx.count).chunk(2)
        factor = scale if weight is None else scale * weight
        dx = factor.view(wide) * (gradient - shift.view(wide) - normed * slope.view(wide))
        grads = (None, None) if weight is None else (by_weight.to(weight.dtype), by_bias.to(weight.dtype))
        return dx.to(x.dtype), *grads, None, None


# --- counts -------------------------------------------------------------------------------------------


def histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """How many elements are in each bin. A model asks a GPU for whole numbers, which torch counts there alone."""
    if x.is_cuda or x.is_floating_point():
        return torch.histc(x, bins, min, max)
    return torch.histc(x.double(), bins, min, max).to(x.dtype)


# --- memory -------------------------------------------------------------------------------------------


def laid_out(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with its elements in the memory order of these strides. A collective may have changed the order."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
