"""JetMoe: experts of attention and of the feed-forward part."""

from __future__ import annotations

from typing import Any

import torch

from planner_core.models.adapters.experts import apply_gate, expert_linear, moe_experts


def jetmoe_router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the experts of each token [t, k], their weights [t, k], and the logits."""
    # transformers' router also returns how many tokens each expert gets, as Python numbers, which depend on values.
    logits = self.layer(hidden_states).float()
    best, index = logits.topk(self.top_k, dim=1)
    return index, torch.softmax(best, dim=1).type_as(hidden_states), logits


def jetmoe_experts(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    """Run the feed-forward experts: [b, s, h] -> [b, s, h]."""
    hidden = layer_input.reshape(-1, layer_input.shape[-1])
    index, weights, _ = self.router(hidden)
    out = moe_experts(
        hidden,
        index,
        weights,
        self.input_linear.weight,
        self.output_linear.weight,
        apply_gate=lambda both: apply_gate(self.activation, both),
        act=type(self.activation).__name__,
    )
    result: torch.Tensor = out.view(*layer_input.shape[:-1], self.input_size) + self.bias
    return result


def jetmoe_queries(
    self: Any, layer_input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Compute every token's query by each of its k attention experts, [b, s, k, heads x width]."""
    b, s, width = layer_input.shape
    hidden = layer_input.reshape(-1, width)
    index, weights, logits = self.router(hidden)
    rows = hidden[:, None].expand(-1, self.top_k, -1).reshape(-1, width)
    out = expert_linear(rows, index.reshape(-1), self.input_linear.weight)
    return out.view(b, s, self.top_k, -1), logits, (index, weights)


def jetmoe_outputs(self: Any, layer_input: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Project attention outputs by experts: [b, s, k, heads x width] -> [b, s, h], weighted and summed over k."""
    b, s, k, width = layer_input.shape
    index, weights = routing
    out = expert_linear(layer_input.reshape(-1, width), index.reshape(-1), self.output_linear.weight)
    summed = (out * weights.reshape(-1, 1)).view(b * s, k, -1).sum(1)
    result: torch.Tensor = summed.view(b, s, self.input_size) + self.bias
    return result


METHODS = {
    ("JetMoeTopKGating", "forward"): jetmoe_router,
    ("JetMoeMoE", "forward"): jetmoe_experts,
    ("JetMoeMoA", "map"): jetmoe_queries,
    ("JetMoeMoA", "reduce"): jetmoe_outputs,
}
