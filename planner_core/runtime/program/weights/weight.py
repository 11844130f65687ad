"""The weights of one rank, in three forms.

    stored    the form that the optimizer, checkpoints and the user see
    working   a copy in compute dtype that is kept between uses. It is refreshed when `stored` has changed
    gathered  a copy for one use, Replicate on some axes. It is freed after the use, and gathered again for backward. If it is gathered
              from `stored` directly, no working copy is kept: what is sent is cast

Autograd sees working and gathered tensors only, as leaves. Their gradients go to `gradients.GradientBucket`.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from planner_core.runtime.mismatch import unplanned_gradient_error
from planner_core.runtime.program.buckets import BucketMember, align_chains
from planner_core.runtime.program.collectives import AxisMove, Segments
from planner_core.runtime.program.torch_private import local_part
from planner_core.runtime.program.weights.plan_tensor import PlanTensor, convert_like

WEIGHT_OF_PARAMETER = WeakIdKeyDictionary()
"""A reference to the weight of each parameter that is under a plan."""


def find_weight(parameter: torch.Tensor) -> Weight | None:
    """Return the weight of a parameter under a plan; None for any other tensor."""
    # The table holds references only, so a model that nobody uses any more can go, though the table lives as long as the process.
    return WEIGHT_OF_PARAMETER.get(parameter, lambda: None)()  # type: ignore[no-any-return]


class GradientSource:
    """A weight as a unit uses it: autograd hands over its gradient, and the unit says where that goes."""

    names: tuple[str, ...]
    take_gradient: Callable[[torch.Tensor], None] | None = None
    """Takes the gradient to a bucket of the unit. None if the planned loss sends none."""

    def accept_gradient(self, gradient: torch.Tensor) -> None:
        """Accept autograd's gradient. Raises PlanMismatch if none was planned."""
        if self.take_gradient is None:
            raise unplanned_gradient_error(self.names[0])
        self.take_gradient(gradient)


