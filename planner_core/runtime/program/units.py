"""Units: the calls of repeated blocks, and the parts of the model before, between and after them, with the weights of each.

A unit's weights are gathered while the unit before it computes, and freed after use. Its gradients are reduced while the next unit
computes backward. So communication overlaps with the computation of a neighbour.

    forward    before u: wait for u's weights, issue the gathers of u + 1.    after u: free u's weights
    backward   before u: wait for u's weights, issue the gathers of u - 1.    after u: free u's weights, issue u's reductions

A unit is over in backward when the gradients of all its trained weights have arrived. One that also has gathered weights without a
gradient (a frozen layer beside its adapter) is over when the unit before it begins: the adapter's gradient may come before the frozen
weight has been used.

A weight that is gathered over k axes needs k collectives, one after the other. The last is issued one unit ahead, the one before it two
units ahead, and so on (`prefetch`).
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from planner_core.core import Placements, Step
from planner_core.runtime.program.buckets import message_key
from planner_core.runtime.program.collectives import AxisMove, Trace, coalesced_launch
from planner_core.runtime.program.gradients import (
    GradientBucket,
    ReductionQueue,
    join_small_buckets,
    mark_pending,
    unmark_pending,
)
from planner_core.runtime.program.operators.selective import checkpoint_contexts
from planner_core.runtime.program.torch_private import queue_after_backward
from planner_core.runtime.program.weights import (
    GatherBucket,
    GatheredWeight,
    RefreshBucket,
    SeparatelyReducedUse,
    Weight,
)

UnitFunction = Callable[..., Any]


@dataclass(frozen=True)
class UnitUse:
    """How a unit uses a parameter, by its full name, and the steps that are taken outside of its function.

    A gathered parameter has one such use for each operator; any other has one for all. Uses that differ in names alone are equal, so
    programs that name an argument in another way share units.
    """

    argument: str = field(compare=False)
    parameter: str = field(compare=False)
    gather: tuple[Step, ...]
    reduce: tuple[Step, ...]
    regather: bool
    """Whether the parameter is gathered again for backward."""
    saved_by_autograd: bool
    """Whether autograd keeps the gathered parameter, or a view of it, for backward."""
    trained: bool
    """Whether the planned loss sends a gradient to it through this use. A unit waits for these gradients alone before it reduces them."""


@dataclass(frozen=True)
class UnitBuffer:
    """A buffer that a unit reads or writes (running statistics), as a view of this rank's part: its argument, its name, and the
    cuts (axis, dim) that the placements ask for."""

    argument: str
    buffer: str
    placements: Placements
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnitSpec:
    """A unit as the engine needs it: its name, function and weights, how it is recomputed, whether it draws random numbers, and
    whether the planned loss sends a gradient through it."""

    name: str
    function: str
    uses: tuple[UnitUse, ...]
    buffers: tuple[UnitBuffer, ...]
    recompute: str
    seeded: bool
    returns: bool


@dataclass(frozen=True)
class UnitWeight:
    """A use bound to this rank: its weight, the moves that gather it, and the moves of its gradient in every micro-batch."""

    spec: UnitUse
    weight: Weight
    gather: tuple[AxisMove, ...]
    reduce: tuple[AxisMove, ...]

    @property
    def argument(self) -> str:
        """The argument of the unit's function that takes it."""
        return self.spec.argument

    @property
    def has_copy(self) -> bool:
        """Whether it has its own copy, which is freed afterwards: a gathered weight, or on one rank a cast to the compute dtype."""
        return bool(self.gather) or self.weight.cast_per_use


