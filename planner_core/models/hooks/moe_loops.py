"""Expert layers that transformers writes as loops over the router's choices, as calls with an expert dim. Imports torch and `moe`.

Most expert layers of transformers take an implementation by name (`moe.register_experts`). These few do not. Their code depends on
the values of the router's result, which a graph cannot hold. `register_loops` replaces them by functions that compute the same sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from planner_core.models.hooks.moe import moe_experts


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
        out = out.index_put((rows,), nn.functional.linear(hidden[rows], weight[expert]))
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


# --- what takes the place of what ---------------------------------------------------------------------------


def longcat_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """LongCat-Flash: experts from number `num_routed_experts` on hand back what they are given."""
    share = (top_k_weights * (top_k_index >= self.num_routed_experts)).sum(-1, keepdim=True)
    passed: torch.Tensor = hidden_states * share.to(hidden_states.dtype)
    if self.gate_up_proj is None:
        return passed
    run = moe_experts(
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj[: self.num_routed_experts], self.down_proj,
        apply_gate=lambda both: _gate(self.act_fn, both), act=type(self.act_fn).__name__,
    )  # fmt: skip
    return run + passed if self.total_experts > self.num_routed_experts else run


def step_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Step-3.7: gate and up in one, clamped."""
    return moe_experts(
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, apply_gate=self._apply_gate,
        act=type(self.act_fn).__name__,
    )  # fmt: skip


def switch_experts(
    self: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """Switch Transformer: one expert a token, none for tokens beyond its capacity; `selected_experts` [t, 1, E] is 1 at it."""
    chosen = selected_experts.argmax(-1)
    weights = routing_weights * selected_experts.sum(-1).to(routing_weights.dtype)
    return _separate(self, hidden_states, chosen, weights, "wi", "wo")


def nllb_experts(
    self: Any, hidden_states: torch.Tensor, router_mask: torch.Tensor, router_probs: torch.Tensor
) -> torch.Tensor:
    """NLLB-MoE, as transformers runs it: the entries of `router_mask` [t, E] are taken for numbers of experts."""
    keep = 1.0 if self.training else 1.0 - self.moe_token_dropout
    return _separate(self, hidden_states, router_mask, router_probs * keep, "fc1", "fc2")


def _separate(
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


def dbrx_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """DBRX: all experts' matrices in one, [E x inner, width] each for gate, up and down."""
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    both = torch.cat([self.mlp.w1.view(shape), self.mlp.v1.view(shape)], dim=1)
    out = moe_experts(
        hidden_states.reshape(-1, self.hidden_size), top_k_index, top_k_weights, both, self.mlp.w2.view(shape).transpose(1, 2),
        apply_gate=lambda x: _gate(self.mlp.activation_fn, x), act=type(self.mlp.activation_fn).__name__,
    )  # fmt: skip
    return out.view(len(hidden_states), -1, hidden_states.shape[-1])


def jetmoe_router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts of each token [t, k], their weights [t, k], and the logits."""
    logits = self.layer(hidden_states).float()
    best, index = logits.topk(self.top_k, dim=1)
    return index, torch.softmax(best, dim=1).type_as(hidden_states), logits


def jetmoe_experts(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    """JetMoE's feed-forward experts: [b, s, h] -> [b, s, h]."""
    hidden = layer_input.reshape(-1, layer_input.shape[-1])
    index, weights, _ = self.router(hidden)
    out = moe_experts(
        hidden, index, weights, self.input_linear.weight, self.output_linear.weight,
        apply_gate=lambda both: _gate(self.activation, both), act=type(self.activation).__name__,
    )  # fmt: skip
    result: torch.Tensor = out.view(*layer_input.shape[:-1], self.input_size) + self.bias
    return result


def jetmoe_queries(
    self: Any, layer_input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """JetMoE's attention experts, in: every token's query by each of its k experts, [b, s, k, heads x width]."""
    b, s, width = layer_input.shape
    hidden = layer_input.reshape(-1, width)
    index, weights, logits = self.router(hidden)
    rows = hidden[:, None].expand(-1, self.top_k, -1).reshape(-1, width)
    out = expert_linear(rows, index.reshape(-1), self.input_linear.weight)
    return out.view(b, s, self.top_k, -1), logits, (index, weights)


def jetmoe_outputs(self: Any, layer_input: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """JetMoE's attention experts, out: [b, s, k, heads x width] -> [b, s, h], weighted and summed over the k experts."""
    b, s, k, width = layer_input.shape
    index, weights = routing
    out = expert_linear(layer_input.reshape(-1, width), index.reshape(-1), self.output_linear.weight)
    summed = (out * weights.reshape(-1, 1)).view(b * s, k, -1).sum(1)
    result: torch.Tensor = summed.view(b, s, self.input_size) + self.bias
    return result


def _gate(act: Callable[[torch.Tensor], torch.Tensor], both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return act(gate) * up


LOOPS: dict[tuple[str, str], Callable[..., Any]] = {
    ("LongcatFlashExperts", "forward"): longcat_experts, ("SwitchTransformersExperts", "forward"): switch_experts,
    ("NllbMoeExperts", "forward"): nllb_experts, ("JetMoeTopKGating", "forward"): jetmoe_router, ("JetMoeMoE", "forward"): jetmoe_experts,
    ("DbrxExperts", "forward"): dbrx_experts, ("Step3p7Experts", "forward"): step_experts,
    ("JetMoeMoA", "map"): jetmoe_queries, ("JetMoeMoA", "reduce"): jetmoe_outputs,
}  # fmt: skip
"""Class and method of transformers, and the function that replaces it."""


def register_loops() -> None:
    """Put our methods in place of the loops in every model file of transformers that has been imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for (kind, method), ours in LOOPS.items():
                owner = module.__dict__.get(kind)
                if owner is not None and owner.__dict__.get(method) is not ours:
                    setattr(owner, method, ours)
