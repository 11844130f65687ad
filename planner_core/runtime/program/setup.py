"""Build this rank's axes, moves and weights from a plan."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types

from planner_core.core import (
    ParamPlan,
    Partial,
    Placements,
    Plan,
    Replicate,
    Shard,
    Step,
    group_sums,
    joint_axes,
    keeps_masters,
)
from planner_core.models.hooks import names_by_parameter, replace_tensors
from planner_core.runtime.initialize import Init
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.collectives import NO_SEGMENTS, Axis, AxisMove, Segments, local_shard, step_kind
from planner_core.runtime.program.torch_private import flattened_group
from planner_core.runtime.program.weights import Weight
from planner_core.runtime.program.weights.orders import FusedOrder
from planner_core.runtime.program.weights.plan_tensor import PlanTensor

JointAxes = Mapping[tuple[int, ...], Axis]
"""Several mesh axes as one axis, by their numbers."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a stored parameter, of its working copy, and of the gradient that accumulates."""

    stored: torch.dtype
    working: torch.dtype
    gradient: torch.dtype


def plan_precision(plan: Plan) -> Precision:
    """Return the dtypes of a plan's workload. Stored parameters are float32 masters unless the optimizer keeps none."""
    load = plan.workload
    # Example: mixed precision in bfloat16 stores and accumulates float32, and computes in bfloat16.
    working: torch.dtype = getattr(torch, load.dtype)
    masters = keeps_masters(load.optimizer, load.precision)
    stored = torch.float32 if masters and working.itemsize < 4 else working
    summed: torch.dtype = getattr(torch, load.gradients or "", stored)
    return Precision(stored, working, max(summed, working, key=lambda dtype: dtype.itemsize))


def torch_placements(placements: Placements) -> tuple[placement_types.Placement, ...]:
    """Convert placements to torch's types."""
    return tuple(
        placement_types.Shard(p.dim)
        if isinstance(p, Shard)
        else placement_types.Replicate()
        if p == Replicate()
        else placement_types.Partial()
        for p in placements
    )


def choose_dtypes(model: nn.Module, plan: Plan, stored: Mapping[str, ParamPlan]) -> Callable[[nn.Parameter], Precision]:
    """Return a function that gives the dtypes of a parameter of `model` under a plan.

    A parameter whose dtype is not the model's common one keeps it: a layer in float64 is cast to and from, however large it is.
    A parameter that is not trained has no master copy, whether it is frozen or the planned loss sends it no gradient.
    """
    precision, sizes = plan_precision(plan), Counter[torch.dtype]()
    for param in model.parameters():
        sizes[param.dtype] += param.numel()
    untrained = {
        id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in stored and not stored[n].trained
    }
    common_dtype = max(sizes, key=lambda d: (d != torch.float64, sizes[d]), default=torch.float32)

    def dtypes(param: nn.Parameter) -> Precision:
        if param.dtype != common_dtype or not param.is_floating_point():
            return Precision(param.dtype, param.dtype, param.dtype)
        if not param.requires_grad or id(param) in untrained:
            return replace(precision, stored=precision.working)
        return precision

    return dtypes


def _axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))


def make_axes(mesh: DeviceMesh) -> list[Axis]:
    """Return the mesh's axes as this rank sees them."""
    names = _axis_names(mesh)
    return [Axis(names[i], mesh.get_group(i), mesh.size(i), mesh.get_local_rank(i)) for i in range(mesh.ndim)]


def make_joint_axes(mesh: DeviceMesh, plan: Plan) -> JointAxes:
    """Return the axes over which the plan sums a gradient as over one. All ranks of the mesh must call it, since it makes groups."""
    names = _axis_names(mesh)
    named = mesh if mesh.mesh_dim_names else DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names)
    sums = {
        joint_axes(group)
        for param in plan.param_plans().values()
        for group in group_sums(step for step in param.reduce_steps() if mesh.size(step.axis) > 1)
        if len(group) > 1
    }
    joint: dict[tuple[int, ...], Axis] = {}
    for axes in sorted(sums):  # in the order of all ranks
        group, rank = flattened_group(named, [names[a] for a in axes])
        joint[axes] = Axis(plan.mesh.name_of(axes), group, group.size(), rank)
    return joint


def make_move(step: Step, axes: Sequence[Axis]) -> AxisMove:
    """Convert a plan's step to a move on this rank's axis."""
    src = step.src.dim if isinstance(step.src, Shard) else None
    dst = step.dst.dim if isinstance(step.dst, Shard) else None
    return AxisMove(axes[step.axis], step_kind(step), src, dst)


def make_moves(steps: Iterable[Step], axes: Sequence[Axis]) -> tuple[AxisMove, ...]:
    """Convert a plan's steps, without those on axes of one rank."""
    return tuple(make_move(s, axes) for s in steps if axes[s.axis].size > 1)


def make_sums(steps: Iterable[Step], axes: Sequence[Axis], joint: JointAxes) -> tuple[AxisMove, ...]:
    """Convert the steps of a gradient, without those on axes of one rank. Sums over several axes are one move."""
    return tuple(
        make_move(group[0], axes) if len(group) == 1 else AxisMove(joint[joint_axes(group)], "all_reduce")
        for group in group_sums(step for step in steps if axes[step.axis].size > 1)
    )


