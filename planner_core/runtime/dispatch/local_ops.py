"""One op on one rank's tensors, so that joining every rank's result by its placement gives the whole op.

Most functions run as they are. Those named below need more than their local operands: sizes written as literals speak
of whole tensors, a mean must divide by the whole count, and a split vocabulary, batch or expert dim has to know which
part of it this rank holds.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard

from planner_core.runtime.dispatch.redistribute import all_reduce, position
from planner_core.runtime.plan_reader import Placements, Row


@dataclass
class Call:
    """One call: arguments hold local tensors; `shapes` are those of the whole results."""

    fn: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    row: Row
    shapes: list[tuple[int, ...]]
    mesh: DeviceMesh

    def operand(self, i: int) -> Placements:
        """Placements with which the i-th tensor operand arrives."""
        return self.row.inputs[i].dst if i < len(self.row.inputs) else ()

    def made(self, i: int = 0) -> Placements:
        """Placements of the i-th result as the op makes it."""
        return self.row.outputs[i].src

    def axes(self, placements: Placements, dim: int | None = None) -> list[int]:
        """Mesh axes that split `dim` (None: any dim) into more than one part."""
        return [
            a for a, p in enumerate(placements)
            if isinstance(p, Shard) and (dim is None or p.dim == dim) and self.mesh.size(a) > 1
        ]  # fmt: skip

    def local_shape(self, i: int = 0) -> list[int]:
        """The shape of this rank's part of the i-th result."""
        shape = list(self.shapes[i])
        for axis in self.axes(self.made(i)):
            placement = self.made(i)[axis]
            assert isinstance(placement, Shard)
            shape[placement.dim] //= self.mesh.size(axis)
        return shape

    def plain(self) -> Any:
        """The function as it is, on local tensors."""
        return self.func(*self.args, **self.kwargs)


Rule = Callable[[Call], Any]
_RULES: dict[str, Rule] = {}


def run_local(call: Call) -> Any:
    """Results of the op on local tensors."""
    return _RULES.get(call.fn, Call.plain)(call)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


# --- sizes written as literals ---------------------------------------------------------------------


@_rule("view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel")
def _reshape(call: Call) -> Any:
    if any(isinstance(a, torch.dtype) for a in call.args):
        return call.plain()
    return call.args[0].reshape(call.local_shape())


@_rule("expand", "expand_as", "broadcast_to")
def _expand(call: Call) -> torch.Tensor:
    expanded: torch.Tensor = call.args[0].expand(call.local_shape())
    return expanded


@_rule("as_strided")
def _as_strided(call: Call) -> Any:
    """Chunks of this rank's samples, whose elements lie as in the whole."""
    if not call.axes(call.operand(0)):
        return call.plain()
    stride = call.kwargs.get("stride", call.args[2] if len(call.args) > 2 else None)
    return call.args[0].contiguous().as_strided(call.local_shape(), stride)


@_rule("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def _split(call: Call) -> Any:
    dim = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else 0)
    return call.args[0].split([call.local_shape(i)[dim] for i in range(len(call.shapes))], dim)


@_rule("conv1d", "conv2d", "conv3d")
def _conv(call: Call) -> torch.Tensor:
    args, kwargs = list(call.args), dict(call.kwargs)
    groups = kwargs.pop("groups", args[6] if len(args) > 6 else 1)
    if groups > 1:  # a split depthwise convolution has fewer groups
        groups //= math.prod(call.mesh.size(a) for a in call.axes(call.operand(0), 1))
    out: torch.Tensor = call.func(*args[:6], groups=groups, **kwargs)
    return out


@_rule("to")
def _to(call: Call) -> Any:
    """Tensors without values stay so, whatever device the model's code asks for."""
    return call.func(*on_meta(call.args), **on_meta(call.kwargs)) if call.args[0].is_meta else call.plain()


def on_meta(tree: Any) -> Any:
    """The same arguments with every device replaced by meta."""
    if isinstance(tree, torch.device) or (isinstance(tree, str) and tree.partition(":")[0] in ("cpu", "cuda")):
        return torch.device("meta")
    if isinstance(tree, dict):
        return {name: on_meta(item) for name, item in tree.items()}
    return type(tree)(map(on_meta, tree)) if type(tree) in (tuple, list) else tree


# --- sums and means ----------------------------------------------------------------------------------


