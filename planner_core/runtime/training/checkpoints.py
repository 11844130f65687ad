"""Checkpoints with the model's own names and shapes, through torch.distributed.checkpoint. They load on any number of ranks."""

# mypy: allow-untyped-calls
from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from planner_core.core import InputError
from planner_core.runtime.library import applied
from planner_core.runtime.parallel import Parallel
from planner_core.runtime.program.weights import Weight
from planner_core.runtime.program.weights.orders import in_model_order, resize
from planner_core.runtime.stages import StagedParallel

_SAVE_GROUP: list[dist.ProcessGroup] = []
"""A separate process group, so that saving and a training step can communicate at the same time."""


def save(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> Future[Any] | None:
    """Save a module under a plan, and its optimizer. Every rank writes its own part. All ranks must call it.

    The folder can be read without Shardscope: `torch.distributed.checkpoint` finds `model`, with the names of
    `module.state_dict()`, and `optimizer` (`state` by parameter name, `param_groups`). Fused weights have the model's order in
    it, not the plan's. A vocabulary that the plan pads has the model's own rows in it, also in the optimizer's states.

    Args:
        module: What `apply` returned.
        optimizer: The optimizer of its parameters. None saves the module alone.
        folder: Where to write. It is made if it does not exist.
        extra: Numbers and texts to save with it, such as the step.
        wait: If False, return when the values are copied to the CPU, and write while training goes on.

    Returns:
        None. With `wait=False` a future; call its `result()` before you save again.

    Raises:
        InputError: The module does not run under a plan, or the optimizer has a state of a padded weight that is of another shape.
        PlanMismatch: A rank did not call it within the time of the process group. The message says which.

    Example:
        >>> shardscope.save(model, optimizer, "checkpoint", extra={"step": step})
    """
    parallel = applied(module)
    parallel.agreement.wait_for_all(parallel.agreement.SAVE)
    parallel.gather_buffers()
    state = _collect_state(parallel, optimizer) | {"extra": dict(extra or {})}
    if isinstance(parallel, StagedParallel):  # a buffer that another stage writes is old here
        buffers = dict(module.named_buffers(remove_duplicate=False))
        state["model"] = {n: t for n, t in state["model"].items() if n not in buffers or parallel.keeps(n)}
    if wait:
        saver.save(state, checkpoint_id=folder)
        return None
    # Made at the first save that needs it: all ranks come here, which making a group asks for.
    if not _SAVE_GROUP:
        # `async_save` asks for a group with a backend for the CPU, where the copied values are.
        _SAVE_GROUP.append(dist.new_group(backend="gloo"))
    # What copies the state to the host may know plain DTensors alone.
    state = pytree.tree_map_only(DTensor, in_model_order, state)
    future = saver.async_save(state, checkpoint_id=folder, process_group=_SAVE_GROUP[0])
    assert isinstance(future, Future)
    return future


def load(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Load what `save` wrote, on any number of ranks and under any plan. All ranks must call it.

    Rows that the plan adds to a vocabulary become zeros, as in Megatron-LM, also in the optimizer's states.

    Args:
        module: What `apply` returned in this run.
        optimizer: The optimizer of its parameters. None loads the module alone.
        folder: The folder that `save` wrote.
        extra: Names that were saved with it, and a default value for each.

    Returns:
        `extra` with the saved values.

    Raises:
        InputError: The module does not run under a plan, the folder holds no checkpoint, or a parameter of the module was not saved.

    Example:
        >>> start = shardscope.load(model, optimizer, "checkpoint", extra={"step": 0})["step"]
    """
    parallel = applied(module)
    parallel.agreement.wait_for_all(parallel.agreement.LOAD)
    if not (Path(folder) / ".metadata").is_file():
        raise InputError(f"{folder} holds no checkpoint: it has no file .metadata")
    saved = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    # Asked before anything is read, so that a wrong folder leaves the model as it was.
    missing = sorted(n for n in parallel.engine.weights if f"model.{n}" not in saved)
    if missing:
        raise InputError(f"the checkpoint in {folder} has no {missing[0]}, which the module has: it is another model's")
    if optimizer is not None:
        # `loader.load` reads into tensors that exist.
        _create_optimizer_states(optimizer)
    state = _collect_state(parallel, optimizer) | {"extra": dict(extra or {})}
    wanted = _select_saved(state, saved, "")
    loader.load(wanted, checkpoint_id=folder)
    _adopt_loaded(parallel, optimizer, wanted)
    return {**(extra or {}), **wanted.get("extra", {})}


# --- the state ----------------------------------------------------------------------------------------


def _collect_state(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the state that is saved. A fused weight describes which pieces of the model's weight it holds. Of a padded weight
    `state_dict` has made a copy of the model's own rows."""
    padded = {n for weight in parallel.engine.weights.values() if weight.unpadded_shape for n in weight.names}
    parameters = parallel.model.named_parameters(remove_duplicate=False)
    tensors = {n: p.detach() for n, p in parameters if n not in padded}
    tensors.update(parallel.model.named_buffers(remove_duplicate=False))
    model = {name: tensors.get(name, tensor) for name, tensor in parallel.model.state_dict().items()}
    state: dict[str, Any] = {"model": model, "runtime": {"forwards": parallel.engine.forwards}}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(parallel, optimizer)
    return state


def _weights_by_parameter(parallel: Parallel) -> dict[int, Weight]:
    return {id(w.parameter): w for w in parallel.engine.weights.values()}


def _without_padding(weight: Weight, key: str, value: Any) -> Any:
    """Return a state of an optimizer with the model's own rows of its weight. Raises InputError if its rows are not the weight's."""
    if weight.unpadded_shape is None or not isinstance(value, torch.Tensor) or value.numel() == 1:
        return value
    if value.shape != weight.parameter.shape:
        raise InputError(
            f"the optimizer's {key} of {weight.names[0]} has shape {tuple(value.shape)}, of which nobody knows what belongs to the "
            f"padded rows of the weight {tuple(weight.parameter.shape)}; save and load the module alone (None as the optimizer), or plan "
            "without a padded vocabulary"
        )
    return resize(value, weight.unpadded_shape)


def _optimizer_state(parallel: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state in the form of `torch.distributed.checkpoint.state_dict`: states by parameter, then the
    groups."""
    weights = _weights_by_parameter(parallel)
    states = {
        weights[id(param)].names[0]: {
            key: _without_padding(weights[id(param)], key, v) for key, v in values.items() if v is not None
        }
        for param, values in optimizer.state.items()
    }
    groups = [
        {**{k: v for k, v in g.items() if k != "params"}, "params": [weights[id(p)].names[0] for p in g["params"]]}
        for g in optimizer.param_groups
    ]
    if isinstance(parallel, StagedParallel):  # the groups of the whole model
        names_of_stages = parallel.from_all_stages([group["params"] for group in groups])
        for number, group in enumerate(groups):
            group["params"] = list(
                dict.fromkeys(name for stage_names in names_of_stages for name in stage_names[number])
            )
    return {"state": states, "param_groups": groups}


# --- loading ------------------------------------------------------------------------------------------


def _create_optimizer_states(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create its states by a step of length 0, which changes no parameter."""
    if optimizer.state:
        return
    gradients, rates = [], [g["lr"] for g in optimizer.param_groups]
    for group in optimizer.param_groups:
        # With a rate of 0 neither the gradient nor a weight decay, which optimizers multiply by it, moves a parameter.
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for param in group["params"]:
            gradients.append((param, param.grad))
            param.grad = torch.zeros_like(param) if param.requires_grad else None
    optimizer.step()
    for param, gradient in gradients:
        param.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _select_saved(tree: Mapping[str, Any], saved: set[str], path: str) -> dict[str, Any]:
    """Return the part of a nested state that was saved."""
    selected: dict[str, Any] = {}
    for name, item in tree.items():
        full = f"{path}{name}"
        if isinstance(item, Mapping):
            inner = _select_saved(item, saved, f"{full}.")
            if inner:
                selected[name] = inner
        elif isinstance(item, list) or full in saved:
            selected[name] = item
    return selected


def _adopt_loaded(
    parallel: Parallel, optimizer: torch.optim.Optimizer | None, loaded: MutableMapping[str, Any]
) -> None:
    """Adopt what was loaded. Tensors were read in place, but for those of padded weights, which were read into copies."""
    parallel.engine.forwards = loaded.get("runtime", {}).get("forwards", 0)
    for weight in parallel.engine.weights.values():
        if weight.unpadded_shape is not None:
            value = loaded["model"][weight.names[0]]
            weight.parameter.detach().copy_(resize(value, weight.parameter.shape))
    if optimizer is None or "optimizer" not in loaded:
        return
    weights, states = _weights_by_parameter(parallel), loaded["optimizer"].get("state", {})
    for param, values in optimizer.state.items():
        weight = weights[id(param)]
        for key, state in states.get(weight.names[0], {}).items():
            if weight.unpadded_shape is not None and isinstance(state, torch.Tensor) and state.numel() > 1:
                values[key].copy_(resize(state, param.shape))
            else:
                values[key] = state
    for group, loaded_group in zip(optimizer.param_groups, loaded["optimizer"]["param_groups"], strict=True):
        group.update({k: v for k, v in loaded_group.items() if k != "params"})
