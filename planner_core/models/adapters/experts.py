"""Layers of experts as single torch functions. Imports torch and nothing else of the planner.

`moe_experts` replaces the experts implementation of transformers, where it is registered as `shardscope`. So capture and a running
model see one call, and the weights of all experts are one operand with an expert dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

NAME = "shardscope"


def moe_experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor | None,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    apply_gate: Callable[[torch.Tensor], torch.Tensor],
    act: str = "",
    gated: bool = True,
    transposed: bool = False,
    first_expert: int = 0,
) -> torch.Tensor:
    """Send each token through its k experts, and sum their results, weighted if weights are given: [t, h] -> [t, h].

    `hidden` [t, h], `top_k_index` and `top_k_weights` [t, k], `gate_up_proj` [E, 2i, h] and `down_proj` [E, h, i] (last
    two dims swapped if `transposed`). With a part of the experts (`E` of them, from number `first_expert` on) the
    result is that part's term of the sum.
    """
    given = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    operands = [t for t in given if t is not None]
    # As torch's own functions do: a recorder sees this one call, and neither the sort nor the products inside.
    if has_torch_function(tuple(operands)):
        out: torch.Tensor = handle_torch_function(
            moe_experts,
            operands,
            *given,
            apply_gate=apply_gate,
            act=act,
            gated=gated,
            transposed=transposed,
            first_expert=first_expert,
        )
        return out
    if not len(gate_up_proj):
        raise ValueError("there are no experts: the number of them is 0")
    if hidden.is_meta:
        return _ExpertsOnMeta.apply(*given, gated, transposed)  # type: ignore[no-any-return, no-untyped-call]
    copies, counts = _sort_by_expert(top_k_index - first_expert, len(gate_up_proj))
    if not copies.numel():
        # no token was routed here: keep the operands in the autograd graph, with gradients of zero
        sums = [t.sum() for t in operands if t.is_floating_point()]
        return torch.zeros_like(hidden) + 0.0 * sum(sums).to(hidden.dtype)  # type: ignore[union-attr]
    k = top_k_index.shape[1]
    rows = _GatherRows.apply(hidden, copies, k)  # type: ignore[no-untyped-call]
    inner = _ExpertProducts.apply(rows, gate_up_proj, gate_up_bias, counts, transposed)  # type: ignore[no-untyped-call]
    outer = _ExpertProducts.apply(apply_gate(inner), down_proj, down_bias, counts, transposed)  # type: ignore[no-untyped-call]
    if top_k_weights is not None:
        outer = outer * top_k_weights.reshape(-1).index_select(0, copies)[:, None]
    summed: torch.Tensor = _SumRows.apply(outer.to(hidden.dtype), copies, len(hidden), k)  # type: ignore[no-untyped-call]
    return summed


def _sort_by_expert(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[int]]:
    """Sort copies of tokens by expert.

    Returns: positions in the flattened `chosen` [t, k], one expert after the other, and the number of copies of each expert. The host
    waits here for the GPU, once a call, since the products need their sizes.
    """
    flat = chosen.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)  # others' experts come last
    counts: list[int] = flat.bincount(minlength=experts + 1)[:experts].tolist()
    return flat.argsort(stable=True)[: sum(counts)], counts


def _sum_copies(rows: torch.Tensor, copies: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
    """Sum the at most k rows of each token: [n, h] -> [t, h].

    Each row is first written to a slot of its own and slots are then summed in order. Atomic additions would round differently in
    each run.
    """
    slots = rows.new_zeros((tokens * k, rows.shape[1])).index_copy_(0, copies, rows)
    return slots if k == 1 else slots.view(tokens, k, -1).sum(1)


class _GatherRows(torch.autograd.Function):
    """Gather the rows of tokens, one for each copy."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, copies: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(copies)
        ctx.sizes = len(hidden), k
        return hidden.index_select(0, copies // k)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _sum_copies(gradient, *ctx.saved_tensors, *ctx.sizes), None, None


class _SumRows(torch.autograd.Function):
    """Sum the copies of each token."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, copies: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
        ctx.save_for_backward(copies)
        ctx.k = k
        return _sum_copies(rows, copies, tokens, k)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (copies,) = ctx.saved_tensors
        return gradient.index_select(0, copies // ctx.k), None, None, None


class _ExpertProducts(torch.autograd.Function):
    """Multiply rows, sorted by expert, by the matrix of their expert: rows [n, i], weight [E, o, i] -> [n, o].

    Autograd of `weight[expert]` would allocate zeros of the size of all experts for each expert. Here each gradient is written into
    its slice of one tensor.
    """

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: list[int],
        transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.how = counts, transposed, bias is not None
        parts: Sequence[torch.Tensor] = torch.split(rows, counts)
        each = zip(parts, weight if transposed else weight.mT, weight if bias is None else bias, strict=True)
        return torch.cat([x @ w if bias is None else torch.addmm(b, x, w) for x, w, b in each if len(x)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (rows, weight), (counts, transposed, has_bias) = ctx.saved_tensors, ctx.how
        given = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        bias = gradient.new_zeros((len(weight), gradient.shape[1])) if has_bias and ctx.needs_input_grad[2] else None
        for expert, (x, g) in enumerate(zip(torch.split(rows, counts), torch.split(gradient, counts), strict=True)):
            at = slice(sum(counts[:expert]), sum(counts[: expert + 1]))
            if given is not None and len(x):
                torch.mm(g, weight[expert].T if transposed else weight[expert], out=given[at])
            if weight_gradient is not None:  # an expert without rows gets zeros: a product over no rows
                torch.mm(*((x.T, g) if transposed else (g.T, x)), out=weight_gradient[expert])
            if bias is not None:
                bias[expert] = g.sum(0)
        return given, weight_gradient, bias, None, None


class _ExpertsOnMeta(torch.autograd.Function):
    """The shape of the result, and what an implementation with grouped matmuls saves for backward."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor | None,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        gated: bool,
        transposed: bool,
    ) -> torch.Tensor:
        """Save permuted hidden [t*k, h], gate and up [t*k, 2i], act(gate) if gated and the product [t*k, i], permutations [t*k],
        offsets [E]; if they are weighted, the experts' results [t*k, h] and routing weights [t*k]."""
        rows = index.numel()
        wide, width = up.shape[-1 if transposed else -2], down.shape[-2 if transposed else -1]
        saved_shapes = [(rows, n) for n in (hidden.shape[-1], wide, width, *([width] if gated else []))]
        weighted = () if weights is None else (hidden.new_empty((rows, hidden.shape[-1])), weights.new_empty(rows))
        ctx.save_for_backward(
            up,
            down,
            *(hidden.new_empty(shape) for shape in saved_shapes),
            *weighted,
            *(index.new_empty(rows) for _ in range(2)),
            index.new_empty(up.shape[0], dtype=torch.int32),
        )
        ctx.like = [
            (t.shape, t.dtype) if t is not None and t.is_floating_point() else None
            for t in (hidden, index, weights, up, down, up_bias, down_bias)
        ]
        ctx.device = hidden.device
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return gradients of the operands' shapes."""
        _ = ctx.saved_tensors  # a real backward reads them, and so gathers what was not kept
        gradients = [None if s is None else torch.empty(s[0], dtype=s[1], device=ctx.device) for s in ctx.like]
        return (*gradients, None, None)


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the forward of an experts module of transformers as one call (its implementation `shardscope`)."""
    # transformers' decorator sets these three on a class that differs from the usual one: gated, without biases, not transposed.
    gated = bool(getattr(module, "has_gate", True))
    bias = bool(getattr(module, "has_bias", False))
    up = "gate_up_proj" if gated else "up_proj"
    return moe_experts(
        hidden,
        top_k_index,
        top_k_weights,
        getattr(module, up),
        module.down_proj,
        getattr(module, up + "_bias") if bias else None,
        module.down_proj_bias if bias else None,
        apply_gate=module._apply_gate if gated else module.act_fn,
        act=type(getattr(module, "act_fn", None)).__name__,
        gated=gated,
        transposed=bool(getattr(module, "is_transposed", False)),
    )


def register_experts() -> None:
    """Register the implementation in transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def expert_linear(hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the matrix of its expert: hidden [t, i], index [t], weight [E, o, i] -> [t, o]."""
    operands = (hidden, index, weight)
    if has_torch_function(operands):
        dispatched: torch.Tensor = handle_torch_function(expert_linear, operands, *operands)
        return dispatched
    if hidden.is_meta:
        return _LinearOnMeta.apply(*operands)  # type: ignore[no-any-return, no-untyped-call]
    copies, counts = _sort_by_expert(index, len(weight))
    rows = _ExpertProducts.apply(_GatherRows.apply(hidden, copies, 1), weight, None, counts, False)  # type: ignore[no-untyped-call]
    out: torch.Tensor = _SumRows.apply(rows, copies, len(hidden), 1)  # type: ignore[no-untyped-call]
    return out


class _LinearOnMeta(torch.autograd.Function):
    """The shape of the result, and what a grouped matmul saves: its rows sorted by expert, weights, offsets."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Save permuted hidden [t, i], the permutation [t] and offsets [E]."""
        ctx.save_for_backward(
            torch.empty_like(hidden), weight, index.new_empty(len(index)), index.new_empty(len(weight))
        )
        ctx.like = hidden
        return hidden.new_empty(len(hidden), weight.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return gradients of the operands' shapes."""
        rows, weight, *_ = ctx.saved_tensors
        return torch.empty_like(rows), None, torch.empty_like(weight)


def apply_gate(act: Callable[[torch.Tensor], torch.Tensor], both: torch.Tensor) -> torch.Tensor:
    """Return act(gate) * up, where gate and up are the halves of one tensor."""
    gate, up = both.chunk(2, dim=-1)
    return act(gate) * up


def stack_experts(
    self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, up: str, down: str
) -> torch.Tensor:
    """Run experts that are separate modules, with their weights stacked: [E, inner, width] and [E, width, inner]."""
    parts = [self[f"expert_{k}"] for k in range(self.num_experts)]
    ups, downs = [getattr(p, up) for p in parts], [getattr(p, down) for p in parts]
    bias = ups[0].bias is not None
    return moe_experts(
        hidden,
        index,
        weights,
        torch.stack([p.weight for p in ups]),
        torch.stack([p.weight for p in downs]),
        torch.stack([p.bias for p in ups]) if bias else None,
        torch.stack([p.bias for p in downs]) if bias else None,
        apply_gate=parts[0].act,
        act=type(parts[0].act).__name__,
        gated=False,
    )