@_rule(
    "mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "poisson_nll_loss", "soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss",
    "cosine_embedding_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "ctc_loss",
)  # fmt: skip
def _mean(call: Call) -> torch.Tensor:
    """A local mean is n times its share of the whole mean where the averaged dim is split."""
    out: torch.Tensor = call.plain()
    reduction = call.kwargs.get("reduction", "mean")
    parts = [a for a in call.axes(call.operand(0)) if isinstance(call.made()[a], Partial)]
    return out / math.prod(call.mesh.size(a) for a in parts) if parts and reduction == "mean" else out


@_rule("cross_entropy")
def _cross_entropy(call: Call) -> Any:
    logits = call.operand(0)
    if not call.axes(logits):
        return call.plain()
    return _split_cross_entropy(call, call.axes(logits, 0), call.axes(logits, 1), *call.args, **call.kwargs)


def _split_cross_entropy(
    call: Call, tokens: list[int], classes: list[int], input: torch.Tensor, target: torch.Tensor, weight: None = None,
    size_average: None = None, ignore_index: int = -100, reduce: None = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    if weight is not None or label_smoothing or reduction not in ("mean", "sum"):
        raise NotImplementedError(
            "cross_entropy with class weights, label smoothing or reduction='none' cannot be split"
        )
    if classes:
        start = position(call.operand(0), 1, call.mesh) * input.shape[1]
        total = _ParallelCrossEntropy.apply(input, target, ignore_index, start, call.mesh, classes)
    else:
        total = F.cross_entropy(input, target, ignore_index=ignore_index, reduction="sum")
    return total if reduction == "sum" else _per_target(total, target != ignore_index, call.mesh, tokens)


def _per_target(total: torch.Tensor, valid: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int]) -> torch.Tensor:
    """A rank's sum over its tokens, divided by the number of valid targets of all ranks."""
    count = valid.sum().float()  # 4 bytes
    return (total / _over(count, mesh, axes)).to(total.dtype)


@_rule("nll_loss")
def _nll_loss(call: Call) -> Any:
    tokens = call.axes(call.operand(0), 0)
    return _split_nll_loss(call, tokens, *call.args, **call.kwargs) if tokens else call.plain()