@dataclass(eq=False)
class Weight(GradientSource):
    """One parameter. `names` are all its names in the model. `local` is this rank's part of it, as a view.

    `refresh` are the moves from `local` to the working copy. `final` are the moves from the accumulated gradient to the
    placements of `local`.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    refresh: tuple[AxisMove, ...] = ()
    final: tuple[AxisMove, ...] = ()
    segments: Segments = field(default_factory=dict)
    cast_per_use: bool = False
    """Whether each use casts it to `dtype`, so that no working copy is kept."""
    unpadded_shape: tuple[int, ...] | None = None
    """The model's own shape if the plan pads the parameter (a vocabulary). Checkpoints have this one."""
    model: Any = None  # a weak reference to its model under a plan (`Parallel`)
    first_unit: object = None  # the unit that finishes its gradient: the first that uses it
    accumulated: torch.Tensor | None = None
    """The sum of the gradients of micro-batches, not yet summed over ranks."""
    packed_as: BucketMember | None = (
        None  # how `accumulated` lies if it is packed rank by rank, as a reduce_scatter sends them
    )
    pending_gradient: Any = None
    """Stands in `parameter.grad` while `accumulated` waits for the last micro-batch (`gradients.PendingGradient`)."""
    published_gradient: torch.Tensor | None = None
    """The gradient that the parameter was given, until the optimizer has used it."""

    def __post_init__(self) -> None:
        WEIGHT_OF_PARAMETER[self.parameter] = weakref.ref(self)  # the weight holds the parameter
        local = self.local
        self.is_alias = not self.refresh and local.dtype == self.dtype
        self.cast_per_use = self.cast_per_use and not self.is_alias
        self.synced_state: object = None
        self.trained = self.parameter.requires_grad
        self.working_shape = tuple(local.shape)  # of the working copy
        for move in self.refresh:
            self.working_shape = (
                BucketMember(self.working_shape, self.segments, move).result_shape
                if move.axis.size > 1
                else self.working_shape
            )
        # The working copy, if a use has asked for it.
        self.materialized: torch.Tensor | None = local.detach() if self.is_alias else None
        self._leaf: torch.Tensor | None = None

    @property
    def working(self) -> torch.Tensor:
        """The working copy. Its memory is allocated at the first use."""
        if self.materialized is None:
            self.materialized = torch.empty(self.working_shape, dtype=self.dtype, device=self.local.device)
        return self.materialized

    @property
    def leaf(self) -> torch.Tensor:
        """The working copy as a leaf of autograd."""
        if self._leaf is None:
            self._leaf = self.working.detach().requires_grad_(self.parameter.requires_grad)
            redirect_gradient(self._leaf, self)
        return self._leaf

    def operand(self) -> torch.Tensor:
        """Return the weight as a unit's function takes it."""
        return self.leaf

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the parameter."""
        return local_part(self.parameter)

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's part of the parameter's gradient."""
        is_pending = self.pending_gradient is not None and self.parameter.grad is self.pending_gradient
        current = self.pending_gradient.before_no_sync if is_pending else self.parameter.grad
        return None if current is None else local_part(current)

    @property
    def accumulated_shape(self) -> tuple[int, ...]:
        """The shape of the gradient in `accumulated`, which may be packed."""
        assert self.accumulated is not None
        return self.packed_as.shape if self.packed_as else tuple(self.accumulated.shape)

    def publish(self, gradient: torch.Tensor) -> None:
        """Add a reduced gradient to the parameter's gradient, and run the parameter's own hooks."""
        current, param = self.parameter.grad, self.parameter
        if isinstance(current, DTensor) and isinstance(param, PlanTensor):
            param.grad = convert_like(current, param)  # of a term of the loop, as a penalty
        local_gradient = self.gradient
        if local_gradient is not None:
            local_gradient.add_(gradient)  # in whatever dtype it came: a copy in float32 would stand beside the sum
        else:
            # Gradients may be summed in 16 bits; torch's optimizers take them in the dtype of the master weight, as FSDP2 hands them on.
            gradient = gradient.to(param.dtype).data
            # A view counts what is written to its neighbours as well, and the copy would seem stale.
            param.grad = (
                PlanTensor.of(gradient, param._spec, param.order) if isinstance(param, PlanTensor) else gradient
            )
        if self.materialized is not None and not self.is_alias:
            self.published_gradient = self.gradient
            assert self.published_gradient is not None
            # An optimizer that writes the parameter past its version counter still uses up this gradient, and `is_stale` sees that.
            self.published_version = self.published_gradient._version
        # torch runs these hooks where autograd accumulates a gradient, and autograd has never seen this parameter
        for hook in (getattr(self.parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.parameter)

    def is_stale(self) -> bool:
        """Return whether the working copy is out of date.

        It is when the parameter was written, and also when a published gradient was taken away or changed: some optimizers
        write the parameter's memory in a way that no version counter sees, but all of them use the gradient.
        """
        if self._memory_version() != self.synced_state:
            return True
        if self.published_gradient is None:
            return False
        return (
            self.gradient is not self.published_gradient or self.published_gradient._version != self.published_version
        )

    def mark_fresh(self) -> None:
        """Note that the working copy is up to date."""
        self.synced_state, self.published_gradient = self._memory_version(), None

    def _memory_version(self) -> tuple[int, int]:
        """Return the parameter's address, and how often it was written."""
        return self.local.data_ptr(), self.local._version

    def follow_parameter(self) -> None:
        """Follow the parameter to new memory (`param.data = ...`), if the working copy is the parameter itself."""
        if self.is_alias and self.working.data_ptr() != self.local.data_ptr():
            # The leaf as well: it is a view of the old memory.
            self.materialized, self._leaf = self.local.detach(), None


def redirect_gradient(leaf: torch.Tensor, sink: Weight | GatheredWeight) -> None:
    """Hand the gradient of a leaf to its sink as soon as autograd has completed it. The leaf keeps nothing."""
    reference = weakref.ref(sink)  # autograd would keep it, and with it the model

    def hand_over(leaf: torch.Tensor) -> None:
        # Taken away at once: the next micro-batch must find no gradient here to which autograd would add.
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None and (sink := reference()):
            sink.accept_gradient(gradient)

    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(hand_over)


class GatheredWeight(GradientSource):
    """A weight that is gathered for use: a leaf whose memory belongs to a bucket."""

    def __init__(self, weight: Weight, steps: tuple[AxisMove, ...]) -> None:
        self.weight, self.names, self.steps = weight, weight.names, steps
        stages = bucket_stages([weight], [weight.working_shape], [steps])
        self.shape = stages[-1][0].result_shape if stages else weight.working_shape
        self.leaf: torch.Tensor
        self.anchor: torch.Tensor | None = None
        """A leaf without memory, for a weight whose memory autograd keeps."""

    def operand(self) -> torch.Tensor:
        """Return the weight as a unit's function takes it."""
        return self.leaf if self.anchor is None else _UseOfWeight.apply(self.anchor, self.leaf, self)


class SeparatelyReducedUse(GradientSource):
    """One of several uses of a weight that is not gathered, if each use reduces its gradient in every micro-batch (ZeRO-2)."""

    def __init__(self, weight: Weight) -> None:
        self.weight, self.names = weight, weight.names
        self.anchor = torch.empty(0, device=weight.local.device, requires_grad=True)

    @property
    def leaf(self) -> torch.Tensor:
        """The working copy."""
        return self.weight.working

    def operand(self) -> torch.Tensor:
        """Return the weight as a unit's function takes it."""
        return _UseOfWeight.apply(self.anchor, self.leaf, self)  # type: ignore[no-any-return]


class _UseOfWeight(torch.autograd.Function):
    """A weight of one use.

    If it was gathered, only the tensors that autograd saves hold its memory, which is free when the last of them was used. A
    leaf would hold it to the end of backward.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, weight: torch.Tensor, use: GatheredWeight | SeparatelyReducedUse
    ) -> torch.Tensor:
        """Return the weight, which is connected to `anchor` in autograd's graph."""
        ctx.copy = use
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        """Hand the gradient to the use."""
        ctx.copy.accept_gradient(gradient)
        return None, None, None


def bucket_stages(
    weights: Sequence[Weight], shapes: Sequence[tuple[int, ...]], chains: Sequence[Sequence[AxisMove]]
) -> list[list[BucketMember]]:
    """Return the members of each stage, for tensors of these shapes that take these chains, whose `message_key`s are equal."""
    shapes, stages = list(shapes), []
    for steps in zip(*align_chains(chains), strict=True):
        stages.append(
            [BucketMember(shape, w.segments, move) for shape, w, move in zip(shapes, weights, steps, strict=True)]
        )
        # Each stage begins with the shapes in which the one before has left the tensors.
        shapes = [m.result_shape for m in stages[-1]]
    return stages
