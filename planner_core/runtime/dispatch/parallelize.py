"""From a plan to a running model, in one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from planner_core.runtime.dispatch.dispatch_mode import Steered, Steering
from planner_core.runtime.dispatch.parameters import Parameters
from planner_core.runtime.initialize import Init
from planner_core.runtime.plan_reader import PlanMismatch, read_params
from planner_core.runtime.program.collectives.torch_names import check_torch
from planner_core.runtime.program.outputs import delivery, single
from planner_core.runtime.program.setup import axes_of, dtypes_of
from planner_core.runtime.record.results import know


def steer(model: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh, *, init: Init | None = None) -> Steering:
    """Shard `model` in place, and let its calls run under `plan` (in JSON form) on `mesh`.

    The model may hold whole weights, equal on every rank. Or it may be on meta; then `init(name, parameter)` returns one whole
    value at a time. On meta without `init` it runs without values. Afterwards the model is called as before, with the global
    batch on every rank. Its loss is the global loss. `backward`, optimizers and `torch.distributed.checkpoint` work on its
    parameters. Raises PlanMismatch if plan, mesh and model do not fit together.
    """
    check_torch()
    sizes = tuple(plan["mesh"]["sizes"])
    if tuple(mesh.shape) != sizes:
        raise PlanMismatch(f"the plan is for a mesh of sizes {sizes}, the mesh here has {tuple(mesh.shape)}")
    params = Parameters(mesh)
    stored = read_params(plan)
    params.shard(model, stored, dtypes_of(model, plan, stored), init)
    steering = Steering(model, plan, mesh, params)
    plain, inside = model.forward, False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return plain(*args, **kwargs)
        inside, outer = True, steering.active
        try:
            with steering.running(), without_hooks(model):
                steering.written.clear()
                out = steering.current(model(*args, **kwargs))
            return out if outer else hand_out(out)
        finally:
            inside = False

    def stay(*args: Any, **kwargs: Any) -> Any:
        raise PlanMismatch(
            "a model under a plan cannot be moved or cast, which would drop its gradient sums; do it before apply"
        )

    model.__dict__.update(_apply=stay, forward=forward)
    return steering


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, the model itself has no hooks: torch runs them around its `forward`, from which this is called."""
    tables = [model._forward_hooks, model._forward_pre_hooks]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            added = dict(table)
            table.clear()
            table.update(hooks | added)


def hand_out(tree: Any) -> Any:
    """The results for the caller: single numbers become plain tensors with their gradient; others stay (see `full_tensor()`)."""

    def out(leaf: Any) -> Any:
        if not isinstance(leaf, Steered) or leaf.numel() != 1:
            return leaf
        summed = leaf.summed or (Replicate(),) * len(leaf.placements)
        way = delivery(
            leaf.placements, summed, None, (), axes_of(leaf.mesh), whole=True
        )  # it may be a term of a sum over ranks
        return single(way(leaf.local) if way else leaf.local)

    return pytree.tree_map(out, know(tree))
