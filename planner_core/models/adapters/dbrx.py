"""DBRX: all experts' matrices in one."""

from __future__ import annotations

from typing import Any

import torch

from planner_core.models.adapters.experts import apply_gate, moe_experts


def dbrx_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """DBRX: all experts' matrices in one, [E x inner, width] each for gate, up and down."""
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    # One tensor of gate and up, as `moe_experts` takes them; down is stored as [inner, width] here, and transposed below.
    both = torch.cat([self.mlp.w1.view(shape), self.mlp.v1.view(shape)], dim=1)
    out = moe_experts(
        hidden_states.reshape(-1, self.hidden_size),
        top_k_index,
        top_k_weights,
        both,
        self.mlp.w2.view(shape).transpose(1, 2),
        apply_gate=lambda x: apply_gate(self.mlp.activation_fn, x),
        act=type(self.mlp.activation_fn).__name__,
    )
    return out.view(len(hidden_states), -1, hidden_states.shape[-1])


METHODS = {("DbrxExperts", "forward"): dbrx_experts}
