"""Functions that run as one operator: fused kernels, and autograd functions in the model's code.

On meta, a fused kernel must save what it saves on a GPU, and not what its decomposition on the CPU does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from planner_core.core import NO_GRADIENT, Attr
from planner_core.models.hooks import RECURRENT, tensors
from planner_core.models.hooks.meta_kernels import constants_on_meta
from planner_core.models.hooks.torch_private import disable_torch_functions


class FlashAttention(torch.autograd.Function):
    """Shapes and saved tensors of a flash attention kernel: q, k, v, result, log-sum-exp (and the mask, if any)."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Result [..., heads, query length, value width]; keys and values keep their own number of heads."""
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
        rows = (*batch, *query.shape[-3:-1])
        # Flash kernels write [b, s, h, d] and return its transpose, so a model that transposes it back copies nothing.
        out = query.new_empty((*batch, query.shape[-2], query.shape[-3], value.shape[-1])).transpose(-2, -3)
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(rows, dtype=torch.float32), *([] if mask is None else [mask])
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return gradients of the operands' shapes."""
        query, key, value, _, _, *mask = ctx.saved_tensors
        wanted = zip((query, key, value, *(mask or (query,))), ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(t) if needed else None for t, needed in wanted)


def attend_on_meta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run `scaled_dot_product_attention` on meta tensors as the flash kernel does."""
    if query.dim() < 3:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)
    heads, groups = query.shape[-3], key.shape[-3]
    # torch raises on real tensors of such shapes. The stand-in below would take any.
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"attention of query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        )
    if heads != groups and not (enable_gqa and heads % groups == 0) and 1 not in (heads, groups):
        raise RuntimeError(f"attention of {heads} query heads and {groups} key heads")
    out: torch.Tensor = FlashAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    return out


def saved_by_kernel(fn: str, args: Any) -> list[torch.Tensor]:
    """Return the operands that a kernel always saves for backward.

    The kernel of a recurrent layer saves all weights, even where the decomposition on meta does not need one.
    """
    return [t for t in tensors(args) if t.requires_grad] if fn in RECURRENT else []


@dataclass(frozen=True, slots=True)
class _OpaqueCall:
    """A call whose backward is Python code. `edges`: the edge of autograd's graph to each operand, None without a gradient."""

    node: Any
    results: Sequence[torch.Tensor]
    edges: Sequence[Any]
    attrs: dict[str, Attr]
    is_of_model: bool
    """Whether the model calls the autograd function itself. A custom operator may also take tensors in lists, which get no gradient."""

    def without_gradient(self, returned: Any) -> set[int]:
        """Return the positions of operands that could have a gradient and get none from `returned`, the result of backward."""
        needed = zip(returned if isinstance(returned, tuple) else (returned,), self.node.needs_input_grad, strict=False)
        results = [gradient for gradient, needs in needed if needs]
        edges = [edge for edge in self.node.next_functions if edge[0] is not None]
        given = {edge for edge, gradient in zip(edges, results, strict=True) if gradient is not None}
        return {
            k for k, edge in enumerate(self.edges) if edge and edge not in given and (self.is_of_model or edge in edges)
        }


class OpaqueFunctions:
    """The autograd functions of the model's code. Each is one opaque operator, which runs whole on every rank; the plan states it."""

    def __init__(self) -> None:
        self.calls: list[_OpaqueCall] = []

    def note_call(
        self,
        operands: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        attrs: dict[str, Attr],
        *,
        is_of_model: bool,
    ) -> None:
        """Remember a call whose backward is Python code of the model or of a custom operator. `attrs` are those of its record."""
        with disable_torch_functions():
            node: Any = next((t.grad_fn for t in results if isinstance(t.grad_fn, BackwardCFunction)), None)
            if node is not None and not getattr(node._forward_cls, "_shardscope", False):
                edges = [get_gradient_edge(t)[:2] if t.requires_grad else None for t in operands]
                self.calls.append(_OpaqueCall(node, results, edges, attrs, is_of_model))

    def run_backward(self, model: nn.Module) -> str:
        """Run the backward of each call, last first, and mark operands that get no gradient.

        A backward that asks for values fails on meta and is taken to give a gradient to every operand.
        Returns: the name of a weight whose `.grad` a backward has set, which a plan would lose; empty if none.
        """
        for call in reversed(self.calls):
            with contextlib.suppress(Exception), torch.no_grad(), constants_on_meta():
                if stopped := call.without_gradient(call.node.apply(*map(torch.zeros_like, call.results))):
                    call.attrs[NO_GRADIENT] = tuple(sorted(stopped))
        given = [(n, p) for n, p in model.named_parameters() if p.grad is not None] if self.calls else []
        for _, param in given:
            param.grad = None
        return given[0][0] if given else ""
