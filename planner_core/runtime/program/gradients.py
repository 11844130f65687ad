"""Gradients of one rank: they are taken from autograd as they come, and reduced in buckets while the backward goes on.

A bucket takes two chains of steps. The chain `micro` is taken in every micro-batch (ZeRO-2 and ZeRO-3: reduce_scatter). The
chain `final` is taken once a step (DDP: all_reduce; ZeRO-1: reduce_scatter). If the caller does not say which micro-batch is the
last, `final` is taken in every backward. Small buckets of `final` travel together when backward is over.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.cost import SMALL_BYTES
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.buckets import (
    BucketMember,
    CollectiveSteps,
    advance_steps,
    can_bucket,
    communicates,
    copy_to_slots,
    message_key,
    rank_slots,
    start_move,
    unpack,
)
from planner_core.runtime.program.collectives import AxisMove, apply_moves, coalesced_launch
from planner_core.runtime.program.weights import Weight, bucket_stages, find_weight


class GradientBucket:
    """The gradients of some weights that take the same steps. `shapes` are those of autograd's gradients.

    Steps without a message that come first, such as the slice of a gradient that is equal on all ranks, are taken at once.

    `holds`: the gradients are finished with another unit, the first that uses the weight, since its backward comes last.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        shapes: Sequence[tuple[int, ...]],
        micro: Sequence[tuple[AxisMove, ...]],
        *,
        holds: bool = False,
    ) -> None:
        self.weights, self.holds = list(weights), holds
        self.dtype, self.device = weights[0].gradient_dtype, weights[0].local.device
        local = [next((n for n, step in enumerate(chain) if communicates(step)), len(chain)) for chain in micro]
        self.at_once = [chain[:n] for chain, n in zip(micro, local, strict=True)]
        self.shapes = _reduced_shapes(bucket_stages(weights, shapes, self.at_once), shapes)
        self.num_bytes = sum(map(math.prod, self.shapes)) * self.dtype.itemsize
        self.micro = bucket_stages(weights, self.shapes, [chain[n:] for chain, n in zip(micro, local, strict=True)])
        landed = _reduced_shapes(self.micro, self.shapes)
        self.final = bucket_stages(weights, landed, [() if holds else w.final for w in weights])
        self.packs = _begins_with_reduce_scatter(self.micro)
        self.ranked = not self.micro and not self.small and _begins_with_reduce_scatter(self.final)
        """Whether the terms of `final` are packed rank by rank as they come, so that they are not copied to be sent."""
        self.direct = not self.micro and not self.final and not any(self.at_once)
        """Whether nothing is sent or cut: a gradient goes to its parameter as it comes."""
        self.by_rank = self.micro[0] if self.packs else self.final[0] if self.ranked else []
        self.flat: torch.Tensor | None = None  # of the first stage, packed as its collective takes it
        self.places: list[torch.Tensor] = []
        self.reset()

    def reset(self, *, keep: bool = False) -> None:
        """Get ready for the next backward pass; `keep` what is packed."""
        self.arrived: set[int] = set()
        self.given: dict[int, torch.Tensor] = {}
        if not keep:
            self.flat, self.places = None, []

    # --- arriving -------------------------------------------------------------------------------------

    def put(self, at: int, gradient: torch.Tensor) -> None:
        """Take one gradient from autograd."""
        if self.direct:
            self.weights[at].publish(gradient if gradient.dtype == self.dtype else gradient.to(self.dtype))
            return
        self.arrived.add(at)
        if self.at_once[at]:
            gradient = apply_moves(gradient, self.at_once[at], self.weights[at].segments)
        if not self.micro:
            self._add(at, gradient)
        elif self.packs:  # rank by rank, as the reduce_scatter sends it
            self._allocate()
            copy_to_slots(self.micro[0][at], self.places[at], gradient)
        else:
            self.given[at] = gradient.to(self.dtype)

    def _allocate(self) -> None:
        if self.flat is None:
            length = sum(m.sent for m in self.by_rank) if self.by_rank else sum(map(math.prod, self.shapes))
            self.flat = torch.empty(length, dtype=self.dtype, device=self.device)
            self.places = rank_slots(self.by_rank, self.flat) if self.by_rank else unpack(self.flat, self.shapes)

    def _add(self, at: int, gradient: torch.Tensor) -> None:
        """Add the gradient to the terms of earlier micro-batches, or write it into a new flat tensor."""
        weight = self.weights[at]
        if self.ranked and weight.terms is not None and weight.packing is None:  # of another unit
            gradient, weight.terms = weight.terms.add_(gradient), None
        if weight.packing is not None:
            assert weight.terms is not None
            copy_to_slots(weight.packing, weight.terms, gradient, add=True)
        elif weight.terms is not None:
            weight.terms.add_(gradient)
        elif not self.final:
            weight.terms = gradient.to(self.dtype)  # cut, and nothing to pack
        else:
            self._allocate()
            weight.terms = self.places[at]
            if self.ranked:
                weight.packing = self.by_rank[at]
                copy_to_slots(weight.packing, weight.terms, gradient)
            else:
                weight.terms.copy_(gradient)

    # --- reducing -------------------------------------------------------------------------------------

    def flow(self, sync: bool) -> CollectiveSteps:
        """Take the bucket through its collectives. The result is added to the parameters' gradients."""
        here = sorted(self.arrived)
        if self.micro:
            yield from self._scatter(here)
        if self.holds or (self.final and not sync):
            self.reset(keep=self.ranked)
            return
        yield from self.finish(here)
        self.reset()

    @property
    def small(self) -> bool:
        """Whether it travels with those of other units when backward is over."""
        return not self.micro and bool(self.final) and self.num_bytes <= SMALL_BYTES

    @property
    def in_place(self) -> bool:
        """Whether what has arrived is summed where it lies, so that no memory becomes free when the sum is there."""
        kinds = [kind for _, kind in message_key(self.weights[0].final)]
        if self.micro or not self.final or kinds != ["all_reduce"]:
            return False
        return self._packed([self._terms(i) for i in sorted(self.arrived)]) is not None

    def finish(self, here: Sequence[int]) -> CollectiveSteps:
        """Take the chain `final`, and give the gradients to the parameters."""
        if self.ranked:
            return _reduce_and_publish(self.weights, self.final, self._all_by_rank(), self.flat)
        here = [i for i in here if self.weights[i].terms is not None]  # else another use's bucket has taken them along
        tensors = [self._terms(i) for i in here]
        stages = [[stage[i] for i in here] for stage in self.final]
        in_place = bool(stages) and stages[0][0].step.kind == "all_reduce"
        return _reduce_and_publish(
            [self.weights[i] for i in here], stages, tensors, self._packed(tensors) if in_place else None
        )

    def _all_by_rank(self) -> list[torch.Tensor]:
        """The terms of all weights, packed rank by rank. Those that never came are zero."""
        self._allocate()
        for place, weight, member in zip(self.places, self.weights, self.by_rank, strict=True):
            if weight.terms is None:
                place.zero_()
            elif weight.packing is None:
                copy_to_slots(member, place, weight.terms)
            elif weight.terms is not place:
                place.copy_(weight.terms)
        return self.places

    def _terms(self, at: int) -> torch.Tensor:
        terms = self.weights[at].terms
        assert terms is not None
        return terms

    def _scatter(self, here: list[int]) -> CollectiveSteps:
        """Take the chain `micro`, and add the result to the terms of the micro-batches before."""
        whole = len(here) == len(self.weights)
        if self.packs and not whole:  # a gradient that did not come counts as zero
            for i in set(range(len(self.weights))) - self.arrived:
                self.places[i].zero_()
        members = range(len(self.weights)) if self.packs else here
        stages = [[stage[i] for i in members] for stage in self.micro]
        flat = self.flat if self.packs else None
        tensors = yield from _run_stages(stages, [self.given.get(i, self.flat) for i in members], flat)  # type: ignore[misc]
        weights = [self.weights[i] for i in members]
        for i, weight, tensor in zip(
            members, weights, _copy_if_mixed(tensors, [w.terms is None for w in weights]), strict=True
        ):
            if i in self.arrived:
                weight.terms = tensor if weight.terms is None else weight.terms.add_(tensor)

    def _packed(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """The flat tensor of which these are the views, if together they are all of it."""
        if self.flat is None or self.packs or len(tensors) != len(self.places):
            return None
        same = all(t is p for t, p in zip(tensors, self.places, strict=True))
        return self.flat if same else None


def _begins_with_reduce_scatter(stages: Sequence[Sequence[BucketMember]]) -> bool:
    """Whether the first step is a reduce_scatter of all members in one message."""
    return bool(stages) and stages[0][0].step.kind == "reduce_scatter" and can_bucket(stages[0][0].step)


def _reduced_shapes(
    stages: Sequence[Sequence[BucketMember]], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The shapes after all stages."""
    return [m.shape_after for m in stages[-1]] if stages else list(shapes)


def _run_stages(
    stages: Sequence[Sequence[BucketMember]], tensors: Sequence[torch.Tensor], flat: torch.Tensor | None
) -> Generator[None, None, Sequence[torch.Tensor]]:
    """Take the tensors through the stages; it stops while a collective is on its way. `flat`: the tensors as the first stage sends
    them."""
    for stage in stages:
        finish = start_move(stage, tensors, flat=flat)
        flat = None
        if communicates(stage[0].step):
            yield
        tensors = finish()
    return tensors


def _reduce_and_publish(
    weights: Sequence[Weight],
    stages: Sequence[Sequence[BucketMember]],
    tensors: list[torch.Tensor],
    flat: torch.Tensor | None,
) -> CollectiveSteps:
    tensors = yield from _run_stages(stages, tensors, flat)  # type: ignore[assignment]
    for weight, tensor in zip(weights, _copy_if_mixed(tensors, [w.gradient is None for w in weights]), strict=True):
        if weight.terms is not None:
            weight.terms = weight.packing = None
            weight.publish(tensor)


def _copy_if_mixed(tensors: Sequence[torch.Tensor], stay: Sequence[bool]) -> list[torch.Tensor]:
    """The results of one message, which are views of one tensor. If some are added to others, those that `stay` are copied, since each
    view would keep the memory of all."""
    mixed = any(stay) and not all(stay)
    return [x.clone() if mixed and stays else x for x, stays in zip(tensors, stay, strict=True)]


def join_small_buckets(reductions: Sequence[GradientBucket]) -> list[CollectiveSteps]:
    """The ways of small buckets: those that take the same steps are one."""
    groups: dict[object, list[GradientBucket]] = {}
    for r in reductions:
        groups.setdefault((r.dtype, message_key(r.weights[0].final)), []).append(r)
    return [_reduce_jointly(group) for group in groups.values()]


def _reduce_jointly(group: Sequence[GradientBucket]) -> CollectiveSteps:
    here = [(r, i) for r in group for i in sorted(r.arrived)]
    weights, tensors = [r.weights[i] for r, i in here], [r._terms(i) for r, i in here]
    stages = bucket_stages(weights, [tuple(t.shape) for t in tensors], [w.final for w in weights])
    yield from _reduce_and_publish(weights, stages, tensors, None)
    for r in group:
        r.reset()


class ReductionQueue:
    """The buckets that are on their way. A unit's buckets take their next step when the next unit's are ready, so few are in flight. Those
    that stay in place are waited for at the end."""

    def __init__(self) -> None:
        self.flows: list[CollectiveSteps] = []
        self.staying: list[CollectiveSteps] = []

    def push(self, flows: Sequence[CollectiveSteps], stays: Sequence[bool] = ()) -> None:
        """Let every bucket on its way take a step, then issue the new ones. Each `stays` in place or not; by default none do."""
        with coalesced_launch():
            self.advance()
            for flow, stay in zip(flows, stays or [False] * len(flows), strict=True):
                if advance_steps(flow):
                    (self.staying if stay else self.flows).append(flow)

    def advance(self) -> None:
        """Let every bucket on its way take one step."""
        with coalesced_launch():
            self.flows = [flow for flow in self.flows if advance_steps(flow)]

    def drain(self) -> None:
        """Take steps until no bucket is on its way."""
        while self.flows:
            self.advance()
        while self.staying:
            self.staying = [flow for flow in self.staying if advance_steps(flow)]


class PendingGradient(torch.Tensor):
    """Stands in a parameter's `.grad` between micro-batches inside `no_sync()`, whose sum is not there yet. So a loop that sets the
    gradient to None or zero, or reads it, is understood. `held` is what `.grad` was without it."""

    weight: Weight
    held: torch.Tensor | None

    @staticmethod
    def of(weight: Weight) -> PendingGradient:
        """The one of this weight."""
        like = weight.parameter
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(
            PendingGradient, like.shape, dtype=like.dtype, device=like.device
        )
        made.weight = weight
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        mine = args[0] if args and isinstance(args[0], PendingGradient) else None
        if func is torch.ops.aten.detach.default:
            return mine
        if func is torch.ops.aten.zero_.default and mine is not None:
            discard_pending([mine.weight.parameter])
            return mine
        if func is torch.ops.aten._foreach_zero_.default:
            for x in args[0]:
                x.zero_()
            return None
        if func is torch.ops.aten.add_.Tensor and mine is not None:  # autograd, of a loss of the weights alone
            mine.held = args[1].clone() if mine.held is None else mine.held.add_(args[1])
            return mine
        found = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, PendingGradient))
        raise PlanMismatch(
            f"the gradient of {found.weight.names[0]} was used, but its backward passes ran inside no_sync(), so it is not summed over "
            "ranks yet; let the last micro-batch run outside of it first"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Waiting({self.weight.names[0]})"


def mark_pending(weights: Iterable[Weight]) -> None:
    """After a backward pass inside `no_sync()`: say in `.grad` which weights have terms that wait."""
    for weight in weights:
        if weight.terms is not None:
            waiting = weight.waiting = PendingGradient.of(weight) if weight.waiting is None else weight.waiting
            waiting.held, weight.parameter.grad = weight.parameter.grad, waiting


def unmark_pending(weights: Iterable[Weight]) -> None:
    """Before the next backward pass: terms wait no longer, and are left out where the loop has set `.grad` to something else."""
    for weight in weights:
        if isinstance(weight.parameter.grad, PendingGradient):
            weight.parameter.grad = weight.parameter.grad.held
        else:
            weight.terms = weight.packing = None


def find_pending(parameters: Iterable[torch.Tensor]) -> str:
    """The name of a parameter with gradients of micro-batches that were not summed over ranks yet; empty if there is none."""
    found = map(find_weight, parameters)
    return next((w.names[0] for w in found if w is not None and isinstance(w.parameter.grad, PendingGradient)), "")


def discard_pending(parameters: Iterable[torch.Tensor]) -> None:
    """Leave out such gradients: a loop sets its gradients to zero."""
    for weight in filter(None, map(find_weight, parameters)):
        weight.terms = weight.packing = None
        unmark_pending([weight])
