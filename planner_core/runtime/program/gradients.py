"""Gradients of one rank: autograd hands them over as they come, and buckets of them are reduced while backward goes on.

A bucket takes two chains of moves. The chain `micro` is taken in every micro-batch (ZeRO-2 and ZeRO-3: reduce_scatter). The
chain `final` is taken once a step (DDP: all_reduce; ZeRO-1: reduce_scatter). If the caller does not say which micro-batch is
the last, `final` is taken in every backward pass. Small buckets of `final` are reduced together when backward is over.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
    run_stages,
    unpack,
)
from planner_core.runtime.program.collectives import AxisMove, apply_moves, coalesced_launch
from planner_core.runtime.program.weights import Weight, bucket_stages, find_weight


class GradientBucket:
    """The gradients of some weights that take the same moves. `shapes` are those of autograd's gradients.

    The first moves of a chain may need no message, such as the slice of a gradient that is equal on all ranks. They are taken
    as soon as a gradient arrives. `deferred`: another unit reduces the gradients, the first that uses the weight, since its
    backward comes last.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        shapes: Sequence[tuple[int, ...]],
        micro: Sequence[tuple[AxisMove, ...]],
        *,
        deferred: bool = False,
    ) -> None:
        self.weights, self.deferred = list(weights), deferred
        self.dtype, self.device = weights[0].gradient_dtype, weights[0].local.device
        local = [next((n for n, move in enumerate(chain) if communicates(move)), len(chain)) for chain in micro]
        self.local_moves = [chain[:n] for chain, n in zip(micro, local, strict=True)]
        self.shapes = _reduced_shapes(bucket_stages(weights, shapes, self.local_moves), shapes)
        self.num_bytes = sum(map(math.prod, self.shapes)) * self.dtype.itemsize
        self.micro = bucket_stages(weights, self.shapes, [chain[n:] for chain, n in zip(micro, local, strict=True)])
        landed = _reduced_shapes(self.micro, self.shapes)
        self.final = bucket_stages(weights, landed, [() if deferred else w.final for w in weights])
        self.packs_by_rank = _begins_with_reduce_scatter(self.micro)
        # Not if it is small: small buckets of several units are packed together at the end, so packing here would be a second copy.
        self.final_by_rank = not self.micro and not self.is_small and _begins_with_reduce_scatter(self.final)
        """Whether gradients are packed rank by rank as they arrive, as the reduce_scatter of `final` sends them. Then they need
        no other copy."""
        self.is_direct = not self.micro and not self.final and not any(self.local_moves)
        """Whether nothing is sent or cut, so that a gradient goes to its parameter at once."""
        self.packing_members = self.micro[0] if self.packs_by_rank else self.final[0] if self.final_by_rank else []
        self.flat: torch.Tensor | None = None  # of the first stage, packed as its collective takes it
        self.slots: list[torch.Tensor] = []
        self.reset()

    def reset(self, *, keep: bool = False) -> None:
        """Prepare for the next backward pass. `keep` leaves what is packed in place."""
        self.arrived: set[int] = set()
        self.unpacked: dict[int, torch.Tensor] = {}
        if not keep:
            self.flat, self.slots = None, []

    # --- arriving -------------------------------------------------------------------------------------

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Accept one gradient from autograd."""
        if self.is_direct:
            self.weights[index].publish(gradient)
            return
        self.arrived.add(index)
        if self.local_moves[index]:
            gradient = apply_moves(gradient, self.local_moves[index], self.weights[index].segments)
        if not self.micro:
            self._accumulate_gradient(index, gradient)
        elif self.packs_by_rank:
            # Each gradient is packed when it arrives, rank by rank as the reduce_scatter sends it, and its memory is free at once. FSDP2
            # waits for all of a block and packs them by one kernel (torch.ops.fsdp.chunk_cat), so they all live beside the packed ones.
            # Example: the 9 weights of a Llama-3-8B layer have 218 million elements. Here one gradient lives at a time, of at most 0.12 GB
            # in bfloat16; there all of them do, 0.44 GB, for 1 launch instead of 9.
            self._allocate_flat()
            copy_to_slots(self.micro[0][index], self.slots[index], gradient)
        else:
            self.unpacked[index] = gradient.to(self.dtype)

    def _allocate_flat(self) -> None:
        if self.flat is None:
            length = (
                sum(m.num_sent for m in self.packing_members)
                if self.packing_members
                else sum(map(math.prod, self.shapes))
            )
            self.flat = torch.empty(length, dtype=self.dtype, device=self.device)
            self.slots = (
                rank_slots(self.packing_members, self.flat) if self.packing_members else unpack(self.flat, self.shapes)
            )

    def _accumulate_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient to those of earlier micro-batches, or write it into a new flat tensor."""
        weight = self.weights[index]
        if self.final_by_rank and weight.accumulated is not None and weight.packed_as is None:  # of another unit
            # Another bucket, such as a deferred one, has left its sum unpacked. It joins this gradient before both are packed.
            gradient, weight.accumulated = weight.accumulated.add_(gradient), None
        if weight.packed_as is not None:
            assert weight.accumulated is not None
            copy_to_slots(weight.packed_as, weight.accumulated, gradient, accumulate=True)
        # Added in place: `accumulated` may be a slot of the flat tensor, and must remain it for the collective to need no copy.
        elif weight.accumulated is not None:
            weight.accumulated.add_(gradient)
        elif not self.final:
            weight.accumulated = gradient.to(self.dtype)  # cut, and nothing to pack
        else:
            self._allocate_flat()
            weight.accumulated = self.slots[index]
            if self.final_by_rank:
                weight.packed_as = self.packing_members[index]
                copy_to_slots(weight.packed_as, weight.accumulated, gradient)
            else:
                weight.accumulated.copy_(gradient)

    # --- reducing -------------------------------------------------------------------------------------

    def reduce(self, sync: bool) -> CollectiveSteps:
        """Take the bucket through its collectives, and add the results to the parameters' gradients."""
        arrived = sorted(self.arrived)
        if self.micro:
            yield from self._reduce_micro(arrived)
        if self.deferred or (self.final and not sync):
            # Inside `no_sync()` the packed sums wait in the slots for the last micro-batch. Other sums live on in `weight.accumulated`.
            # So do slots of gradients that are still to come: another stage has brought that of a weight which both use.
            self.reset(keep=self.final_by_rank or any(w.accumulated is None for w in self.weights))
            return
        yield from self.reduce_final(arrived)
        self.reset()

    @property
    def is_small(self) -> bool:
        """Whether it is reduced together with those of other units when backward is over."""
        return not self.micro and bool(self.final) and self.num_bytes <= SMALL_BYTES

    @property
    def reduces_in_place(self) -> bool:
        """Whether the gradients are summed in the memory that holds them, so that the end of the collective frees nothing."""
        kinds = [kind for _, kind in message_key(self.weights[0].final)]
        if self.micro or not self.final or kinds != ["all_reduce"]:
            return False
        return self._flat_of([self._accumulated_gradient(i) for i in sorted(self.arrived)]) is not None

    def reduce_final(self, arrived: Sequence[int]) -> CollectiveSteps:
        """Take the chain `final`, and publish the gradients to the parameters."""
        if self.final_by_rank:
            return _reduce_and_publish(self.weights, self.final, self._final_by_rank_tensors().copy(), self.flat)
        arrived = [
            i for i in arrived if self.weights[i].accumulated is not None
        ]  # else another use's bucket has taken them along
        tensors = [self._accumulated_gradient(i) for i in arrived]
        stages = [[stage[i] for i in arrived] for stage in self.final]
        reduces_in_place = bool(stages) and stages[0][0].move.kind == "all_reduce"
        return _reduce_and_publish(
            [self.weights[i] for i in arrived], stages, tensors, self._flat_of(tensors) if reduces_in_place else None
        )

    def _final_by_rank_tensors(self) -> list[torch.Tensor]:
        """Return the gradients of all weights, packed rank by rank. Those that never arrived are zero."""
        self._allocate_flat()
        for place, weight, member in zip(self.slots, self.weights, self.packing_members, strict=True):
            if weight.accumulated is None:
                # The message has a place for every weight of the bucket, so those without a gradient are sent too, as zeros.
                place.zero_()
            elif weight.packed_as is None:
                copy_to_slots(member, place, weight.accumulated)
            elif weight.accumulated is not place:
                place.copy_(weight.accumulated)
        return self.slots

    def _accumulated_gradient(self, index: int) -> torch.Tensor:
        terms = self.weights[index].accumulated
        assert terms is not None
        return terms

    def _reduce_micro(self, arrived: list[int]) -> CollectiveSteps:
        """Take the chain `micro`, and add the result to the gradients of earlier micro-batches."""
        whole = len(arrived) == len(self.weights)
        if self.packs_by_rank and not whole:  # a gradient that did not come counts as zero
            for i in set(range(len(self.weights))) - self.arrived:
                self.slots[i].zero_()
        members = range(len(self.weights)) if self.packs_by_rank else arrived
        stages = [[stage[i] for i in members] for stage in self.micro]
        tensors = yield from run_stages(stages, *self._take_gradients(members))
        weights = [self.weights[i] for i in members]
        for i, weight, tensor in zip(
            members, weights, _copy_if_mixed(tensors, [w.accumulated is None for w in weights]), strict=True
        ):
            # A weight that took part with zeros keeps no gradient, as in one process: an optimizer skips it, and does not decay it.
            if i in self.arrived:
                weight.accumulated = tensor if weight.accumulated is None else weight.accumulated.add_(tensor)

    def _take_gradients(self, members: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the gradients of a micro-batch, and the flat tensor that has them, without holding either any longer."""
        if not self.packs_by_rank:
            return [self.unpacked.pop(i) for i in members], None
        tensors, flat = self.slots, self.flat
        self.flat, self.slots = None, []
        return tensors, flat

    def _flat_of(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the flat tensor if these are its views, all of them in order; None otherwise."""
        if self.flat is None or self.packs_by_rank or len(tensors) != len(self.slots):
            return None
        same = all(t is p for t, p in zip(tensors, self.slots, strict=True))
        return self.flat if same else None


def _begins_with_reduce_scatter(stages: Sequence[Sequence[BucketMember]]) -> bool:
    """Return whether the first move is one reduce_scatter of all members."""
    return bool(stages) and stages[0][0].move.kind == "reduce_scatter" and can_bucket(stages[0][0].move)


def _reduced_shapes(
    stages: Sequence[Sequence[BucketMember]], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return the shapes after all stages."""
    return [m.result_shape for m in stages[-1]] if stages else list(shapes)


def _reduce_and_publish(
    weights: Sequence[Weight],
    stages: Sequence[Sequence[BucketMember]],
    tensors: list[torch.Tensor],
    flat: torch.Tensor | None,
) -> CollectiveSteps:
    tensors = yield from run_stages(stages, tensors, flat)
    for weight, tensor in zip(weights, _copy_if_mixed(tensors, [w.gradient is None for w in weights]), strict=True):
        # Not those that were sent as zeros to fill the message: they stay without a gradient.
        if weight.accumulated is not None:
            weight.accumulated = weight.packed_as = None
            weight.publish(tensor)


def _copy_if_mixed(tensors: Sequence[torch.Tensor], is_gradient: Sequence[bool]) -> list[torch.Tensor]:
    """Return the results of one message, which are views of one flat tensor.

    Example: one of two results is added to an existing gradient, the other becomes a gradient itself (`is_gradient`). As a view
    it would keep the memory of both, so it is copied.
    """
    mixed = any(is_gradient) and not all(is_gradient)
    return [
        x.clone() if mixed and becomes_gradient else x for x, becomes_gradient in zip(tensors, is_gradient, strict=True)
    ]


def join_small_buckets(reductions: Sequence[GradientBucket]) -> list[CollectiveSteps]:
    """Join small buckets that take the same moves, and return their collectives."""
    groups: dict[object, list[GradientBucket]] = {}
    for r in reductions:
        groups.setdefault((r.dtype, message_key(r.weights[0].final)), []).append(r)
    return [_reduce_jointly(group) for group in groups.values()]


def _reduce_jointly(group: Sequence[GradientBucket]) -> CollectiveSteps:
    arrived = [(r, i) for r in group for i in sorted(r.arrived)]
    weights, tensors = [r.weights[i] for r, i in arrived], [r._accumulated_gradient(i) for r, i in arrived]
    stages = bucket_stages(weights, [tuple(t.shape) for t in tensors], [w.final for w in weights])
    yield from _reduce_and_publish(weights, stages, tensors, None)
    for r in group:
        r.reset()


class ReductionQueue:
    """The buckets in flight.

    A unit's buckets take their next move when the next unit's are ready, so few are in flight at once. Buckets that are reduced
    in place free no memory, so nothing waits for them before the end.
    """

    def __init__(self) -> None:
        self.in_flight: list[CollectiveSteps] = []
        self.in_place: list[CollectiveSteps] = []

    def push(self, buckets: Sequence[CollectiveSteps], in_place: Sequence[bool] = ()) -> None:
        """Advance the buckets in flight, then issue the new ones. `in_place` says for each whether it is reduced in place; none
        is by default."""
        with coalesced_launch():
            self.advance()
            for bucket, stays in zip(buckets, in_place or [False] * len(buckets), strict=True):
                if advance_steps(bucket):
                    (self.in_place if stays else self.in_flight).append(bucket)

    def advance(self) -> None:
        """Let every bucket in flight take one move."""
        with coalesced_launch():
            self.in_flight = [bucket for bucket in self.in_flight if advance_steps(bucket)]

    def drain(self) -> None:
        """Take moves until no bucket is in flight."""
        # First those that free memory when they end. Nothing waits for the others before this.
        while self.in_flight:
            self.advance()
        while self.in_place:
            self.in_place = [bucket for bucket in self.in_place if advance_steps(bucket)]


class PendingGradient(torch.Tensor):
    """Stands in a parameter's `.grad` between micro-batches inside `no_sync()`, since the sum over ranks is not there yet.

    It lets a loop set the gradient to None or to zero, and refuses to be read. `before_no_sync` is what `.grad` was without it.
    """

    weight: Weight
    before_no_sync: torch.Tensor | None

    @staticmethod
    def of(weight: Weight) -> PendingGradient:
        """Make the one of a weight."""
        like = weight.parameter
        stand_in: PendingGradient = torch.Tensor._make_wrapper_subclass(
            PendingGradient, like.shape, dtype=like.dtype, device=like.device
        )
        stand_in.weight = weight
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        this = args[0] if args and isinstance(args[0], PendingGradient) else None
        if func is torch.ops.aten.detach.default:
            return this
        if func is torch.ops.aten.zero_.default and this is not None:
            discard_pending([this.weight.parameter])
            return this
        # `zero_grad(set_to_none=False)` sets whole lists of gradients to zero by this one operator.
        if func is torch.ops.aten._foreach_zero_.default:
            for x in args[0]:
                x.zero_()
            return None
        if func is torch.ops.aten.add_.Tensor and this is not None:  # autograd, of a loss of the weights alone
            this.before_no_sync = args[1].clone() if this.before_no_sync is None else this.before_no_sync.add_(args[1])
            return this
        pending = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, PendingGradient))
        raise PlanMismatch(
            f"the gradient of {pending.weight.names[0]} was used, but its backward passes ran inside no_sync(), so it is not summed over "
            "ranks yet; let the last micro-batch run outside of it first"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingGradient({self.weight.names[0]})"


def mark_pending(weights: Iterable[Weight]) -> None:
    """Put a `PendingGradient` in the `.grad` of each weight with an unreduced gradient, after a backward pass inside
    `no_sync()`."""
    for weight in weights:
        if weight.accumulated is not None:
            waiting = weight.pending_gradient = (
                PendingGradient.of(weight) if weight.pending_gradient is None else weight.pending_gradient
            )
            waiting.before_no_sync, weight.parameter.grad = weight.parameter.grad, waiting


def unmark_pending(weights: Iterable[Weight]) -> None:
    """Restore `.grad` before the next backward pass. Where the loop has replaced the stand-in, drop the unreduced gradient: it
    was set to zero."""
    for weight in weights:
        if isinstance(weight.parameter.grad, PendingGradient):
            weight.parameter.grad = weight.parameter.grad.before_no_sync
        else:
            weight.accumulated = weight.packed_as = None


def find_pending(parameters: Iterable[torch.Tensor]) -> str:
    """Return the name of a parameter with an unreduced gradient; "" if no parameter has one."""
    current = map(find_weight, parameters)
    return next((w.names[0] for w in current if w is not None and isinstance(w.parameter.grad, PendingGradient)), "")


def discard_pending(parameters: Iterable[torch.Tensor]) -> None:
    """Drop the unreduced gradients of parameters that a loop sets to zero."""
    for weight in filter(None, map(find_weight, parameters)):
        weight.accumulated = weight.packed_as = None
        unmark_pending([weight])
