"""The working copy of a weight while a model runs its own code, if its gradient is summed over ranks once a step.

It is a copy if optimizer states are sharded (ZeRO-1, ZeRO-2), else the parameter itself. Its gradient is kept apart from the parameter's,
since a loop may add terms to that, which are not to be summed: those of a penalty on the weights.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from planner_core.runtime.dispatch.redistribute import move
from planner_core.runtime.plan_reader import Edge, Stored
from planner_core.runtime.program.collectives import take
from planner_core.runtime.program.gradients import hold_back, resume
from planner_core.runtime.program.weights import Weight, caught


class WorkingCopy:
    """The copy of one weight that all uses read, and its gradient on the way to the stored parameter.

    Autograd sees `anchor`, a leaf of the shape in which the gradient accumulates: whole for ZeRO-1, a part for ZeRO-2. It holds
    no values. `sync` says whether the backward pass that runs is the last of a step.
    """

    def __init__(self, weight: Weight, stored: Stored, mesh: DeviceMesh, sync: Callable[[], bool]) -> None:
        self.weight, self.mesh, self.sync = weight, mesh, sync
        shape = list(weight.parameter.shape)
        for axis, placement in enumerate(stored.gradient):
            if isinstance(placement, Shard):
                shape[placement.dim] //= mesh.size(axis)
        nothing = torch.empty((), dtype=weight.gradient_dtype, device=weight.local.device)
        self.anchor = nothing.expand(shape).detach().requires_grad_(weight.trained)
        caught(self.anchor, self)

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """The copy, made anew once the parameter or its gradient has been used."""
        weight = self.weight
        weight.follow()
        if not weight.alias and weight.stale():
            weight.working.copy_(take(weight.local.detach().to(weight.dtype), weight.refresh, weight.segments))
            weight.fresh()
        return weight.working

    def use(self, edge: Edge) -> torch.Tensor:
        """The weight as one operator takes it."""
        used: torch.Tensor = _Used.apply(self.anchor, self.value(), edge, self.mesh)
        return used

    @torch.no_grad()
    def sink(self, gradient: torch.Tensor) -> None:
        """Takes autograd's gradient: onto the terms of earlier micro-batches; at the end of a step, reduced, to the parameter."""
        weight = self.weight
        resume([weight])
        weight.terms = gradient if weight.terms is None else weight.terms.add_(gradient)
        if self.sync():
            terms, weight.terms = weight.terms, None
            weight.publish(take(terms, weight.final, weight.segments))
        hold_back([weight])


class _Used(torch.autograd.Function):
    _shardscope = True  # not an op of the model

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, working: torch.Tensor, edge: Edge, mesh: DeviceMesh) -> torch.Tensor:
        ctx.edge, ctx.mesh, ctx.dtype = edge, mesh, anchor.dtype
        moved = move(working, edge.forward, mesh, edge.segments)
        return working.view_as(working) if moved is working else moved

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        moved = move(gradient.to(ctx.dtype), ctx.edge.backward, ctx.mesh, ctx.edge.segments)
        return moved, None, None, None
