"""Run one operator on one rank's tensors. The results of all ranks, joined by their placements, are the global result.

Most functions run unchanged. The functions below need more than their local operands. If sizes are literals, they are those of
the global tensors. A mean must divide by the global count. If the vocabulary, the batch or the experts are sharded, the function
must know which part this rank holds.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard

from planner_core.runtime.dispatch.experts import dispatched_experts, own_experts
from planner_core.runtime.dispatch.redistribute import all_gather, all_reduce, exchange, send_recv
from planner_core.runtime.plan_reader import Placements, Row
from planner_core.runtime.program.operators.attention import causal_attention
from planner_core.runtime.program.operators.functions import batch_norm, cross_entropy, embedding, histc, nll_loss
from planner_core.runtime.program.operators.ring import ring_attention


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh as this rank sees it."""

    mesh: DeviceMesh
    axis: int

    @property
    def size(self) -> int:
        """Ranks on the axis."""
        return self.mesh.size(self.axis)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.get_local_rank(self.axis)

    def all_reduce(self, x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        """The sum (or max) of every rank's tensor."""
        return all_reduce(x, self.mesh, self.axis, reduction)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensors of all ranks, joined along `dim`."""
        return all_gather(x, dim, self.mesh, self.axis)

    def exchange(
        self, pieces: torch.Tensor, counts: list[int], received: list[int] | None = None, *, back: bool = False
    ) -> torch.Tensor:
        """Send `counts[r]` of the pieces along dim 0 to each rank r, and receive `received[r]` from it; in order of ranks."""
        return exchange(pieces, counts, self.mesh, self.axis, received)

    def start_send_recv(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a flat tensor to the next rank, and receive one as long from the rank before."""
        return send_recv(x, self.mesh, self.axis)


@dataclass
class OpCall:
    """One call: the arguments hold local tensors; `shapes` are the global shapes of the results."""

    fn: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    row: Row
    shapes: list[tuple[int, ...]]
    mesh: DeviceMesh

    def operand(self, i: int) -> Placements:
        """Placements with which the operator takes its i-th tensor operand."""
        return self.row.inputs[i].dst if i < len(self.row.inputs) else ()

    def made(self, i: int = 0) -> Placements:
        """Placements of the i-th result as the operator makes it."""
        return self.row.outputs[i].src

    def axes(self, placements: Placements, dim: int | None = None) -> list[int]:
        """The mesh axes of more than one rank that shard `dim` (None: any dim)."""
        return [
            a for a, p in enumerate(placements)
            if isinstance(p, Shard) and (dim is None or p.dim == dim) and self.mesh.size(a) > 1
        ]  # fmt: skip

    def ranks(self, placements: Placements, dim: int) -> list[MeshAxis]:
        """The axes that shard `dim`, in the form that the functions of generated code take."""
        return [MeshAxis(self.mesh, a) for a in self.axes(placements, dim)]

    def targets(self) -> list[MeshAxis]:
        """The axes that shard the targets of a loss: any dim of the logits but that of the classes."""
        classes = self.axes(self.operand(0), 1)
        return [MeshAxis(self.mesh, a) for a in self.axes(self.operand(0)) if a not in classes]

    def local_shape(self, i: int = 0) -> list[int]:
        """The shape of this rank's part of the i-th result."""
        shape = list(self.shapes[i])
        for axis in self.axes(self.made(i)):
            placement = self.made(i)[axis]
            assert isinstance(placement, Shard)
            shape[placement.dim] //= self.mesh.size(axis)
        return shape

    def plain(self) -> Any:
        """Call the function unchanged, on local tensors."""
        return self.func(*self.args, **self.kwargs)


Rule = Callable[[OpCall], Any]
_RULES: dict[str, Rule] = {}


def run_local(call: OpCall) -> Any:
    """Results of the op on local tensors."""
    return _RULES.get(call.fn, OpCall.plain)(call)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


# --- sizes written as literals ---------------------------------------------------------------------


@_rule("view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel")
def _reshape(call: OpCall) -> Any:
    if any(isinstance(a, torch.dtype) for a in call.args):
        return call.plain()
    return call.args[0].reshape(call.local_shape())


@_rule("expand", "expand_as", "broadcast_to")
def _expand(call: OpCall) -> torch.Tensor:
    expanded: torch.Tensor = call.args[0].expand(call.local_shape())
    return expanded


@_rule("new_zeros", "new_ones", "new_empty", "new_full")
def _new(call: OpCall) -> Any:
    """The sizes are named, or one argument, behind which may be the number that fills, or all that is behind the operand."""
    if "size" in call.kwargs:
        return call.func(*call.args, **{**call.kwargs, "size": call.local_shape()})
    x, sizes, *fill = call.args
    return call.func(x, call.local_shape(), *(fill if isinstance(sizes, (tuple, list)) else ()), **call.kwargs)


@_rule("as_strided")
def _as_strided(call: OpCall) -> Any:
    """The chunks of this rank's samples; their elements have the same strides as in the global tensor."""
    if not call.axes(call.operand(0)):
        return call.plain()
    stride = call.kwargs.get("stride", call.args[2] if len(call.args) > 2 else None)
    return call.args[0].contiguous().as_strided(call.local_shape(), stride)


@_rule("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def _split(call: OpCall) -> Any:
    dim = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else 0)
    return call.args[0].split([call.local_shape(i)[dim] for i in range(len(call.shapes))], dim)


@_rule("conv1d", "conv2d", "conv3d")
def _conv(call: OpCall) -> torch.Tensor:
    args, kwargs = list(call.args), dict(call.kwargs)
    groups = kwargs.pop("groups", args[6] if len(args) > 6 else 1)
    if groups > 1:  # a split depthwise convolution has fewer groups
        groups //= math.prod(call.mesh.size(a) for a in call.axes(call.operand(0), 1))
    out: torch.Tensor = call.func(*args[:6], groups=groups, **kwargs)
    return out


@_rule("to")
def _to(call: OpCall) -> Any:
    """A tensor on meta stays on meta, whatever device the model's code asks for."""
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
def _mean(call: OpCall) -> torch.Tensor:
    """If the averaged dim is sharded over n ranks, this rank's term of the global mean is its local mean divided by n."""
    out: torch.Tensor = call.plain()
    reduction = call.kwargs.get("reduction", "mean")
    parts = [a for a in call.axes(call.operand(0)) if isinstance(call.made()[a], Partial)]
    return out / math.prod(call.mesh.size(a) for a in parts) if parts and reduction == "mean" else out


@_rule("cross_entropy")
def _cross_entropy(call: OpCall) -> Any:
    logits = call.operand(0)
    if not call.axes(logits):
        return call.plain()
    return _split_cross_entropy(call.targets(), call.ranks(logits, 1), *call.args, **call.kwargs)


def _split_cross_entropy(
    samples: list[MeshAxis], classes: list[MeshAxis], input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None,
    size_average: None = None, ignore_index: int = -100, reduce: None = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    return cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, samples=samples,
        classes=classes,
    )  # fmt: skip


@_rule("nll_loss")
def _nll_loss(call: OpCall) -> Any:
    samples = call.targets()
    return _split_nll_loss(samples, *call.args, **call.kwargs) if samples else call.plain()


def _split_nll_loss(
    samples: list[MeshAxis], input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, size_average: None = None,
    ignore_index: int = -100, reduce: None = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    return nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction, samples=samples)


@_rule("moe_experts")
def _moe_experts(call: OpCall) -> Any:
    experts, tokens = call.ranks(call.operand(3), 0), call.axes(call.operand(0), 0)
    options = {name: value for name, value in call.kwargs.items() if name != "first_expert"}
    for axis in experts:
        if axis.axis in tokens:
            return dispatched_experts(call.func, *call.args, dispatch=axis, **options)
    return own_experts(call.func, *call.args, experts=experts, **options) if experts else call.plain()


# --- lookups, norms, attention -----------------------------------------------------------------------


@_rule("embedding")
def _embedding(call: OpCall) -> Any:
    rows = call.ranks(call.operand(1), 0)
    return _split_embedding(rows, *call.args, **call.kwargs) if rows else call.plain()


def _split_embedding(
    rows: list[MeshAxis], input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, max_norm: None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> torch.Tensor:  # fmt: skip
    if max_norm is not None:
        raise NotImplementedError("embedding with max_norm cannot split its vocabulary")
    return embedding(
        input, weight, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse, rows=rows
    )


SPLIT = "_shardscope_split"
"""Attribute of a buffer of which every rank updates its own part: the buffer's placements."""


@_rule("histc")
def _histc(call: OpCall) -> Any:
    return histc(*call.args, **call.kwargs)


@_rule("batch_norm")
def _batch_norm(call: OpCall) -> Any:
    statistics = (*call.args[1:3], call.kwargs.get("running_mean"), call.kwargs.get("running_var"))
    for i, running in enumerate(t for t in statistics if t is not None):
        whole = running._base if running._base is not None else running
        setattr(whole, SPLIT, call.operand(1 + i))
    return _split_batch_norm(call.ranks(call.operand(0), 0), *call.args, **call.kwargs)


def _split_batch_norm(
    samples: list[MeshAxis], input: torch.Tensor, running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    if not samples or not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return batch_norm(input, running_mean, running_var, weight, bias, momentum=momentum, eps=eps, samples=samples)


@_rule("scaled_dot_product_attention")
def _attention(call: OpCall) -> torch.Tensor:
    ring = call.ranks(call.operand(1), 2)
    if ring:
        return _in_a_ring(ring, *call.args, **call.kwargs)
    queries = call.ranks(call.operand(0), 2)
    return _split_attention(queries, *call.args, **call.kwargs) if queries else attention(*call.args, **call.kwargs)


def _in_a_ring(
    ring: list[MeshAxis], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> torch.Tensor:  # fmt: skip
    return ring_attention(query, key, value, ring=ring, is_causal=is_causal, dropout_p=dropout_p, **options)


def _split_attention(
    queries: list[MeshAxis], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> torch.Tensor:  # fmt: skip
    if not is_causal:
        return attention(query, key, value, attn_mask, dropout_p, **options)
    return causal_attention(query, key, value, queries=queries, kernel=attention, dropout_p=dropout_p, **options)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Attention. On meta tensors it takes the memory of a flash kernel, whatever kernel this device has."""
    if not query.is_meta:
        return F.scaled_dot_product_attention(query, key, value, *rest, **options)
    out: torch.Tensor = _FlashMemory.apply(query, key, value, rest[0] if rest else options.get("attn_mask"))
    return out


class _FlashMemory(torch.autograd.Function):
    """Allocates and saves the same tensors as a flash kernel: query, key, value, result, log-sum-exp."""

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
