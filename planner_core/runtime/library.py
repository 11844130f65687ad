"""The door for a person's own training loop: a module and a plan in, the same module under the plan out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

from planner_core.core import InputError, Plan, plan_to_json
from planner_core.runtime.parallelize import steer
from planner_core.runtime.parameters import Init


def apply(module: nn.Module, plan: Plan, *, init: Init | None = None) -> nn.Module:
    """Run a module under a plan, on the ranks of the default process group.

    Args:
        module: The model that was planned, with whole weights that are equal on every rank; or on meta, with `init`. Its
            parameters are replaced by DTensors that hold this rank's part. Move and cast it before, not after.
        plan: The plan, for as many devices as the group has ranks.
        init: Called as `init(name, parameter)` for a module on meta; returns the whole value of that parameter.

    Returns:
        The same module. It is called as before, with this rank's own part of the batch: ranks along `plan.data_axes` hold
        different samples, in their order, all others the same ones. With `global_batch=True` every rank gives the whole
        batch. It returns what the model returns, for the whole batch; a scalar loss is a plain tensor. `loss.backward()` and
        any optimizer over `module.parameters()` work as on one process.

    Raises:
        InputError: There is no process group, or it has another number of ranks than the plan has devices.
        PlanMismatch: The module is not the one that was planned; the sentence names the operation.

    Example:
        Under `torchrun --nproc-per-node 2 train.py`:

        >>> torch.distributed.init_process_group()
        >>> model = shardscope.apply(model, shardscope.load_plan("plan.json"))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(x, y, global_batch=True).backward()
    """
    mesh = _mesh(plan)
    steer(module, plan_to_json(plan), mesh, init=init)
    planned, axes = module.forward, plan.data_axes

    def forward(*args: Any, global_batch: bool = False, **kwargs: Any) -> Any:
        if not global_batch:
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _whole(t, mesh, axes), (args, kwargs))
        return planned(*args, **kwargs)

    module.__dict__["forward"] = forward
    return module


def _mesh(plan: Plan) -> DeviceMesh:
    """The plan's mesh over the default process group; raises InputError."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "there is no process group to run a plan on; start the script with torchrun and call torch.distributed.init_process_group()"
        )
    ranks, needed = dist.get_world_size(), plan.mesh.num_devices
    if ranks != needed:
        raise InputError(
            f"the plan is for {needed} devices ({plan.mesh}), but the process group has {ranks} rank{'s' * (ranks != 1)}; start "
            f"{needed}, or plan for a cluster of {ranks} GPUs"
        )
    device = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    return init_device_mesh(device, plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)


def _whole(own: torch.Tensor, mesh: DeviceMesh, axes: tuple[int, ...]) -> torch.Tensor:
    """The whole batch from every rank's own part: parts of the last axis lie side by side."""
    if own.dim() == 0:
        return own
    for axis in reversed(axes):
        parts = [torch.empty_like(own) for _ in range(mesh.size(axis))]
        dist.all_gather(parts, own.contiguous(), group=mesh.get_group(axis))
        own = torch.cat(parts)
    return own
