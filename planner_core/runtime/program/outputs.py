"""Each tensor that the model returns, in the form in which a training loop expects it on this rank.

A tensor with samples has this rank's own samples, and is whole in every other dim. Its gradient counts as that of a mean over
ranks, as in DistributedDataParallel. With `whole`, every rank gets the global batch, and differentiates it.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from planner_core.core import Partial, Placements, Shard
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.collectives import Axis, AxisMove, apply_moves

Delivery = Callable[[torch.Tensor], torch.Tensor]


def make_delivery(
    placements: Placements,
    gradient: Placements,
    samples: int | None,
    data_axes: Sequence[int],
    axes: Sequence[Axis],
    *,
    whole: bool,
) -> Delivery | None:
    """A function that brings a tensor with these placements to the caller's form; None if it has this form already."""
    forward: list[AxisMove] = []
    backward: list[AxisMove] = []
    own = 1
    for number in reversed(range(len(axes))):
        axis, here, back = axes[number], placements[number], gradient[number]
        if axis.size == 1:
            continue
        if isinstance(here, Shard) and here.dim == samples and number in data_axes and not whole:
            own *= axis.size
            continue
        if isinstance(here, Shard):
            forward.append(AxisMove(axis, "all_gather", here.dim))
        elif isinstance(here, Partial):
            forward.append(AxisMove(axis, "all_reduce"))
        if isinstance(back, Shard):
            backward.insert(0, AxisMove(axis, "slice", None, back.dim))
        elif isinstance(back, Partial):
            backward.append(AxisMove(axis, "divide"))
    if not forward and not backward and own == 1:
        return None
    return _Redistribution(tuple(forward), tuple(backward), own)


@dataclass(frozen=True)
class _Redistribution:
    """The steps of a tensor, the steps of its gradient, and the number by which the gradient is divided."""

    forward: tuple[AxisMove, ...]
    backward: tuple[AxisMove, ...]
    own: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = _Redistribute.apply(x, self.forward, self.backward, self.own)
        return moved


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: tuple[AxisMove, ...], backward: tuple[AxisMove, ...], own: int
    ) -> torch.Tensor:
        ctx.steps, ctx.own = backward, own
        moved = apply_moves(x, forward)
        return x.view_as(x) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        moved = apply_moves(gradient, ctx.steps)
        return moved if ctx.own == 1 else moved / ctx.own, None, None, None


def guard_scalar(x: torch.Tensor) -> torch.Tensor:
    """A single number. Its gradient may come as a DTensor, if a penalty on weights was added to it. A backward pass from it that gives
    some tensors alone their gradients raises PlanMismatch: parameters under a plan are not in autograd's graph."""
    if x.requires_grad:
        number = weakref.ref(x)  # a hook that held it would keep the graph

        def came(gradient: torch.Tensor) -> torch.Tensor:
            root = number()
            before = (
                [node for node, _ in root.grad_fn.next_functions if node] if root is not None and root.grad_fn else []
            )
            if before and not any(map(torch._C._will_engine_execute_node, before)):
                raise PlanMismatch(
                    "gradients were asked for of some tensors alone (torch.autograd.grad, or backward with inputs=), but parameters under "
                    "a plan get theirs by loss.backward(), in their .grad"
                )
            return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

        x.register_hook(came)
    return x


def refuse_gradient_of(x: torch.Tensor, what: str) -> torch.Tensor:
    """A result to which the planned loss does not send a gradient. A gradient that comes from elsewhere raises PlanMismatch."""
    held: torch.Tensor = _RefuseGradient.apply(x, what)
    return held


class _RefuseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: str) -> torch.Tensor:
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise PlanMismatch(
            f"a gradient came to {ctx.what}, but the planned loss does not depend on it; plan the model with a loss of "
            "all that it is trained on"
        )
