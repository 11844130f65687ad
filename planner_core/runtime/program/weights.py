"""Weights of one rank: what is stored, the working copy in compute dtype, and whole copies that come and go.

    stored    what the optimizer, checkpoints and the user see
    working   the copy in compute dtype that is kept between uses; made from `stored` when that has changed
    gathered  whole on some axes for one use; its memory is given back after the use, and taken again for backward

Autograd sees working or gathered tensors only, as leaves, whose gradients go to `gradients.Reduction`.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner_core.runtime.program.buckets import Flow, Member, alike, start, unpack
from planner_core.runtime.program.collectives import Segments, Step


@dataclass(eq=False)
class Weight:
    """One parameter. `names` are all its names in the model; `local` this rank's part of it, sharing its memory.

    `refresh` leads from `local` to the working copy, `final` from accumulated gradients to the layout of `local`.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    refresh: tuple[Step, ...] = ()
    final: tuple[Step, ...] = ()
    segments: Segments = field(default_factory=dict)
    working: torch.Tensor = field(init=False)
    leaf: torch.Tensor = field(init=False)
    home: object = None
    """The unit that finishes its gradient: the first that uses it."""
    terms: torch.Tensor | None = None
    """Gradients of micro-batches that are not summed over ranks yet."""
    published: torch.Tensor | None = None
    """The gradient that the parameter was given last, until the optimizer has used it."""

    def __post_init__(self) -> None:
        local = self.local
        self.alias = not self.refresh and local.dtype == self.dtype
        self.seen: object = None
        self.trained = self.parameter.requires_grad
        shape = local.shape
        for step in self.refresh:
            shape = torch.Size(Member(tuple(shape), self.segments, step).shape_after) if step.axis.size > 1 else shape
        self.working = local.detach() if self.alias else torch.empty(shape, dtype=self.dtype, device=local.device)
        self._lead()

    def _lead(self) -> None:
        self.leaf = self.working.detach().requires_grad_(self.parameter.requires_grad)
        caught(self.leaf, lambda gradient: self.sink(gradient))

    def sink(self, gradient: torch.Tensor) -> None:
        """Where autograd's gradient of the leaf goes; the unit that the weight belongs to sets it."""
        raise RuntimeError(f"no unit takes the gradient of {self.names[0]}")

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the parameter."""
        held = self.parameter
        return held._local_tensor if isinstance(held, DTensor) else held

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's part of the parameter's gradient."""
        found = self.parameter.grad
        return found._local_tensor if isinstance(found, DTensor) else found

    @property
    def shape_of_terms(self) -> tuple[int, ...]:
        """Shape of what waits to be summed."""
        assert self.terms is not None
        return tuple(self.terms.shape)

    def publish(self, gradient: torch.Tensor) -> None:
        """Add to the parameter's gradient what has come for it."""
        held = self.gradient
        if held is not None:
            held.add_(gradient)
        elif isinstance(self.parameter, DTensor):
            self.parameter.grad = DTensor(gradient, self.parameter._spec, requires_grad=False)
        else:
            self.parameter.grad = gradient
        if not self.alias:
            self.published = self.gradient
            assert self.published is not None
            self.published_version = self.published._version
        for hook in (getattr(self.parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.parameter)

    def stale(self) -> bool:
        """Whether the working copy must be made anew: the parameter was written, or its gradient has been used."""
        local = self.local
        if (local.data_ptr(), local._version) != self.seen:
            return True
        if self.published is None:
            return False
        return self.gradient is not self.published or self.published._version != self.published_version

    def fresh(self) -> None:
        """Note that the working copy holds what the parameter holds."""
        self.seen, self.published = (self.local.data_ptr(), self.local._version), None

    def follow(self) -> None:
        """Let a working copy that shares the parameter's memory move with it (`param.data = ...`)."""
        if self.alias and self.working.data_ptr() != self.local.data_ptr():
            self.working = self.local.detach()
            self._lead()


def caught(leaf: torch.Tensor, sink: Callable[[torch.Tensor], None]) -> None:
    """Hand the gradient of a leaf to `sink` when autograd has all of it, and keep none at the leaf."""

    def hand_over(leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        sink(gradient)

    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(hand_over)


class Gathered:
    """A weight used whole on axes on which it is kept in shards: a leaf whose memory one bucket owns."""

    def __init__(self, weight: Weight, steps: tuple[Step, ...]) -> None:
        self.weight, self.steps = weight, steps
        self.members: list[Member] = []
        shape = tuple(weight.working.shape)
        for step in steps:
            self.members.append(Member(shape, weight.segments, step))
            if step.axis.size > 1:
                shape = tuple(step_shape(self.members[-1]))
        self.shape = shape
        self.leaf: torch.Tensor

    def sink(self, gradient: torch.Tensor) -> None:
        """Where autograd's gradient of the leaf goes; the unit sets it."""
        raise RuntimeError(f"no unit takes the gradient of {self.weight.names[0]}")


def _given(copy: Gathered, gradient: torch.Tensor) -> None:
    copy.sink(gradient)


def step_shape(member: Member) -> tuple[int, ...]:
    """Shape after any step."""
    step, shape = member.step, list(member.shape)
    if step.kind in ("all_gather", "all_to_all", "pad") and step.src is not None:
        shape[step.src] *= step.axis.size
    if step.kind in ("reduce_scatter", "all_to_all", "slice") and step.dst is not None:
        shape[step.dst] //= step.axis.size
    return tuple(shape)


class Gather:
    """The bucket that brings some weights of a unit: issued early, waited for at use, its memory freed after."""

    def __init__(self, copies: Sequence[Gathered], label: str) -> None:
        self.copies, self.label = list(copies), label
        first = copies[0].weight.working
        total = sum(torch.Size(c.shape).numel() for c in copies)
        self.flat = torch.empty(total, dtype=first.dtype, device=first.device)
        for copy, view in zip(copies, unpack(self.flat, [c.shape for c in copies]), strict=True):
            copy.leaf = view.data.requires_grad_(copy.weight.parameter.requires_grad)
            caught(copy.leaf, functools.partial(_given, copy))
        self.views = unpack(self.flat, [c.shape for c in copies])
        self.num_bytes = self.flat.nbytes
        self.here = False
        self.pending: Flow | None = None
        self.free()

    def issue(self) -> None:
        """Start bringing the weights, unless they are here or on their way."""
        if self.here or self.pending is not None:
            return
        tensors = [c.weight.working.detach() for c in self.copies]
        stages = [[c.members[i] for c in self.copies] for i in range(len(self.copies[0].steps))]
        with torch.no_grad():
            for members in stages[:-1]:  # several axes: the next waits for the one before
                tensors = start(members, tensors)()
            self.pending = start(stages[-1], tensors, into=self.views)

    def wait(self) -> None:
        """The weights are whole from here on; their memory is taken now."""
        self.issue()
        if self.pending is not None:
            self.flat.untyped_storage().resize_(self.num_bytes)
            with torch.no_grad():
                self.pending()
            self.pending, self.here = None, True

    def free(self) -> None:
        """Give the memory back."""
        self.flat.untyped_storage().resize_(0)
        self.here = False


class Refresh:
    """The working copies of a unit, made anew from what is stored: a cast, and a gathering where the copy is whole (ZeRO-1)."""

    def __init__(self, weights: Sequence[Weight], label: str) -> None:
        self.weights, self.label = list(weights), label
        self.pending: Flow | None = None

    def issue(self) -> None:
        """Start making the copies, if any is stale."""
        stale = [w for w in self.weights if w.stale()]
        if self.pending is not None or not stale:
            return
        with torch.no_grad():
            tensors = [w.local.detach() for w in stale]
            stages = len(stale[0].refresh)
            if not stages:
                torch._foreach_copy_([w.working for w in stale], tensors)
            else:
                tensors = [t.to(w.dtype) for t, w in zip(tensors, stale, strict=True)]
                self.pending = self._gather(stale, tensors, stages)
        for weight in stale:
            weight.fresh()

    @staticmethod
    def _gather(weights: Sequence[Weight], tensors: Sequence[torch.Tensor], stages: int) -> Flow:
        """Axis by axis; the last one is still under way."""
        forms = [tuple(t.shape) for t in tensors]
        for stage in range(stages):
            members = [Member(f, w.segments, w.refresh[stage]) for f, w in zip(forms, weights, strict=True)]
            forms = [step_shape(m) for m in members]
            if stage < stages - 1:
                tensors = start(members, tensors)()
        return start(members, tensors, into=[w.working for w in weights])

    def wait(self) -> None:
        """The copies are right from here on."""
        self.issue()
        if self.pending is not None:
            with torch.no_grad():
                self.pending()
            self.pending = None


def refreshes(weights: Sequence[Weight], label: str) -> list[Refresh]:
    """Buckets of the weights whose working copy is not the parameter itself."""
    groups: dict[object, list[Weight]] = {}
    for weight in weights:
        if not weight.alias:
            groups.setdefault((alike(weight.refresh), weight.dtype), []).append(weight)
    return [Refresh(group, label) for group in groups.values()]