class BackwardPass:
    """The state of the running backward pass: the buckets in flight, and what remains to do when autograd has finished."""

    def __init__(self) -> None:
        self.queue = ReductionQueue()
        self.small_buckets: list[GradientBucket] = []
        """Buckets that are reduced together when autograd has finished."""
        self.sync = True
        self.unfinished: Set[RuntimeUnit] = frozenset()
        """Units of the rank's other stages whose last backward is still to come. They sum the gradients that they share with this one."""
        self.running = False
        self.units: list[RuntimeUnit] = []
        self.pending_weights: list[Weight] = []
        """The weights with unreduced gradients of micro-batches that ran inside `no_sync()`."""
        self.trace: Trace | None = None
        self.current: RuntimeUnit | None = None
        """The unit that runs backward."""

    def note(self, what: str, unit: str) -> None:
        """Record in the trace that a unit begins."""
        if self.trace is not None:
            self.trace.add(what, unit)

    def begin(self) -> None:
        """Start the backward pass, at the first hook that runs in it. Autograd calls `end` when it has finished."""
        if not self.running:
            self.running = True
            # Before the first gradient arrives: the stand-ins leave `.grad`, so that sums are added to what was there before `no_sync()`.
            unmark_pending(self.pending_weights)
            self.pending_weights = []
            # Not at the last gradient: some units may get none at all, and their prefetched weights must be freed as well.
            queue_after_backward(self.end)

    def enter(self, unit: RuntimeUnit) -> None:
        """Note that a gradient has reached a result of `unit`, and let the unit that ran before free its weights."""
        # Autograd runs what is ready in the reverse order of forward. So when a gradient comes to this unit, the later ones are done.
        if self.current is not None and self.current is not unit:
            self.current.leave()
        self.current = unit

    def end(self) -> None:
        """Reduce the remaining gradients, and wait for all collectives."""
        self.running = False
        self.current = None
        for unit in self.units:
            # Some weights of the unit got no gradient, so `arrived` never came to `expected`, and `_take_gradient` has not issued the rest.
            if unit.arrived:
                unit.issue_reductions()
            # Before `wait`: for a unit that is done it looks at no bucket, and here it must see all of them.
            unit.is_done = False
            unit.wait(for_backward=True)  # a unit whose output the loss does not use was prefetched in vain
            unit.free()
        if self.small_buckets:
            self.queue.push(join_small_buckets(self.small_buckets))
            self.small_buckets = []
        # Before `deferred` is made: a deferred bucket in flight still adds to `accumulated`.
        self.queue.drain()
        if self.sync:  # the unit that should finish a shared weight's gradient may not have run backward
            deferred = dict.fromkeys(
                w
                for u in self.units
                for w in u.deferred_weights
                if w.accumulated is not None and w.first_unit not in self.unfinished
            )
            self.queue.push([GradientBucket([w], [w.accumulated_shape], [()]).reduce_final([0]) for w in deferred])
        self.queue.drain()
        self.pending_weights = list(
            dict.fromkeys(use.weight for u in self.units for use in u.uses if use.weight.accumulated is not None)
        )
        mark_pending(self.pending_weights)


