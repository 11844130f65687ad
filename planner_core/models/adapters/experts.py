"""Layers of experts as single torch functions. Imports torch and nothing of ours.

`moe_experts` replaces the experts implementation of transformers, where it is registered as `shardscope`. So capture and a running
model see one call, and the weights of all experts are one operand with an expert dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

NAME = "shardscope"


def moe_experts(
    hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor | None, gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor, gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, *,
    apply_gate: Callable[[torch.Tensor], torch.Tensor], act: str = "", gated: bool = True, transposed: bool = False,
    first_expert: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Each token through its k experts, weighted (without weights: not) and summed: [t, h] -> [t, h].

    `hidden` [t, h], `top_k_index` and `top_k_weights` [t, k], `gate_up_proj` [E, 2i, h] and `down_proj` [E, h, i] (last
    two dims swapped if `transposed`). With a part of the experts (`E` of them, from number `first_expert` on) the
    result is that part's term of the sum.
    """
    given = (hidden, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    operands = [t for t in given if t is not None]
    if has_torch_function(tuple(operands)):
        out: torch.Tensor = handle_torch_function(
            moe_experts, operands, *given, apply_gate=apply_gate, act=act, gated=gated, transposed=transposed,
            first_expert=first_expert,
        )  # fmt: skip
        return out
    if not len(gate_up_proj):
        raise ValueError("there are no experts: the number of them is 0")
    if hidden.is_meta or type(hidden).__name__ == "FakeTensor":
        return _Grouped.apply(*given, gated, transposed)  # type: ignore[no-any-return, no-untyped-call]
    total = torch.zeros_like(hidden)
    chosen = top_k_index - first_expert
    for expert in range(gate_up_proj.shape[0]):
        token, slot = torch.where(chosen == expert)
        if token.numel() == 0:
            continue
        inner = _project(
            hidden[token], gate_up_proj[expert], None if gate_up_bias is None else gate_up_bias[expert], transposed
        )
        outer = _project(
            apply_gate(inner), down_proj[expert], None if down_bias is None else down_bias[expert], transposed
        )
        if top_k_weights is not None:
            outer = outer * top_k_weights[token, slot, None]
        total = total.index_add(0, token, outer.to(total.dtype))
    if all(t.grad_fn is None and not t.requires_grad for t in operands) or total.requires_grad:
        return total
    # no token was routed here: keep the operands in the autograd graph, with gradients of zero
    return total + 0.0 * sum(t.sum() for t in operands if t.is_floating_point()).to(total.dtype)  # type: ignore[union-attr]


def _project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.T if transposed else weight, bias)


class _Grouped(torch.autograd.Function):
    """Shape of the result, and what a grouped-matmul implementation keeps for its backward pass."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None, up: torch.Tensor, down: torch.Tensor,
        up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, gated: bool, transposed: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Kept: permuted hidden [t*k, h], gate and up [t*k, 2i], act(gate) if gated and the product [t*k, i], permutations [t*k],
        offsets [E]; if they are weighted, the experts' results [t*k, h] and routing weights [t*k]."""
        rows = index.numel()
        wide, width = up.shape[-1 if transposed else -2], down.shape[-2 if transposed else -1]
        kept = [(rows, n) for n in (hidden.shape[-1], wide, width, *([width] if gated else []))]
        weighted = () if weights is None else (hidden.new_empty((rows, hidden.shape[-1])), weights.new_empty(rows))
        ctx.save_for_backward(
            up, down, *(hidden.new_empty(shape) for shape in kept), *weighted, *(index.new_empty(rows) for _ in range(2)),
            index.new_empty(up.shape[0], dtype=torch.int32),
        )  # fmt: skip
        ctx.like = [(t.shape, t.dtype) if t is not None and t.is_floating_point() else None
                    for t in (hidden, index, weights, up, down, up_bias, down_bias)]  # fmt: skip
        ctx.device = hidden.device
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Gradients have the shapes of what they belong to."""
        _ = ctx.saved_tensors  # a real backward reads them, and so gathers what was not kept
        found = [None if s is None else torch.empty(s[0], dtype=s[1], device=ctx.device) for s in ctx.like]
        return (*found, None, None)


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts implementation `shardscope` of transformers: an experts module's forward as one call."""
    gated = bool(getattr(module, "has_gate", True))
    bias = bool(getattr(module, "has_bias", False))
    up = "gate_up_proj" if gated else "up_proj"
    return moe_experts(
        hidden, top_k_index, top_k_weights, getattr(module, up), module.down_proj,
        getattr(module, up + "_bias") if bias else None, module.down_proj_bias if bias else None,
        apply_gate=module._apply_gate if gated else module.act_fn, act=type(getattr(module, "act_fn", None)).__name__,
        gated=gated, transposed=bool(getattr(module, "is_transposed", False)),
    )  # fmt: skip


def register_experts() -> None:
    """Make the implementation known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def expert_linear(hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each row through the matrix of its own expert: hidden [t, i], index [t], weight [E, o, i] -> [t, o]."""
    operands = (hidden, index, weight)
    if has_torch_function(operands):
        made: torch.Tensor = handle_torch_function(expert_linear, operands, *operands)
        return made
    if hidden.is_meta or type(hidden).__name__ == "FakeTensor":
        return _GroupedLinear.apply(*operands)  # type: ignore[no-any-return, no-untyped-call]
    out = hidden.new_zeros(len(hidden), weight.shape[1])
    for expert in range(len(weight)):
        rows = torch.where(index == expert)[0]
        out = out.index_put((rows,), torch.nn.functional.linear(hidden[rows], weight[expert]))
    return out


class _GroupedLinear(torch.autograd.Function):
    """Shape of the result, and what a grouped matmul keeps: its rows in the order of the experts, weights, offsets."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Kept: permuted hidden [t, i], the permutation [t], offsets [E]."""
        ctx.save_for_backward(
            torch.empty_like(hidden), weight, index.new_empty(len(index)), index.new_empty(len(weight))
        )
        ctx.like = hidden
        return hidden.new_empty(len(hidden), weight.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Gradients have the shapes of what they belong to."""
        rows, weight, *_ = ctx.saved_tensors
        return torch.empty_like(rows), None, torch.empty_like(weight)


def gated(act: Callable[[torch.Tensor], torch.Tensor], both: torch.Tensor) -> torch.Tensor:
    """act(gate) * up, where gate and up are the halves of one tensor."""
    gate, up = both.chunk(2, dim=-1)
    return act(gate) * up


def separate(
    self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, up: str, down: str
) -> torch.Tensor:
    """Experts that are modules of their own, with their weights stacked: [E, inner, width] and [E, width, inner]."""
    parts = [self[f"expert_{k}"] for k in range(self.num_experts)]
    ups, downs = [getattr(p, up) for p in parts], [getattr(p, down) for p in parts]
    bias = ups[0].bias is not None
    return moe_experts(
        hidden, index, weights, torch.stack([p.weight for p in ups]), torch.stack([p.weight for p in downs]),
        torch.stack([p.bias for p in ups]) if bias else None, torch.stack([p.bias for p in downs]) if bias else None,
        apply_gate=parts[0].act, act=type(parts[0].act).__name__, gated=False,
    )  # fmt: skip
