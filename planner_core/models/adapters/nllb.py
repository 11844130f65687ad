"""NLLB-MoE: experts that transformers calls in a loop."""

from __future__ import annotations

from typing import Any

import torch

from planner_core.models.adapters.experts import stack_experts


def nllb_experts(
    self: Any, hidden_states: torch.Tensor, router_mask: torch.Tensor, router_probs: torch.Tensor
) -> torch.Tensor:
    """Run the experts as transformers does: entries of `router_mask` [t, E] serve as numbers of experts."""
    # In training transformers drops out what experts return, and a plan's dropout is 0; in evaluation it scales instead.
    keep = 1.0 if self.training else 1.0 - self.moe_token_dropout
    return stack_experts(self, hidden_states, router_mask, router_probs * keep, "fc1", "fc2")


METHODS = {("NllbMoeExperts", "forward"): nllb_experts}
