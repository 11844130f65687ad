"""Units: the calls of repeated blocks, and the parts of the model before, between and after them, with the weights of each.

The gathers of a unit's weights are issued while the unit before runs, and the gathered weights are freed after use. A unit's
gradients are reduced when its backward has made the last of them. So communication runs beside the computation of a neighbour.

    forward    enter(u): wait for u's weights, issue those of u + 1.   leave(u): free them
    backward   returning(u): wait for u's weights, issue those of u - 1.   done(u): free them, issue u's gradients

Of weights that are gathered over several axes, the last gather is issued so, and those before it for the units beyond (`prefetch`).
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

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
from planner_core.runtime.program.weights import (
    GatherBucket,
    GatheredWeight,
    RefreshBucket,
    SeparatelyReducedUse,
    Weight,
)

UnitFunction = Callable[..., Any]


@dataclass(frozen=True)
class UnitWeight:
    """How a unit uses a weight: its name, the steps that gather it, and the steps of its gradient in every micro-batch."""

    argument: str
    weight: Weight
    gather: tuple[AxisMove, ...] = ()
    reduce: tuple[AxisMove, ...] = ()
    again: bool = True
    """Whether the weight is gathered again for backward."""
    lasting: bool = False
    """Whether autograd keeps the gathered weight, or a view of it, for backward."""
    trained: bool = True
    """Whether the planned loss sends a gradient to it. A unit does not wait for others."""
    copied: bool = False
    """Whether the use has a copy of its own, which is freed after it: gathered, or on one rank cast to the dtype that computes."""


class BackwardPass:
    """The state of the backward pass that runs: the buckets on their way, and what is to do when autograd has finished."""

    def __init__(self) -> None:
        self.pipeline = ReductionQueue()
        self.small: list[GradientBucket] = []
        """Buckets that leave when autograd has finished."""
        self.sync = True
        self.running = False
        self.units: list[RuntimeUnit] = []
        self.waiting: list[Weight] = []
        """Those with terms of micro-batches inside `no_sync()`, between two backward passes."""
        self.trace: Trace | None = None

    def note(self, what: str, unit: str) -> None:
        """Note where a unit begins."""
        if self.trace is not None:
            self.trace.add(what, unit)

    def begin(self) -> None:
        """Any hook of a backward pass calls this. The first call arranges that `end` is called when autograd has finished."""
        if not self.running:
            self.running = True
            unmark_pending(self.waiting)
            self.waiting = []
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """Autograd has finished: send what is left, and wait for everything."""
        self.running = False
        for unit in self.units:
            if unit.arrived:
                unit.send()
            unit.done = False
            unit.wait(again=True)  # what came for a unit that did not run backward
            unit.free()
        if self.small:
            self.pipeline.push(join_small_buckets(self.small))
            self.small = []
        self.pipeline.drain()
        if self.sync:  # gradients for a unit that did not run backward
            left = dict.fromkeys(w for u in self.units for w in u.held if w.terms is not None)
            self.pipeline.push([GradientBucket([w], [w.shape_of_terms], [()]).finish([0]) for w in left])
        self.pipeline.drain()
        self.waiting = list(
            dict.fromkeys(use.weight for u in self.units for use in u.uses if use.weight.terms is not None)
        )
        mark_pending(self.waiting)


class RuntimeUnit:
    """One unit: its weights as leaves of autograd, and their buckets."""

    def __init__(self, name: str, uses: Sequence[UnitWeight], backward: BackwardPass) -> None:
        self.name, self.uses, self.backward = name, list(uses), backward
        self.sources: dict[str, GatheredWeight | SeparatelyReducedUse | Weight] = {}
        """What each argument takes the weight from, and gives its gradient to."""
        self.copies = {u.argument: GatheredWeight(u.weight, u.gather) for u in uses if u.copied}
        groups: dict[tuple[bool, object, object], list[UnitWeight]] = {}
        for use in uses:
            if use.copied:
                groups.setdefault((use.again, message_key(use.gather), use.weight.dtype), []).append(use)
        self.gathers = [
            GatherBucket([self.copies[u.argument] for u in group], lasting=any(u.lasting for u in group))
            for group in groups.values()
        ]
        self.again = [gather for (again, *_), gather in zip(groups, self.gathers, strict=True) if again]
        kept = dict.fromkeys(u.weight for u in uses if u.weight.refresh or not u.copied)
        self.refreshes: list[RefreshBucket] = group_refreshes(list(kept))
        for gather in self.gathers:
            gather.reads(self.refreshes)
        self.buckets: list[RefreshBucket | GatherBucket] = [*self.refreshes, *self.gathers]
        self.reductions: list[GradientBucket] = []
        self.held: list[Weight] = []
        """Weights whose gradients another unit finishes."""
        self.expected = self.arrived = 0
        self.done = False
        """Whether all its gradients have arrived in the backward pass that runs. A result of the unit whose gradient comes later does
        not need the weights."""
        self._reductions()
        backward.units.append(self)

    def leaves(self) -> list[torch.Tensor]:
        """The weights as the unit's function takes them, in the order of its uses."""
        return [self.sources[u.argument].used() for u in self.uses]

    def _reductions(self) -> None:
        """Make the buckets of gradients. A kept weight that several units use belongs to the first of them: its backward is last."""
        groups: dict[
            tuple[bool, object, object, object], list[tuple[UnitWeight, GatheredWeight | SeparatelyReducedUse | Weight]]
        ] = {}
        seen: set[Weight] = set()
        for use in self.uses:
            source = self.sources[use.argument] = self._source(use)
            if use.trained and use.weight.parameter.requires_grad and "sink" not in vars(source):
                if use.weight.home is None:
                    use.weight.home = self
                holds = bool(use.weight.final) and (use.weight in seen or use.weight.home is not self)
                seen.add(use.weight)
                key = (holds, message_key(use.reduce), message_key(use.weight.final), use.weight.gradient_dtype)
                groups.setdefault(key, []).append((use, source))
                source.sink = lambda gradient: None  # type: ignore[method-assign]
        for (holds, *_), members in sorted(groups.items(), key=lambda item: not item[0][0]):  # what is held comes first
            shapes = [tuple(source.leaf.shape) for _, source in members]
            reduction = GradientBucket(
                [u.weight for u, _ in members], shapes, [u.reduce for u, _ in members], holds=holds
            )
            self.held += [u.weight for u, _ in members if holds]
            self.reductions.append(reduction)
            for at, (_, source) in enumerate(members):
                source.sink = functools.partial(self._take, reduction, at)  # type: ignore[method-assign]
            self.expected += len(members)

    def _source(self, use: UnitWeight) -> GatheredWeight | SeparatelyReducedUse | Weight:
        if use.copied:
            return self.copies[use.argument]
        return SeparatelyReducedUse(use.weight) if use.reduce and use.weight.home is not None else use.weight

    def _take(self, reduction: GradientBucket, at: int, gradient: torch.Tensor) -> None:
        self.backward.begin()
        reduction.put(at, gradient)
        self.arrived += 1
        if self.arrived == self.expected:
            self.done = True
            self.send()
            self.free()

    def send(self) -> None:
        """Issue the reductions of what has arrived."""
        self.arrived = 0
        sync = self.backward.sync
        late = [r for r in self.reductions if r.arrived and r.small and sync]
        self.backward.small += late
        now = [r for r in self.reductions if r.arrived and r not in late]
        self.backward.pipeline.push([r.flow(sync) for r in now], [sync and r.in_place for r in now])

    # --- weights --------------------------------------------------------------------------------------

    def issue(self, left: int = 0, again: bool = False) -> None:
        """Issue the making of working copies and the gathers of weights, all but the last `left` collectives of each. `again`: of the
        weights that backward needs."""
        for bucket in self._needed(again):
            bucket.issue(left)

    def wait(self, again: bool = False) -> None:
        """Wait until all weights, or those that backward needs, are up to date and whole."""
        for bucket in self._needed(again):
            bucket.wait()

    def ready(self, again: bool = False) -> None:
        """The same, and cast those that nothing is gathered for."""
        for bucket in self._needed(again):
            bucket.ready()

    def _needed(self, again: bool) -> Sequence[RefreshBucket | GatherBucket]:
        if not again:
            return self.buckets
        return () if self.done else self.again

    def free(self) -> None:
        """Free the memory of gathered weights."""
        for gather in self.gathers:
            gather.free()


