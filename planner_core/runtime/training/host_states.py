"""The states of an optimizer in the host's memory. They come to the GPU weight by weight while a step updates it.

A step takes the time that the states need to come and to go, one after the other (`cost.compute.optimizer`), and the GPU holds
the states of one weight at a time. Copies are queued on the stream that computes, so each update waits for its states.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from planner_core.runtime.program.torch_private import local_part
from planner_core.runtime.program.weights.plan_tensor import PlanTensor


def to_host(state: torch.Tensor) -> torch.Tensor:
    """Copy a state to the host's memory, pinned if it comes from a GPU. A state in the host's memory is returned itself."""
    if state.device.type == "cpu":
        return state
    state_on_host = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
    return state_on_host.copy_(state, non_blocking=True)


def to_device(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a state to the device. A state on the device is returned itself."""
    return state.to(device, non_blocking=True)


def move_state(state: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Move the local part of a state. A DTensor stays one: checkpoints read from it which part of the weight a rank has."""
    if not isinstance(state, DTensor):
        return move(state)
    local = state._local_tensor
    moved_local = move(local)
    return state if moved_local is local else PlanTensor.of(moved_local, state._spec, getattr(state, "order", ()))


class HostStates(torch.optim.Optimizer):
    """An optimizer whose states are in the host's memory between steps. `inner` updates one weight at a time.

    `state` and `param_groups` are this optimizer's. Scalars, such as the number of steps, stay where `inner` makes them.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        self.inner = inner
        # between steps `inner` holds nothing: a state that it kept would stay on the GPU
        self.inner.param_groups, self.inner.state = [], self.inner.state.__class__(dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step. Raises AssertionError for a closure."""
        assert closure is None, "states in the host's memory are not there for a closure"
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update_parameter(param, group)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # whoever reads a state now finds it complete

    def _update_parameter(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        local = local_part(param)
        state_on_host = self.state.get(param, {})
        self.inner.param_groups = [{**group, "params": [param]}]
        self.inner.state[param] = _move_states(state_on_host, lambda t: to_device(t, local.device))
        self.inner.step()
        self.state[param] = _move_states(self.inner.state.pop(param), to_host)


def _move_states(states: Mapping[str, Any], move: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Move the states of a weight that have a dim."""
    return {k: move_state(v, move) if isinstance(v, torch.Tensor) and v.dim() else v for k, v in states.items()}
