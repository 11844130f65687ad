"""RecurrentGemma: a recurrence over tokens for which transformers has no kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

from planner_core.models.adapters.scans import Maybe, Plain, linear_scan


def recurrence(plain: Plain) -> Plain:
    """Return `linear_scan` for calls without a state, as in training; other calls go to the method itself."""

    @functools.wraps(plain)
    def call(
        self: Any,
        hidden_states: torch.Tensor,
        recurrent_gate: torch.Tensor,
        reset: torch.Tensor,
        recurrent_states: Maybe,
    ) -> Any:
        if recurrent_states is not None or hidden_states.shape[1] == 1:
            return plain(self, hidden_states, recurrent_gate, reset, recurrent_states)
        # A reset is a gate of 0, so the recurrence takes two tensors, and the plain method then gets no resets.
        none = torch.zeros((), dtype=torch.bool)
        return linear_scan(
            hidden_states,
            recurrent_gate * ~reset,
            plain=lambda hidden_states, recurrent_gate: plain(
                self, hidden_states, recurrent_gate, none.to(reset.device), None
            ),
        )

    call._shardscope = True  # type: ignore[attr-defined]
    return call


WRAPPED = {("RecurrentGemmaRglru", "_rnn_scan"): recurrence}