class RuntimeUnit:
    """One unit: its weights as autograd's leaves, the buckets that gather them, and the buckets that reduce their gradients."""

    def __init__(self, name: str, uses: Sequence[UnitWeight], backward: BackwardPass) -> None:
        self.name, self.uses, self.backward = name, list(uses), backward
        self.sources: dict[str, GatheredWeight | SeparatelyReducedUse | Weight] = {}
        """For each argument: the object that provides the weight and accepts its gradient."""
        self.copies = {u.argument: GatheredWeight(u.weight, u.gather) for u in uses if u.has_copy}
        groups: dict[tuple[bool, object, object], list[UnitWeight]] = {}
        for use in uses:
            if use.has_copy:
                groups.setdefault((use.spec.regather, message_key(use.gather), use.weight.dtype), []).append(use)
        self.gathers = [
            GatherBucket(
                [self.copies[u.argument] for u in group], saved_by_autograd=any(u.spec.saved_by_autograd for u in group)
            )
            for group in groups.values()
        ]
        self.regathers = [gather for (regather, *_), gather in zip(groups, self.gathers, strict=True) if regather]
        with_working_copy = dict.fromkeys(u.weight for u in uses if u.weight.refresh or not u.has_copy)
        self.refreshes: list[RefreshBucket] = group_refreshes(list(with_working_copy))
        for gather in self.gathers:
            gather.depend_on(self.refreshes)
        self.buckets: list[RefreshBucket | GatherBucket] = [*self.refreshes, *self.gathers]
        self.reductions: list[GradientBucket] = []
        self.deferred_weights: list[Weight] = []
        """The weights whose gradients another unit reduces."""
        self.expected = self.arrived = 0
        self.is_done = False
        """Whether all its gradients have arrived in this backward pass. Autograd may reach another result of the unit later, which then
        does not need the weights."""
        self.stays_until_next_unit = any(u.has_copy and u.spec.regather and not u.spec.trained for u in uses)
        """Whether its gathered weights stay until the next unit begins backward, since no gradient tells when some of them are used."""
        self._bucket_gradients()
        backward.units.append(self)

    def leaves(self) -> list[torch.Tensor]:
        """Return the weights as the unit's function takes them, in the order of its uses."""
        return [self.sources[u.argument].operand() for u in self.uses]

    def _bucket_gradients(self) -> None:
        """Make the buckets of gradients.

        Several units may use one weight that is not gathered. The first of them in forward reduces its gradient, since its backward is
        last.
        """
        groups: dict[
            tuple[bool, object, object, object], list[tuple[UnitWeight, GatheredWeight | SeparatelyReducedUse | Weight]]
        ] = {}
        seen: set[Weight] = set()
        for use in self.uses:
            source = self.sources[use.argument] = self._gradient_source(use)
            if use.spec.trained and use.weight.parameter.requires_grad and source.take_gradient is None:
                if use.weight.first_unit is None:
                    use.weight.first_unit = self
                # Without `final` nothing is left to defer: the moves of the use itself bring its gradient to the parameter.
                deferred = bool(use.weight.final) and (use.weight in seen or use.weight.first_unit is not self)
                seen.add(use.weight)
                key = (deferred, message_key(use.reduce), message_key(use.weight.final), use.weight.gradient_dtype)
                groups.setdefault(key, []).append((use, source))
                # A mark until the bucket exists: two uses of one unit may share a source, and its gradient arrives once.
                source.take_gradient = lambda gradient: None
        # Deferred buckets first: if the unit uses a weight twice, the bucket that finishes its gradient must see the sum of both uses.
        for (deferred, *_), members in sorted(groups.items(), key=lambda item: not item[0][0]):
            shapes = [tuple(source.leaf.shape) for _, source in members]
            reduction = GradientBucket(
                [u.weight for u, _ in members], shapes, [u.reduce for u, _ in members], deferred=deferred
            )
            self.deferred_weights += [u.weight for u, _ in members if deferred]
            self.reductions.append(reduction)
            for at, (_, source) in enumerate(members):
                source.take_gradient = functools.partial(self._take_gradient, reduction, at)
            self.expected += len(members)

    def _gradient_source(self, use: UnitWeight) -> GatheredWeight | SeparatelyReducedUse | Weight:
        if use.has_copy:
            return self.copies[use.argument]
        return SeparatelyReducedUse(use.weight) if use.reduce and use.weight.first_unit is not None else use.weight

    def _take_gradient(self, reduction: GradientBucket, at: int, gradient: torch.Tensor) -> None:
        self.backward.begin()
        reduction.add_gradient(at, gradient)
        self.arrived += 1
        if self.arrived == self.expected:
            self.is_done = True
            self.issue_reductions()
            if not self.stays_until_next_unit:
                self.free()

    def leave(self) -> None:
        """Free the weights that stay until the next unit begins backward."""
        if self.stays_until_next_unit:
            self.is_done = True
            self.free()

    def issue_reductions(self) -> None:
        """Issue the reductions of the gradients that have arrived."""
        self.arrived = 0
        sync = self.backward.sync and self not in self.backward.unfinished
        at_end = [r for r in self.reductions if r.arrived and r.is_small and sync]
        # Inside `no_sync()` a small bucket goes the ordinary way: `reduce` leaves its sum in `accumulated` and sends nothing.
        self.backward.small_buckets += at_end
        immediate = [r for r in self.reductions if r.arrived and r not in at_end]
        self.backward.queue.push([r.reduce(sync) for r in immediate], [sync and r.reduces_in_place for r in immediate])

    # --- weights --------------------------------------------------------------------------------------

    def issue(self, num_deferred: int = 0, for_backward: bool = False) -> None:
        """Issue the collectives of all weights, or `for_backward` of those that backward needs, but the last `num_deferred` of
        each."""
        for bucket in self._buckets_to_gather(for_backward):
            bucket.issue(num_deferred)

    def wait(self, for_backward: bool = False) -> None:
        """Wait for the collectives of all weights, or `for_backward` of those that backward needs."""
        for bucket in self._buckets_to_gather(for_backward):
            bucket.wait()

    def make_ready(self, for_backward: bool = False) -> None:
        """Wait as `wait` does, and make the copies that need no collective."""
        for bucket in self._buckets_to_gather(for_backward):
            bucket.make_ready()

    def _buckets_to_gather(self, for_backward: bool) -> Sequence[RefreshBucket | GatherBucket]:
        if not for_backward:
            return self.buckets
        return () if self.is_done else self.regathers

    def free(self) -> None:
        """Free the memory of gathered weights."""
        for gather in self.gathers:
            gather.free()


