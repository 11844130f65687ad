"""`apply`: a user's own training loop calls it to put a module under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner_core.core import InputError, Plan
from planner_core.runtime.initialize import Init
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.parallel import Parallel
from planner_core.runtime.program.gradients import discard_pending
from planner_core.runtime.program.names import EditableFunctions
from planner_core.runtime.program.weights.model_order import register_model_order_hooks
from planner_core.runtime.stages import PIPELINE_AXIS, StagedParallel, check_schedule


def apply(
    module: nn.Module,
    plan: Plan,
    *,
    init: Init | None = None,
    seed: int = 0,
    compile: bool | Mapping[str, Any] = False,
    written: EditableFunctions | None = None,
) -> nn.Module:
    """Run a module under a plan, on the ranks of the default process group.

    When the module is first called, its forward pass is recorded and rewritten as one rank's program: one function for each
    unique block, with its collectives in place. The model itself is not run from then on, and may not change.

    Args:
        module: The model that was planned. Its weights are whole and equal on every rank, or on meta with `init`. They are
            replaced by this rank's parts (DTensors if the plan shards any), in the dtype in which the plan stores them: float32
            masters if the workload says so. Move and cast the module before this call, and make the optimizer after it.
        plan: The plan. It has as many devices as the process group has ranks.
        init: For a module on meta: `init(name, parameter)` returns the whole value of that parameter, with its global shape.
        seed: Seed of dropout and of all else that forward draws, the same on every rank. Ranks with the same part of a tensor get the
            same mask; other ranks get other masks.
        compile: True compiles the function of each unique block with `torch.compile(fullgraph=True)`. A mapping gives its options.
        written: The functions of an exported script, which run instead of those that would be generated.

    Returns:
        The same module. It is called as before, with this rank's own part of the micro-batch. Ranks along `plan.data_axes` hold
        different samples, in order of the ranks; all other ranks hold the same samples. With `global_batch=True` every rank gives
        the global micro-batch. The module returns what the model returns. A scalar loss is that of the global micro-batch. A tensor
        of samples has this rank's own samples; with `global_batch=True`, and without a loss, it has all of them. If the model returns
        a loss, nothing is sent for its other results: a tensor of which this rank does not have its own samples whole (logits
        that are split by vocabulary) is a DTensor of all samples, which takes no gradient; `.full_tensor()` makes it whole, on all
        ranks. `loss.backward()` and any optimizer over `module.parameters()` work as on one process. Gradients of backward passes add
        up; `with module.no_sync():` for all but the last is faster. A buffer may have this rank's channels; `state_dict()` has all.

        Under a plan with stages `loss = module.step(x, y, global_batch=True)` is forward and backward of a step (docs/CONTRACT.md).

    Raises:
        InputError: There is no process group, its number of ranks is not the plan's, or the plan's schedule does not run.
        PlanMismatch: The module is not the one that was planned; the message names the operator. It is also raised when the
            module is called, if it was changed since, or is called in a way that the plan does not describe (autocast, gradient
            hooks, inputs that need a gradient, other frozen layers, a second loss that it does not train).

    Example:
        Under `torchrun --nproc-per-node 2 train.py`:

        >>> torch.distributed.init_process_group()
        >>> model = shardscope.apply(model, shardscope.load_plan("plan.json"))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(x, y, global_batch=True).backward()
    """
    options = {"fullgraph": True} if compile is True else None if compile is False else dict(compile)
    return _install_forward(module, _make_parallel(module, plan, init, seed, options, written))


def _make_parallel(
    module: nn.Module,
    plan: Plan,
    init: Init | None,
    seed: int,
    compile: Mapping[str, Any] | None,
    written: EditableFunctions | None,
) -> Parallel:
    if plan.pipeline:
        check_schedule(plan.pipeline)
    mesh = mesh_of(plan, _device_of(module) if dist.is_initialized() else "cpu")
    if plan.pipeline:
        return StagedParallel(module, plan, mesh, init=init, seed=seed, compile=compile)
    return Parallel(module, plan, mesh, init=init, seed=seed, compile=compile, written=written)


def _install_forward(module: nn.Module, parallel: Parallel) -> nn.Module:
    """Install the plan's forward in the module, and refusals of what would go wrong silently."""
    register_model_order_hooks(parallel)

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        # Gradients of micro-batches inside `no_sync()` are not in `.grad` yet, so torch's own method would leave them.
        discard_pending(module.parameters())
        type(module).zero_grad(module, *args, **kwargs)

    # In the instance and not in its class, of which other modules are that run without a plan.
    # `.to()`, `.cuda()` and `.half()` all end in `_apply`; deepcopy and pickle ask for `__reduce_ex__`.
    module.__dict__.update(forward=parallel.forward, no_sync=parallel.no_sync, zero_grad=zero_grad, _apply=_refuse_move)
    if isinstance(parallel, StagedParallel):
        module.__dict__["step"] = parallel.step
    module.__dict__["__reduce_ex__"] = _refuse_copy
    parallel.frozen.remember_state()  # with what was installed
    return module