def shard_tensor(
    x: torch.Tensor, placements: Placements, axes: Sequence[Axis], segments: Segments = NO_SEGMENTS
) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank holds whole. On a Partial axis the tensor is divided by the number of
    ranks."""
    for axis, placement in zip(axes, placements, strict=True):
        if isinstance(placement, Shard):
            x = local_shard(x, placement.dim, axis.size, axis.rank, segments)
        elif isinstance(placement, Partial):
            x = x / axis.size
    return x


def shard_model(
    model: nn.Module,
    stored: Mapping[str, ParamPlan],
    mesh: DeviceMesh,
    axes: Sequence[Axis],
    joint: JointAxes,
    dtypes: Callable[[nn.Parameter], Precision],
    init: Init | None,
) -> dict[str, Weight]:
    """Replace the model's parameters by this rank's parts, and return the weight of each by its first name.

    Tied parameters stay tied. Lists of parameters that modules hold get the parts too. If any parameter is sharded all become
    DTensors, which norms and optimizers understand; otherwise all stay plain parameters.
    """
    names = names_by_parameter(model)
    replicate: Placements = (Replicate(),) * len(axes)
    # For a parameter that the plan does not name: every rank has it whole.
    replicated = ParamPlan(replicate, replicate, replicate)
    plans = {key: next((stored[n] for n in aliases if n in stored), replicated) for key, aliases in names.items()}
    any_sharded = any(
        isinstance(p, Shard) and a.size > 1 for s in plans.values() for p, a in zip(s.stored, axes, strict=True)
    )
    weights: dict[int, Weight] = {}
    replaced: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in weights:
                plan = plans[id(parameter)]
                sharded = _make_parameter(
                    names[id(parameter)][0], parameter, plan, mesh, axes, dtypes(parameter).stored, init, any_sharded
                )
                if sharded is not parameter:
                    parameter.__class__ = _replaced_class(type(parameter))
                    replaced[id(parameter)] = sharded
                weights[id(parameter)] = make_weight(
                    tuple(names[id(parameter)]), sharded, plan, axes, joint, dtypes(parameter)
                )
            module._parameters[name] = weights[id(parameter)].parameter
    # Modules also hold parameters in lists, dicts and objects, from which a forward would compute with the old ones.
    replace_tensors(model, replaced)
    return {w.names[0]: w for w in weights.values()}


def _make_parameter(
    name: str,
    parameter: nn.Parameter,
    plan: ParamPlan,
    mesh: DeviceMesh,
    axes: Sequence[Axis],
    dtype: torch.dtype,
    init: Init | None,
    any_sharded: bool,
) -> nn.Parameter:
    with torch.no_grad():
        full = parameter.detach() if init is None else init(name, parameter)
        full = full if full.is_meta else full.to(mesh.device_type)
        # Cut, then cast: no rank makes a copy of the whole tensor in another dtype.
        local = shard_tensor(full, plan.stored, axes, plan.segments).to(dtype).contiguous()
        # Neither cut nor cast nor moved: the model keeps its own parameter, and an optimizer that was made of it stays right.
        if not any_sharded and local.data_ptr() == parameter.data_ptr() and not parameter.is_meta:
            return parameter
        if local.untyped_storage().nbytes() != local.nbytes or local.data_ptr() == parameter.data_ptr():
            local = local.clone()  # a slice would keep the whole alive
    if any_sharded:
        stride = full.contiguous().stride()
        spec_source = DTensor.from_local(
            local, mesh, torch_placements(plan.stored), run_check=False, shape=full.shape, stride=stride
        )
        local = PlanTensor.of(local, spec_source._spec, _fused_order(plan, axes))
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def _fused_order(plan: ParamPlan, axes: Sequence[Axis]) -> FusedOrder:
    """Return the fused dims of which ranks hold a share of each part, with the sizes of the parts."""
    cut = {p.dim for p, a in zip(plan.stored, axes, strict=True) if isinstance(p, Shard) and a.size > 1}
    return tuple((dim, tuple(parts)) for dim, parts in plan.segments.items() if dim in cut and len(parts) > 1)


@functools.cache
def _replaced_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return a class for parameters that were replaced by a part. Its gradient refuses to be read, since an optimizer of it
    would train nothing."""

    def refuse(parameter: nn.Parameter) -> None:
        raise PlanMismatch(
            "the gradient of a parameter from before apply was asked for, as by an optimizer that was made of it, but the plan has "
            "replaced the parameter; for an optimizer, make it after apply, from model.parameters()"
        )

    return type(kind.__name__, (kind,), {"grad": property(refuse)})


def make_weight(
    names: tuple[str, ...],
    param: nn.Parameter,
    plan: ParamPlan,
    axes: Sequence[Axis],
    joint: JointAxes,
    dtypes: Precision,
) -> Weight:
    """Make the weight of a parameter, with the moves between its stored form, its working copy and its accumulated gradient."""
    refresh, final = make_moves(plan.refresh_steps(), axes), make_sums(plan.reduce_steps(), axes, joint)
    # Over one rank nothing is gathered: a weight that computes as it is stored is used where it lies, and another is cast for each use.
    casts = bool(plan.gathered) and all(axes[a].size == 1 for a in plan.gathered) and not refresh
    return Weight(names, param, dtypes.working, dtypes.gradient, refresh, final, plan.segments, cast_per_use=casts)
