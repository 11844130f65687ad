"""The weights of one rank, in three forms:

    stored    the form that the optimizer, checkpoints and the user see
    working   the copy in compute dtype that is kept between uses; it is made from `stored` when that has changed
    gathered  a copy for one use, Replicate on some axes; its memory is freed after the use, and taken again for backward. If it is made
              from `stored` at once, no working copy is kept: what is sent is cast

Autograd sees only working or gathered tensors, as leaves. Their gradients go to `gradients.GradientBucket`.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from planner_core.runtime.mismatch import unplanned_gradient_error
from planner_core.runtime.program.buckets import BucketMember, align_chains
from planner_core.runtime.program.collectives import AxisMove, Segments
from planner_core.runtime.program.weights.plan_tensor import PlanTensor, convert_like

WEIGHT_OF_PARAMETER = WeakIdKeyDictionary()
"""A reference to the weight of each parameter that is under a plan."""


def find_weight(parameter: torch.Tensor) -> Weight | None:
    """The weight of a parameter that is under a plan."""
    return WEIGHT_OF_PARAMETER.get(parameter, lambda: None)()  # type: ignore[no-any-return]


@dataclass(eq=False)
class Weight:
    """One parameter. `names` are all its names in the model. `local` is this rank's part of it, as a view.

    `refresh` are the steps from `local` to the working copy. `final` are the steps from the accumulated gradient to the
    placements of `local`.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    refresh: tuple[AxisMove, ...] = ()
    final: tuple[AxisMove, ...] = ()
    segments: Segments = field(default_factory=dict)
    casts: bool = False
    """Whether each use casts it to `dtype`, so that no working copy is kept, as that of a weight which is gathered at use."""
    model: Any = None  # a weak reference to its model under a plan (`Parallel`)
    home: object = None  # the unit that finishes its gradient: the first that uses it
    terms: torch.Tensor | None = None
    """The sum of the gradients of micro-batches, before it is summed over ranks."""
    packing: BucketMember | None = (
        None  # how `terms` lie if they are packed rank by rank, as a reduce_scatter sends them
    )
    waiting: Any = None
    """Stands in `parameter.grad` while `terms` wait for the last micro-batch (`gradients.Waiting`)."""
    published: torch.Tensor | None = None
    """The gradient that was given to the parameter, until the optimizer has used it."""

    def __post_init__(self) -> None:
        WEIGHT_OF_PARAMETER[self.parameter] = weakref.ref(self)  # the weight holds the parameter
        local = self.local
        self.alias = not self.refresh and local.dtype == self.dtype
        self.casts = self.casts and not self.alias
        self.seen: object = None
        self.trained = self.parameter.requires_grad
        self.form = tuple(local.shape)  # of the working copy
        for step in self.refresh:
            self.form = BucketMember(self.form, self.segments, step).shape_after if step.axis.size > 1 else self.form
        # The working copy, if a use has asked for it.
        self.kept: torch.Tensor | None = local.detach() if self.alias else None
        self._leaf: torch.Tensor | None = None

    @property
    def working(self) -> torch.Tensor:
        """The working copy. The first use takes its memory."""
        if self.kept is None:
            self.kept = torch.empty(self.form, dtype=self.dtype, device=self.local.device)
        return self.kept

    @property
    def leaf(self) -> torch.Tensor:
        """The working copy as autograd sees it."""
        if self._leaf is None:
            self._leaf = self.working.detach().requires_grad_(self.parameter.requires_grad)
            redirect_gradient(self._leaf, self)
        return self._leaf

    def used(self) -> torch.Tensor:
        """The weight as a unit's function takes it."""
        return self.leaf

    def sink(self, gradient: torch.Tensor) -> None:
        """Takes autograd's gradient of the leaf. The weight's unit replaces this function."""
        raise unplanned_gradient_error(self.names[0])

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the parameter."""
        held = self.parameter
        return held._local_tensor if isinstance(held, DTensor) else held

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's part of the parameter's gradient."""
        waits = self.waiting is not None and self.parameter.grad is self.waiting
        found = self.waiting.held if waits else self.parameter.grad
        return found._local_tensor if isinstance(found, DTensor) else found

    @property
    def shape_of_terms(self) -> tuple[int, ...]:
        """Shape of the gradient whose terms are `terms`."""
        assert self.terms is not None
        return self.packing.shape if self.packing else tuple(self.terms.shape)

    def publish(self, gradient: torch.Tensor) -> None:
        """Add a reduced gradient to the parameter's gradient."""
        found, param = self.parameter.grad, self.parameter
        if isinstance(found, DTensor) and isinstance(param, PlanTensor):
            param.grad = convert_like(found, param)  # of a term of the loop, as a penalty
        held = self.gradient
        if held is not None:
            held.add_(gradient)
        elif isinstance(param, PlanTensor):
            self.parameter.grad = PlanTensor.of(gradient.data, param._spec, param.order)
        else:  # a view counts what is written to its neighbours as well, and the copy would seem stale
            self.parameter.grad = gradient.data
        if self.kept is not None and not self.alias:
            self.published = self.gradient
            assert self.published is not None
            self.published_version = self.published._version
        for hook in (getattr(self.parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.parameter)

    def stale(self) -> bool:
        """Whether the working copy must be made again: the parameter was written, or its gradient was used."""
        if self._state() != self.seen:
            return True
        if self.published is None:
            return False
        return self.gradient is not self.published or self.published._version != self.published_version

    def fresh(self) -> None:
        """Note that the working copy is up to date."""
        self.seen, self.published = self._state(), None

    def _state(self) -> tuple[int, int]:
        """The parameter's address, and how often it was written."""
        return self.local.data_ptr(), self.local._version

    def follow(self) -> None:
        """If the working copy shares the parameter's memory, follow the parameter to new memory (`param.data = ...`)."""
        if self.alias and self.working.data_ptr() != self.local.data_ptr():
            self.kept, self._leaf = self.local.detach(), None


class GradientSink(Protocol):
    """What takes the gradients of a leaf."""

    def sink(self, gradient: torch.Tensor) -> None:
        """Take a gradient of a leaf."""


def redirect_gradient(leaf: torch.Tensor, source: GradientSink) -> None:
    """Give the gradient of a leaf to its source when autograd has completed it. The leaf keeps neither."""
    reference = weakref.ref(source)  # autograd would keep it, and with it the model

    def hand_over(leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None and (held := reference()):
            held.sink(gradient)

    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(hand_over)


class GatheredWeight:
    """A weight that is gathered for use: a leaf whose memory belongs to one bucket."""

    def __init__(self, weight: Weight, steps: tuple[AxisMove, ...]) -> None:
        self.weight, self.steps = weight, steps
        stages = bucket_stages([weight], [weight.form], [steps])
        self.shape = stages[-1][0].shape_after if stages else weight.form
        self.leaf: torch.Tensor
        self.anchor: torch.Tensor | None = None
        """A leaf without memory. It stands for a weight whose memory autograd keeps."""

    def used(self) -> torch.Tensor:
        """The weight as a unit's function takes it."""
        return self.leaf if self.anchor is None else _UseOfWeight.apply(self.anchor, self.leaf, self)

    def sink(self, gradient: torch.Tensor) -> None:
        """Takes autograd's gradient of the leaf. The unit replaces this function."""
        raise unplanned_gradient_error(self.weight.names[0])


class SeparatelyReducedUse:
    """A kept weight at one of several uses. Its gradient is reduced apart from those of the other uses, in every micro-batch (ZeRO-2)."""

    def __init__(self, weight: Weight) -> None:
        self.weight, self.anchor = weight, torch.empty(0, device=weight.local.device, requires_grad=True)

    @property
    def leaf(self) -> torch.Tensor:
        """The working copy."""
        return self.weight.working

    def used(self) -> torch.Tensor:
        """The weight as a unit's function takes it."""
        return _UseOfWeight.apply(self.anchor, self.leaf, self)  # type: ignore[no-any-return]

    def sink(self, gradient: torch.Tensor) -> None:
        """Takes autograd's gradient of this use. The unit replaces this function."""
        raise unplanned_gradient_error(self.weight.names[0])


class _UseOfWeight(torch.autograd.Function):
    """A weight of one use. If it was gathered, its memory is that of the tensors which autograd saves: it is free when the last of them
    is used. A leaf would keep it to the end of backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, whole: torch.Tensor, copy: GatheredWeight | SeparatelyReducedUse
    ) -> torch.Tensor:
        """The weight."""
        ctx.copy = copy
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        """The gradient goes where a leaf's would."""
        ctx.copy.sink(gradient)
        return None, None, None


def bucket_stages(
    weights: Sequence[Weight], shapes: Sequence[tuple[int, ...]], chains: Sequence[Sequence[AxisMove]]
) -> list[list[BucketMember]]:
    """The members of each stage, for tensors of these shapes that take these chains, which are alike."""
    shapes, stages = list(shapes), []
    for steps in zip(*align_chains(chains), strict=True):
        stages.append([BucketMember(s, w.segments, step) for s, w, step in zip(shapes, weights, steps, strict=True)])
        shapes = [m.shape_after for m in stages[-1]]
    return stages