def _refuse_copy(protocol: int) -> Any:
    raise PlanMismatch(
        "a model under a plan cannot be copied or pickled (its process groups and generated code are of this process); copy the module "
        "before apply, save model.state_dict() and not the model, or keep averages of model.parameters() themselves"
    )


def _refuse_move(*args: Any, **kwargs: Any) -> Any:
    raise PlanMismatch(
        "a model under a plan cannot be moved or cast: its working copies would be left behind; do it before apply"
    )


def applied(module: nn.Module) -> Parallel:
    """Return the `Parallel` of a module that `apply` has returned. Raises InputError for any other module."""
    parallel = getattr(module.__dict__.get("forward"), "__self__", None)
    if not isinstance(parallel, Parallel):
        raise InputError("this module does not run under a plan; give it to shardscope.apply first")
    return parallel


def mesh_of(plan: Plan, device: str) -> DeviceMesh:
    """Make the plan's mesh over the default process group; with stages, the mesh of all their ranks. Raises InputError."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "there is no process group to run a plan on; start the script with torchrun and call torch.distributed.init_process_group()"
        )
    ranks, num_devices, mesh = dist.get_world_size(), plan.num_gpus, plan.mesh
    if ranks != num_devices:
        stages = f"{plan.pipeline.ranks} stages of " if plan.pipeline else ""
        raise InputError(
            f"the plan is for {num_devices} devices ({stages}{mesh}), but the process group has {ranks} rank{'s' * (ranks != 1)}; start "
            f"{num_devices}, or plan for a cluster of {ranks} GPUs"
        )
    if plan.pipeline is None:
        return init_device_mesh(device, mesh.axis_sizes, mesh_dim_names=mesh.axis_names)
    pipe = plan.pipeline.axis
    names = pipe.insert(mesh.axis_names, PIPELINE_AXIS)
    return init_device_mesh(device, pipe.insert(mesh.axis_sizes, pipe.ranks), mesh_dim_names=names)


def _device_of(module: nn.Module) -> str:
    """Return the kind of device on which ranks compute: that of the module's weights or buffers, if the process group can
    communicate there.

    Otherwise it is the first on which the group can; for a module on meta a GPU, if the group can communicate between GPUs.
    """
    config = (part.partition(":") for part in str(dist.get_backend_config()).split(","))
    backends = {device: backend for device, _, backend in config}
    device_of_weights = next((x.device.type for x in (*module.parameters(), *module.buffers()) if not x.is_meta), "")
    if device_of_weights in backends:
        return device_of_weights
    gpu = torch.cuda.is_available() and backends.get("cuda", "gloo") != "gloo"
    return "cuda" if gpu else "cpu" if "cpu" in backends else next(iter(backends))
