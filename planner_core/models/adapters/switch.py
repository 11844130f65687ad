"""Switch Transformer: one expert a token, which transformers calls in a loop."""

from __future__ import annotations

from typing import Any

import torch

from planner_core.models.adapters.experts import stack_experts


def switch_experts(
    self: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """Run one expert per token, none for tokens beyond its capacity. `selected_experts` [t, 1, E] is one-hot."""
    # A token beyond the capacity has a row of zeros: argmax sends it to expert 0, and its weight is 0.
    chosen = selected_experts.argmax(-1)
    weights = routing_weights * selected_experts.sum(-1).to(routing_weights.dtype)
    return stack_experts(self, hidden_states, chosen, weights, "wi", "wo")


METHODS = {("SwitchTransformersExperts", "forward"): switch_experts}
