"""Operators that need other ranks, since the vocabulary, the batch or the classes are sharded. Generated code calls them.

Each takes the axes that shard the dim. Without such axes it is torch's own function. `experts` has those of sharded experts,
`attention` and `ring` those of a sharded sequence.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from planner_core.runtime.program.collectives.ranks import Axes, num_shards, shard_index
from planner_core.runtime.program.operators.attention_block import accumulation_dtype


def _sum_over(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    for axis in axes:
        x = axis.all_reduce(x)
    return x


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
    """Return this rank's term of the loss of `logits` [token, class, ...]. The axes `classes` shard the classes, and `samples`
    any other dim."""
    if classes:
        first_class = shard_index(classes) * logits.shape[1]
        total: torch.Tensor = _ClassParallelLoss.apply(logits, target, ignore_index, first_class, classes)
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
    """Return this rank's term of the loss. The axes `samples` shard the tokens."""
    total = F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=_sum_reduction(reduction))
    return total if reduction != "mean" else _divide_by_targets(total, target, weight, ignore_index, samples)


def _sum_reduction(reduction: str) -> str:
    return "sum" if reduction == "mean" else reduction


def _divide_by_targets(
    total: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, samples: Axes
) -> torch.Tensor:
    """Divide this rank's sum over tokens by the number of valid targets on all ranks, or by the weights of their classes."""
    valid = target != ignore_index
    each = valid if weight is None else weight[target.where(valid, 0)].where(valid, 0)
    # The count is sent in 4 bytes, or in those of a weight.
    count = each.sum(dtype=torch.float32 if weight is None else accumulation_dtype(weight.dtype))
    # Sums and counts, not means: ranks with 1 and 3 valid targets and sums 2 and 12 have (2 + 12) / 4 = 3.5, and a mean of means gives 3.
    return (total / _sum_over(count, samples)).to(total.dtype)


class _ClassParallelLoss(torch.autograd.Function):
    """The sum of token losses if each rank holds the logits of some classes, from `first_class` on (Megatron-LM's
    vocabulary-parallel loss).

    log(sum over all classes of exp(x)) - x[target]: ranks exchange the maximum, the sum of exponentials and the target's logit.
    """

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, first_class: int, axes: Axes
    ) -> torch.Tensor:
        valid = target != ignore_index
        index = target - first_class
        is_local = (index >= 0) & (index < logits.shape[1]) & valid
        index = torch.where(is_local, index, 0).unsqueeze(1)
        wide = accumulation_dtype(logits.dtype)
        top = logits.amax(1).to(wide)
        for axis in axes:
            top = axis.all_reduce(top, "max")
        shifted = logits - top.unsqueeze(1)  # in the wide dtype of `top`, without a copy of the logits in it
        picked = shifted.gather(1, index).squeeze(1).where(is_local, 0)  # not a product: a masked class is -inf
        weights = shifted.exp_()
        norm = _sum_over(weights.sum(1), axes)
        # The maximum needs no correction: it is subtracted in `norm` and in `picked`, so it cancels in the loss.
        picked = _sum_over(picked, axes)
        ctx.save_for_backward(weights.div_(norm.unsqueeze(1)), index, is_local, valid)
        ctx.dtype = logits.dtype
        return (norm.log() - picked).where(valid, 0).sum().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weights, index, is_local, valid = ctx.saved_tensors
        share = weights * valid.unsqueeze(1)
        # The gradient is softmax minus 1 at the target. Only the rank that has the target's class subtracts; elsewhere `is_local` adds 0.
        share.scatter_add_(1, index, -is_local.unsqueeze(1).to(share.dtype))
        return share.mul_(gradient).to(ctx.dtype), None, None, None, None


# --- lookups and norms ----------------------------------------------------------------------------------


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    padding_idx: int | None = None,
    rows: Axes = (),
) -> torch.Tensor:
    """Look up ids in this rank's rows of the table, which the axes `rows` shard. Ids in other ranks' rows give zeros."""
    # Zeros for the ids of other ranks make the result a term of a sum (Partial), which the plan redistributes as it likes.
    first_class = shard_index(rows) * len(weight)
    index = ids - first_class
    is_remote = (index < 0) | (index >= len(weight))
    if padding_idx is not None:
        # Example: -1 of 8 rows over 2 ranks is row 7 of the table: row 3 on rank 1, and no row of rank 0.
        padding_idx = padding_idx % (len(weight) * num_shards(rows)) - first_class
        padding_idx = padding_idx if 0 <= padding_idx < len(weight) else None
    rows_of_ids = F.embedding(index.masked_fill(is_remote, 0), weight, padding_idx)
    return rows_of_ids.masked_fill_(is_remote.unsqueeze(-1), 0)


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
    """Normalise a training batch by the statistics of all samples, which the axes `samples` shard."""
    out, mean, var, count = _SyncBatchNorm.apply(x, weight, bias, eps, samples)
    if running_mean is not None and running_var is not None:
        running_mean.data.lerp_(mean.to(running_mean.dtype), momentum)
        # torch normalises by the biased variance and remembers the unbiased one.
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
        view_shape = [1, -1] + [1] * (x.dim() - 2)
        count = num_shards(axes) * x.numel() // x.shape[1]
        sums = _sum_over(
            # Both sums travel in one message.
            torch.cat(
                [x.sum(dims, dtype=accumulation_dtype(x.dtype)), (x.to(accumulation_dtype(x.dtype)) ** 2).sum(dims)]
            ),
            axes,
        )
        mean, square = (sums / count).chunk(2)
        var = square - mean**2
        scale = (var + eps).rsqrt()
        normed = (x - mean.view(view_shape)) * scale.view(view_shape)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.shape, ctx.axes, ctx.count = (dims, view_shape), axes, count
        out = normed if weight is None or bias is None else normed * weight.view(view_shape) + bias.view(view_shape)
        ctx.mark_non_differentiable(mean, var)
        return out.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *unused: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        dims, view_shape = ctx.shape
        normed = (x - mean.view(view_shape)) * scale.view(view_shape)
        # These are this rank's terms: the plan sums the gradients of weight and bias. Only dx needs the means over all samples at once.
        by_bias, by_weight = gradient.to(mean.dtype).sum(dims), (gradient * normed).to(mean.dtype).sum(dims)
        shift, slope = (_sum_over(torch.cat([by_bias, by_weight]), ctx.axes) / ctx.count).chunk(2)
        factor = scale if weight is None else scale * weight
        dx = factor.view(view_shape) * (gradient - shift.view(view_shape) - normed * slope.view(view_shape))
        grads = (None, None) if weight is None else (by_weight.to(weight.dtype), by_bias.to(weight.dtype))
        return dx.to(x.dtype), *grads, None, None


# --- counts -------------------------------------------------------------------------------------------


def histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Count elements by bins. On a CPU torch counts real numbers only, and models ask a GPU for whole ones."""
    if x.is_cuda or x.is_floating_point():
        return torch.histc(x, bins, min, max)
    return torch.histc(x.double(), bins, min, max).to(x.dtype)


# --- memory -------------------------------------------------------------------------------------------


def laid_out(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with its elements in the memory order of these strides, which a collective may have changed."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
