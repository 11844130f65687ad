"""The door for a person's own training loop: a module and a plan in, the same module under the plan out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner_core.core import InputError, Plan, plan_to_json
from planner_core.runtime.initialize import Init
from planner_core.runtime.parallel import Parallel
from planner_core.runtime.plan_reader import PlanMismatch
from planner_core.runtime.program.names import Written


def apply(
    module: nn.Module, plan: Plan, *, init: Init | None = None, seed: int = 0, compile: bool | Mapping[str, Any] = False,
    written: Written | None = None,
) -> nn.Module:  # fmt: skip
    """Run a module under a plan, on the ranks of the default process group.

    When the module is first called, its forward pass is recorded and written as one rank's program: a function for each
    unique block, with its collectives in place. A model that cannot be written so runs its own code under the plan, slower,
    and a warning says why.

    Args:
        module: The model that was planned, with whole weights that are equal on every rank; or on meta, with `init`. Its
            parameters are replaced by this rank's parts (DTensors if the plan splits any), in the type that the plan stores
            them in: float32 masters where the workload says so. Move and cast it before, not after.
        plan: The plan, for as many devices as the group has ranks.
        init: Called as `init(name, parameter)` for a module on meta; returns the whole value of that parameter.
        seed: Of dropout. Masks are the same wherever a tensor is replicated, and different on its shards.
        compile: Compile the function of each unique block with `torch.compile(fullgraph=True)`; or its options by name.
        written: The functions that stand in an exported script, to run in place of those that would be written.

    Returns:
        The same module. It is called as before, with this rank's own part of the batch: ranks along `plan.data_axes` hold
        different samples, in their order, all others the same ones. With `global_batch=True` every rank gives the whole
        batch. It returns what the model returns: a scalar loss is that of the whole batch, tensors of samples are this rank's
        own; beside a loss, tensors that lie split over ranks are DTensors without gradient. `loss.backward()` and any
        optimizer over `module.parameters()` work as on one process; gradients of several backward passes add up, cheaper in
        `with module.no_sync():` for all but the last. Clip with `clip_grad_norm_`.

    Raises:
        InputError: There is no process group, or it has another number of ranks than the plan has devices.
        PlanMismatch: The module is not the one that was planned; the sentence names the operation. When it is called: the
            module was changed since, or is called in a way (autocast, gradient hooks) that the plan does not describe.

    Example:
        Under `torchrun --nproc-per-node 2 train.py`:

        >>> torch.distributed.init_process_group()
        >>> model = shardscope.apply(model, shardscope.load_plan("plan.json"))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(x, y, global_batch=True).backward()
    """
    parallel = Parallel(
        module, plan_to_json(plan), _mesh(plan), data_axes=plan.data_axes, init=init, seed=seed, written=written
    )

    if compile is not False:
        parallel.engine.compile = {"fullgraph": True} if compile is True else dict(compile)

    module.__dict__.update(forward=parallel.forward, no_sync=parallel.no_sync, _apply=_stay)
    return module


def _stay(*args: Any, **kwargs: Any) -> Any:
    raise PlanMismatch(
        "a model under a plan cannot be moved or cast: its working copies would be left behind; do it before apply"
    )


def applied(module: nn.Module) -> Parallel:
    """The plan's side of a module that `apply` has returned; raises InputError for another."""
    found = getattr(module.__dict__.get("forward"), "__self__", None)
    if not isinstance(found, Parallel):
        raise InputError("this module runs under no plan; give it to shardscope.apply first")
    return found


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
