"""Each tensor that the model returns, in the form in which a training loop expects it on this rank.

A tensor of samples has this rank's own samples, and is whole in every other dim. Its gradient counts as that of a mean over
ranks, as in DistributedDataParallel. With `global_batch` every rank gets the tensor of the global batch.
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
from planner_core.runtime.program.torch_private import will_run

Delivery = Callable[[torch.Tensor], torch.Tensor]


def make_delivery(
    placements: Placements,
    gradient: Placements,
    samples: int | None,
    data_axes: Sequence[int],
    axes: Sequence[Axis],
    *,
    global_batch: bool,
) -> Delivery | None:
    """Return a function that brings a tensor with these placements to the caller's form; None if it has this form already."""
    forward: list[AxisMove] = []
    backward: list[AxisMove] = []
    num_shares = 1
    # The last axis first. Example: 4 rows over axes of 2 and 2. The inner axis joins 0 1 and 2 3, and the outer one joins these.
    for reference in reversed(range(len(axes))):
        axis, placement, gradient_placement = axes[reference], placements[reference], gradient[reference]
        if axis.size == 1:
            continue
        if isinstance(placement, Shard) and placement.dim == samples and reference in data_axes and not global_batch:
            # A loop takes the mean over its own samples. Of two means 3 and 5 the mean of all is (3 + 5) / 2, so each counts half.
            num_shares *= axis.size
            continue
        if isinstance(placement, Shard):
            forward.append(AxisMove(axis, "all_gather", placement.dim))
        elif isinstance(placement, Partial):
            forward.append(AxisMove(axis, "all_reduce"))
        if isinstance(gradient_placement, Shard):
            # In front, since gradients are cut in the opposite order: the outer axis first, as `shard_tensor` does.
            backward.insert(0, AxisMove(axis, "slice", None, gradient_placement.dim))
        elif isinstance(gradient_placement, Partial):
            backward.append(AxisMove(axis, "divide"))
    if not forward and not backward and num_shares == 1:
        return None
    return _Redistribution(tuple(forward), tuple(backward), num_shares)


@dataclass(frozen=True)
class _Redistribution:
    """The moves of a tensor, the moves of its gradient, and the number by which the gradient is divided."""

    forward: tuple[AxisMove, ...]
    backward: tuple[AxisMove, ...]
    num_shares: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Redistribute.apply(x, self.forward, self.backward, self.num_shares)
        return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: tuple[AxisMove, ...], backward: tuple[AxisMove, ...], num_shares: int
    ) -> torch.Tensor:
        ctx.steps, ctx.num_shares = backward, num_shares
        result = apply_moves(x, forward)
        return x.view_as(x) if result is x else result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        result = apply_moves(gradient, ctx.steps)
        return result if ctx.num_shares == 1 else result / ctx.num_shares, None, None, None


def guard_scalar(x: torch.Tensor) -> torch.Tensor:
    """Return a single number as it is, with a hook on its gradient.

    The gradient may be a DTensor if a penalty on weights was added to the loss. A backward pass to some tensors only raises
    PlanMismatch: parameters under a plan are not in autograd's graph.
    """
    if x.requires_grad:
        reference = weakref.ref(x)  # a hook that held it would keep the graph

        def check_gradient(gradient: torch.Tensor) -> torch.Tensor:
            root = reference()
            inputs = (
                [node for node, _ in root.grad_fn.next_functions if node] if root is not None and root.grad_fn else []
            )
            if inputs and not any(map(will_run, inputs)):
                raise PlanMismatch(
                    "gradients were asked for of some tensors alone (torch.autograd.grad, or backward with inputs=), but parameters under "
                    "a plan get theirs by loss.backward(), in their .grad"
                )
            return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

        x.register_hook(check_gradient)
    return x


def refuse_gradient_of(x: torch.Tensor, what: str) -> torch.Tensor:
    """Return a result to which the planned loss sends no gradient. A gradient from elsewhere raises PlanMismatch."""
    result: torch.Tensor = _RefuseGradient.apply(x, what)
    return result


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
