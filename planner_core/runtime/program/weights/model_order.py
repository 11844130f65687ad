"""What `state_dict` of a model returns and `load_state_dict` takes: fused weights in the model's own order, and buffers of
shards.

A fused weight is shown as a plain DTensor in the model's order, which any tool reads. `load_state_dict` also takes whole
tensors. A weight that the plan pads is shown in the model's own shape; what is loaded is padded with zeros, as Megatron-LM does. A
rank may update its own part of a buffer (running statistics of sharded channels). Each rank holds such a buffer
whole, but only its part is new, so the buffer is shown as a DTensor of these parts.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner_core.runtime.parallel import Parallel
from planner_core.runtime.program.setup import shard_tensor, torch_placements
from planner_core.runtime.program.weights import Weight
from planner_core.runtime.program.weights.orders import in_model_order, order_of, resize
from planner_core.runtime.program.weights.plan_tensor import PlanTensor, convert_like


def register_model_order_hooks(parallel: Parallel) -> None:
    """Register hooks on the module's `state_dict` and `load_state_dict`, which convert to and from the model's own order."""

    def show(module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        _show_weights(parallel, state, prefix)
        for name, placements in parallel.split_buffers().items():
            if prefix + name in state:
                parameter = shard_tensor(state[prefix + name], placements, parallel.axes).contiguous().clone()
                state[prefix + name] = DTensor.from_local(
                    parameter, parallel.mesh, torch_placements(placements), run_check=False
                )

    def load(module: nn.Module, state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        parallel.agreement.note_loaded({n.removeprefix(prefix): value for n, value in state.items()})
        for name, _ in parallel.model.named_buffers(remove_duplicate=False):
            if isinstance(loaded := state.get(prefix + name), DTensor):
                state[prefix + name] = loaded.full_tensor()
        for weight, name in _named_weights(parallel, prefix, state):
            state[name] = _local_value(parallel, weight, state[name])

    parallel.model.register_state_dict_post_hook(show)
    parallel.model.register_load_state_dict_pre_hook(load)


def _show_weights(parallel: Parallel, state: MutableMapping[str, Any], prefix: str) -> None:
    weights = _named_weights(parallel, prefix, state)
    named = [(w, n) for w, n in weights if w.unpadded_shape is not None or order_of(w.parameter)]
    # Ranks exchange their parts. With stages only some ranks have padded weights, and all come here.
    if named or parallel.plan.model.own_shapes:
        parallel.agreement.wait_for_all(parallel.agreement.STATE)
    for weight, name in named:
        first = prefix + weight.names[0]
        is_alias = name != first and first in state
        if is_alias:
            state[name] = state[first]
        elif weight.unpadded_shape is None:
            state[name] = in_model_order(state[name])
        else:
            state[name] = resize(state[name], weight.unpadded_shape)


def _local_value(parallel: Parallel, weight: Weight, loaded: Any) -> Any:
    """Return this rank's part of a loaded value. A tensor of another shape is returned itself, so that the module's own error
    describes it."""
    parameter = weight.parameter
    if isinstance(loaded, torch.Tensor) and tuple(loaded.shape) == weight.unpadded_shape:
        if isinstance(loaded, DTensor) and loaded.device_mesh != getattr(parameter, "device_mesh", None):
            return loaded
        loaded = resize(loaded, parameter.shape)
    if not isinstance(parameter, PlanTensor) or not isinstance(loaded, torch.Tensor) or loaded.shape != parameter.shape:
        return loaded
    if isinstance(loaded, DTensor):
        return convert_like(loaded, parameter) if loaded.device_mesh == parameter.device_mesh else loaded
    local = shard_tensor(loaded.to(parameter.device), parallel.stored_as(weight), parallel.axes, weight.segments)
    return PlanTensor.of(local.contiguous(), parameter._spec, parameter.order)


def _named_weights(parallel: Parallel, prefix: str, state: MutableMapping[str, Any]) -> Iterator[tuple[Weight, str]]:
    """Yield weights with each of their names in a state, the first name first."""
    weights = parallel.engine.weights.values()
    yield from ((w, prefix + n) for w in weights for n in w.names if prefix + n in state)