def group_refreshes(weights: Sequence[Weight]) -> list[RefreshBucket]:
    """The buckets of those weights whose working copy is not the parameter itself."""
    groups: dict[object, list[Weight]] = {}
    for weight in weights:
        if not weight.alias:
            groups.setdefault((message_key(weight.refresh), weight.dtype), []).append(weight)
    return [RefreshBucket(group) for group in groups.values()]


def prefetch(units: Sequence[RuntimeUnit], again: bool = False) -> None:
    """Before the first of these units runs: wait for its weights, and issue the gathers for those that run after it. `again`: before
    it runs backward."""
    with coalesced_launch():
        for left, unit in enumerate(units):
            unit.issue(left, again)
        units[0].ready(again)
        for left, unit in enumerate(units[1:]):
            unit.issue(left, again)


class UnitCall:
    """A unit at its place in the forward pass. To call it calls the generated function with the unit's weights."""

    def __init__(
        self,
        unit: RuntimeUnit,
        function: UnitFunction,
        weights: Callable[..., Any] | None,
        recompute: str = "none",
        seed: Callable[[str], int] | None = None,
    ) -> None:
        self.unit, self.function, self.recompute, self.seed = unit, function, recompute, seed
        self.weights = weights
        self.onward: Sequence[RuntimeUnit] = [unit]
        """The unit and those after it in forward whose weights are on their way while it runs."""
        self.back: Sequence[RuntimeUnit] = [unit]
        """The same in backward."""
        self.buffers: list[tuple[str, Sequence[tuple[int, int]]]] = []
        self.buffer: Callable[[str, Sequence[tuple[int, int]]], torch.Tensor]

    def __call__(self, *args: Any) -> Any:
        """Run forward, and set the hooks for backward."""
        unit = self.unit
        prefetch(self.onward)
        unit.backward.note("run", unit.name)
        if self.seed is not None:
            args = (self.seed(unit.name), *args)
        if self.weights is not None:
            args = (self.weights(*unit.leaves(), *(self.buffer(*b) for b in self.buffers)), *args)
        learning = torch.is_grad_enabled()
        if learning and self.recompute != "none":
            out = checkpoint(
                self.function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=checkpoint_contexts
            )
        else:
            out = self.function(*args)
        unit.free()
        if learning:
            self._watch(out)
        return out

    def _watch(self, out: Any) -> None:
        """Set a hook: before this unit's backward begins, its weights must be gathered again."""
        for tensor in out if isinstance(out, tuple) else (out,):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(self._returning)

    def _returning(self, gradient: torch.Tensor) -> None:
        self.unit.backward.begin()
        prefetch(self.back, again=True)
        self.unit.backward.note("return", self.unit.name)
