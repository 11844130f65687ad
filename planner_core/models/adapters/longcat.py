"""LongCat-Flash: some experts are the identity."""

from __future__ import annotations

from typing import Any

import torch

from planner_core.models.adapters.experts import apply_gate, moe_experts


def longcat_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts. Those from number `num_routed_experts` on are the identity."""
    share = (top_k_weights * (top_k_index >= self.num_routed_experts)).sum(-1, keepdim=True)
    passed: torch.Tensor = hidden_states * share.to(hidden_states.dtype)
    if self.gate_up_proj is None:
        return passed
    # transformers also makes rows for the identity experts, which nothing reads.
    run = moe_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        self.gate_up_proj[: self.num_routed_experts],
        self.down_proj,
        apply_gate=lambda both: apply_gate(self.act_fn, both),
        act=type(self.act_fn).__name__,
    )
    return run + passed if self.total_experts > self.num_routed_experts else run


METHODS = {("LongcatFlashExperts", "forward"): longcat_experts}