def _split_nll_loss(
    call: Call, tokens: list[int], input: torch.Tensor, target: torch.Tensor, weight: None = None, size_average: None = None,
    ignore_index: int = -100, reduce: None = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    total = F.nll_loss(input, target, ignore_index=ignore_index, reduction="sum")
    return total if reduction == "sum" else _per_target(total, target != ignore_index, call.mesh, tokens)


class _ParallelCrossEntropy(torch.autograd.Function):
    """Sum of token losses where each rank holds the logits of some classes; the classes start at `start` here."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        start: int,
        mesh: DeviceMesh,
        axes: list[int],
    ) -> torch.Tensor:
        valid = target != ignore_index
        index = target - start
        own = (index >= 0) & (index < logits.shape[1]) & valid
        index = torch.where(own, index, 0).unsqueeze(1)
        wide = _wide(logits)
        top = logits.amax(1).to(wide)
        for axis in axes:
            top = all_reduce(top, mesh, axis, "max")
        shifted = logits.to(wide) - top.unsqueeze(1)
        picked = shifted.gather(1, index).squeeze(1).where(own, 0)  # not a product: a masked class is -inf
        weights = shifted.exp_()
        norm = weights.sum(1)
        for axis in axes:
            norm = all_reduce(norm, mesh, axis)
            picked = all_reduce(picked, mesh, axis)
        ctx.save_for_backward(weights.div_(norm.unsqueeze(1)), index, own, valid)
        ctx.dtype = logits.dtype
        return (norm.log() - picked).where(valid, 0).sum().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weights, index, own, valid = ctx.saved_tensors
        part = weights * valid.unsqueeze(1)
        part.scatter_add_(1, index, -own.unsqueeze(1).to(part.dtype))
        return part.mul_(gradient).to(ctx.dtype), None, None, None, None, None


@_rule("moe_experts")
def _moe_experts(call: Call) -> Any:
    """This rank's own experts only; without values (on meta) routing is taken to be balanced."""
    axes = call.axes(call.operand(3), 0)
    if not axes:
        return call.plain()
    hidden, index, *rest = call.args
    first = position(call.operand(3), 0, call.mesh) * rest[1].shape[0]
    if hidden.is_meta:
        index = index[: max(1, len(index) // math.prod(call.mesh.size(a) for a in axes))]
    return call.func(hidden, index, *rest, **{**call.kwargs, "first_expert": first})


# --- lookups, norms, attention -----------------------------------------------------------------------


@_rule("embedding")
def _embedding(call: Call) -> Any:
    """Rows of the table that this rank holds; zero for ids that stand elsewhere."""
    table = 1
    if not call.axes(call.operand(table), 0):
        return call.plain()
    return _split_embedding(position(call.operand(table), 0, call.mesh), *call.args, **call.kwargs)


def _split_embedding(
    part: int, input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, max_norm: None = None, *rest: Any,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    if max_norm is not None:
        raise NotImplementedError("embedding with max_norm cannot split its vocabulary")
    index = input - part * len(weight)
    outside = (index < 0) | (index >= len(weight))
    if padding_idx is not None:
        padding_idx = padding_idx % (len(weight) * (part + 1)) - part * len(weight) if padding_idx >= 0 else None
        padding_idx = padding_idx if padding_idx is not None and 0 <= padding_idx < len(weight) else None
    rows = F.embedding(index.masked_fill(outside, 0), weight, padding_idx, None, *rest, **options)
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


SPLIT = "_shardscope_split"
"""Attribute of a buffer of which every rank updates its own share: the placements."""


@_rule("batch_norm")
def _batch_norm(call: Call) -> Any:
    statistics = (*call.args[1:3], call.kwargs.get("running_mean"), call.kwargs.get("running_var"))
    for i, running in enumerate(t for t in statistics if t is not None):
        whole = running._base if running._base is not None else running
        setattr(whole, SPLIT, call.operand(1 + i))
    return _split_batch_norm(call, call.axes(call.operand(0), 0), *call.args, **call.kwargs)


def _split_batch_norm(
    call: Call, axes: list[int], input: torch.Tensor, running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    if not axes or not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    out, mean, var, count = _SyncBatchNorm.apply(input, weight, bias, eps, call.mesh, axes)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    normed: torch.Tensor = out
    return normed


class _SyncBatchNorm(torch.autograd.Function):
    """Batch normalisation over a batch that several ranks share: sums and sums of squares are exchanged."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, mesh: DeviceMesh,
        axes: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:  # fmt: skip
        dims = [d for d in range(x.dim()) if d != 1]
        wide = [1, -1] + [1] * (x.dim() - 2)
        count = math.prod(mesh.size(a) for a in axes) * x.numel() // x.shape[1]
        sums = _over(torch.cat([x.sum(dims, dtype=_wide(x)), (x.to(_wide(x)) ** 2).sum(dims)]), mesh, axes)
        mean, square = (sums / count).chunk(2)
        var = square - mean**2
        scale = (var + eps).rsqrt()
        normed = (x - mean.view(wide)) * scale.view(wide)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.shape, ctx.mesh, ctx.axes, ctx.count = (dims, wide), mesh, axes, count
        out = normed if weight is None or bias is None else normed * weight.view(wide) + bias.view(wide)
        ctx.mark_non_differentiable(mean, var)
        return out.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *unused: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        dims, wide = ctx.shape
        normed = (x - mean.view(wide)) * scale.view(wide)
        by_bias, by_weight = gradient.to(mean.dtype).sum(dims), (gradient * normed).to(mean.dtype).sum(dims)
        shift, slope = (_over(torch.cat([by_bias, by_weight]), ctx.mesh, ctx.axes) / ctx.count).chunk(2)
        factor = scale if weight is None else scale * weight
        dx = factor.view(wide) * (gradient - shift.view(wide) - normed * slope.view(wide))
        grads = (None, None) if weight is None else (by_weight.to(weight.dtype), by_bias.to(weight.dtype))
        return dx.to(x.dtype), *grads, None, None, None


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _over(x: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int]) -> torch.Tensor:
    for axis in axes:
        x = all_reduce(x, mesh, axis)
    return x


@_rule("scaled_dot_product_attention")
def _attention(call: Call) -> torch.Tensor:
    return attention(*call.args, **call.kwargs)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Attention; on meta tensors with the memory of a flash kernel, whatever kernel this device has."""
    if not query.is_meta:
        return F.scaled_dot_product_attention(query, key, value, *rest, **options)
    out: torch.Tensor = _FlashMemory.apply(query, key, value, rest[0] if rest else options.get("attn_mask"))
    return out


class _FlashMemory(torch.autograd.Function):
    """Allocates and saves what a flash kernel does: query, key, value, result, log-sum-exp."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        *lead, heads, length, _ = query.shape
        out = query.new_empty((*lead, length, heads, value.shape[-1])).transpose(-2, -3)
        sums = query.new_empty((*lead, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, *([] if mask is None else [mask]))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, _, _, *mask = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        parts = (query, key, value, *(mask or (query,)))
        return tuple(torch.empty_like(t) if need else None for t, need in zip(parts, wanted, strict=True))