def group_refreshes(weights: Sequence[Weight]) -> list[RefreshBucket]:
    """Make the buckets of the weights whose working copy is not the parameter itself."""
    groups: dict[object, list[Weight]] = {}
    for weight in weights:
        if not weight.is_alias:
            groups.setdefault((message_key(weight.refresh), weight.dtype), []).append(weight)
    return [RefreshBucket(group) for group in groups.values()]


def prefetch(units: Sequence[RuntimeUnit], for_backward: bool = False) -> None:
    """Wait for the weights of the first unit, and issue the gathers of the units after it, in the order in which they run."""
    with coalesced_launch():
        # Example with two collectives each: units[1] issues its first here and its second below, when units[0] has all of its own.
        for num_deferred, unit in enumerate(units):
            unit.issue(num_deferred, for_backward)
        # Its last collective was issued while the unit before it ran. Only the first unit of a pass waits for all of its own.
        units[0].make_ready(for_backward)
        for num_deferred, unit in enumerate(units[1:]):
            unit.issue(num_deferred, for_backward)


@dataclass(frozen=True, eq=False)
class UnitCall:
    """A unit at its place in the forward pass. Calling it calls the generated function with the unit's weights.

    `weights` makes one argument of the weights and of the `buffers`, which are read at each call; None: the function takes neither.
    `seed` returns the seed of a unit in this pass; None: the unit draws no random numbers.
    """

    unit: RuntimeUnit
    function: UnitFunction
    weights: Callable[..., Any] | None
    recompute: str
    seed: Callable[[str], int] | None
    buffers: Sequence[Callable[[], torch.Tensor]]
    forward_units: Sequence[RuntimeUnit]
    """The unit, and the units after it whose weights are gathered while it runs."""
    backward_units: Sequence[RuntimeUnit]
    """The same in backward."""

    def __call__(self, *args: Any) -> Any:
        """Run forward, and register the hooks for backward."""
        unit = self.unit
        prefetch(self.forward_units)
        unit.backward.note("run", unit.name)
        # The seed is an argument, so a recomputation in backward, when the counter of forward passes has moved on, draws the same masks.
        if self.seed is not None:
            args = (self.seed(unit.name), *args)
        if self.weights is not None:
            args = (self.weights(*unit.leaves(), *(buffer() for buffer in self.buffers)), *args)
        grad_enabled = torch.is_grad_enabled()
        if grad_enabled and self.recompute != "none":
            out = checkpoint(self.function, *args, use_reentrant=False, context_fn=checkpoint_contexts)
        else:
            out = self.function(*args)
        unit.free()
        if grad_enabled:
            self._watch_results(out)
        return out

    def _watch_results(self, out: Any) -> None:
        """Register a hook that gathers this unit's weights before its backward begins."""
        for tensor in out if isinstance(out, tuple) else (out,):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        self.unit.backward.begin()
        self.unit.backward.enter(self.unit)
        prefetch(self.backward_units, for_backward=True)
        self.unit.backward.note("return", self.unit.name)
