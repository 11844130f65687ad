"""Step-3.7: experts whose gate and up are one, clamped."""

from __future__ import annotations

from typing import Any

import torch

from planner_core.models.adapters.experts import moe_experts


def step_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts: gate and up are one product, clamped."""
    return moe_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        self.gate_up_proj,
        self.down_proj,
        apply_gate=self._apply_gate,
        act=type(self.act_fn).__name__,
    )


METHODS = {("Step3p7Experts", "forward"): step_experts}
