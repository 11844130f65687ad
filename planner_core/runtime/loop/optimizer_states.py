"""What `state_dict` of an optimizer gives and `load_state_dict` takes: states in the model's own order, as the module's.

So a checkpoint that was saved under one plan can be loaded under another, or by one process, and whole states of one process are cut.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from planner_core.runtime.program.model_order import OF, deal, part_like, portable
from planner_core.runtime.program.setup import place
from planner_core.runtime.program.weights import Weight, owner_of

if TYPE_CHECKING:
    from planner_core.runtime.parallel import Parallel

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_model_order(optimizers: type[torch.optim.Optimizer]) -> None:
    """Let the optimizers' `state_dict` and `load_state_dict` speak of the model's own order."""
    shown, taken = optimizers.state_dict, optimizers.load_state_dict

    @functools.wraps(shown)
    def state_dict(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _changed(self, shown(self, *args, **kwargs), _shown)

    @functools.wraps(taken)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        taken(self, _changed(self, state_dict, _taken))

    optimizers.state_dict, optimizers.load_state_dict = state_dict, load_state_dict  # type: ignore[method-assign]


def _changed(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The state with other tensors for the parameters under a plan."""
    params = {
        number: param
        for packed, group in zip(state["param_groups"], optimizer.param_groups, strict=False)
        for number, param in zip(packed["params"], group["params"], strict=False)
        if isinstance(param, DTensor) and owner_of(param)
    }
    states = {
        number: {k: change(params[number], v) if _like(v, params[number]) else v for k, v in values.items()}
        if number in params
        else values
        for number, values in state["state"].items()
    }
    return {**state, "state": states}


def _like(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim() > 0


def _owner(param: torch.Tensor) -> tuple[Weight, Parallel]:
    weight = owner_of(param)
    parallel = OF[weight]() if weight else None
    assert weight and parallel, "a parameter of a model that is gone"
    return weight, parallel


def _shown(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    weight, parallel = _owner(param)
    return portable(parallel, weight, value)


@torch.no_grad()
def _taken(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    weight, parallel = _owner(param)
    assert isinstance(param, DTensor)
    if isinstance(value, DTensor) and value.device_mesh == param.device_mesh:
        return value
    if not isinstance(value, DTensor):
        own = (
            place(value.to(param.device), parallel.stored_as(weight), parallel.axes, weight.segments)
            .contiguous()
            .clone()
        )
        return part_like(param, own)
    made = part_like(param, torch.empty_like(value.to_local()))
    deal(parallel, weight, value, made)
    return made
