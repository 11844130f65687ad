"""What `state_dict` of a model gives and `load_state_dict` takes: fused weights in the model's own order, and buffers of parts.

A fused weight is shown as a plain DTensor in the model's order, which any tool reads. `load_state_dict` also takes whole tensors. A buffer
of which a rank updates its own part (running statistics of sharded channels) is whole on each rank, but only that part is new. So it is
shown as a DTensor of these parts.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner_core.runtime.program.setup import shard_tensor, torch_placements
from planner_core.runtime.program.weights import Weight
from planner_core.runtime.program.weights.orders import in_model_order
from planner_core.runtime.program.weights.plan_tensor import PlanTensor, convert_like

if TYPE_CHECKING:
    from planner_core.runtime.parallel import Parallel


def register_model_order_hooks(parallel: Parallel) -> None:
    """Let the module's `state_dict` and `load_state_dict` speak of the model's own order."""

    def shown(module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        _show_weights(parallel, state, prefix)
        for name, placements in parallel.split_buffers().items():
            if prefix + name in state:
                own = shard_tensor(state[prefix + name], placements, parallel.axes).contiguous().clone()
                state[prefix + name] = DTensor.from_local(
                    own, parallel.mesh, torch_placements(placements), run_check=False
                )

    def taken(module: nn.Module, state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        parallel.agreement.loaded({n.removeprefix(prefix): value for n, value in state.items()})
        for name, _ in parallel.model.named_buffers(remove_duplicate=False):
            if isinstance(given := state.get(prefix + name), DTensor):
                state[prefix + name] = given.full_tensor()
        for weight, name in _named_weights(parallel, prefix, state):
            state[name] = _local_value(parallel, weight, state[name])

    parallel.model.register_state_dict_post_hook(shown)
    parallel.model.register_load_state_dict_pre_hook(taken)


def _show_weights(parallel: Parallel, state: MutableMapping[str, Any], prefix: str) -> None:
    named = [(w, n) for w, n in _named_weights(parallel, prefix, state) if getattr(w.parameter, "order", ())]
    if named:  # ranks exchange their parts
        parallel.agreement.meet(parallel.agreement.STATE)
    for weight, name in named:
        first = prefix + weight.names[0]
        done = name != first and first in state
        state[name] = state[first] if done else in_model_order(state[name])


def _local_value(parallel: Parallel, weight: Weight, given: Any) -> Any:
    """What is loaded into a weight, in its own form. A tensor of another shape stays as it is: the module says what is wrong with it."""
    own = weight.parameter
    if not isinstance(own, PlanTensor) or not isinstance(given, torch.Tensor) or given.shape != own.shape:
        return given
    if isinstance(given, DTensor):
        return convert_like(given, own) if given.device_mesh == own.device_mesh else given
    part = shard_tensor(given.to(own.device), parallel.stored_as(weight), parallel.axes, weight.segments)
    return PlanTensor.of(part.contiguous(), own._spec, own.order)


def _named_weights(parallel: Parallel, prefix: str, state: MutableMapping[str, Any]) -> Iterator[tuple[Weight, str]]:
    """Weights with each of their names in a state, the first name first."""
    weights = parallel.engine.weights.values()
    yield from ((w, prefix + n) for w in weights for n in w.names if prefix + n in state)
