"""Buckets of weights that are gathered, or refreshed from what is stored, before a unit uses them."""

# mypy: allow-untyped-calls
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from planner_core.runtime.program.buckets import (
    BucketMember,
    CollectiveSteps,
    advance_steps,
    communicates,
    move_through,
    unpack,
)
from planner_core.runtime.program.collectives import AxisMove
from planner_core.runtime.program.torch_private import copy_lists
from planner_core.runtime.program.weights.weight import GatheredWeight, Weight, bucket_stages, redirect_gradient


class WeightBucket(ABC):
    """Weights that take the same moves to the form in which a unit uses them. The moves are issued one or more units ahead.

    On several axes each collective needs the result of the one before. So the last is issued one unit ahead, the one before it
    two units ahead, and the host waits for none of them at once.
    """

    def __init__(self, steps: Sequence[AxisMove]) -> None:
        self.num_collectives = max(1, sum(map(communicates, steps)))
        """Number of collectives; 1 if there are none."""
        self.reader_collectives = 0
        """The largest number of collectives of a bucket that reads the weights of this one."""
        self.issued = 0
        self.collectives: CollectiveSteps | None = None

    @abstractmethod
    def begin(self) -> CollectiveSteps | None:
        """Return the collectives in order, or None if the weights are up to date."""

    def issue(self, num_deferred: int = 0) -> None:
        """Issue the collectives but the last `num_deferred`. What was issued before is not issued again."""
        # What reads this bucket comes after it. With a reader of 2 collectives it leaves as if 2 fewer were held back, so 2 units earlier.
        while self.issued < self.num_collectives - max(0, num_deferred - self.reader_collectives):
            self.collectives = self.collectives or self.begin()
            if self.collectives is None:
                return
            advance_steps(self.collectives)
            self.issued += 1

    def make_ready(self) -> None:
        """Bring the weights to their last form."""
        self.wait()

    def wait(self) -> None:
        """Wait for the collectives that were issued, and take the rest."""
        if self.collectives is not None:
            while advance_steps(self.collectives):
                pass
            self.collectives, self.issued = None, 0


class GatherBucket(WeightBucket):
    """Gathers some weights of a unit. Their memory is freed after use.

    If it is `saved_by_autograd`, each gather has its own memory, which autograd keeps until backward has used it. A bucket
    without `members` holds casts of weights that one rank has alone. They are made just before use, since nothing is waited
    for.
    """

    def __init__(self, copies: Sequence[GatheredWeight], *, saved_by_autograd: bool = False) -> None:
        super().__init__(copies[0].steps)
        self.copies, self.saved_by_autograd = list(copies), saved_by_autograd
        self._make_leaves()
        self.members = bucket_stages(
            [c.weight for c in copies], [c.weight.working_shape for c in copies], [c.steps for c in copies]
        )
        self.is_gathered = False
        self.refreshes: list[RefreshBucket] = []
        """The buckets of its working copies, which it reads."""
        self.free()

    def _make_leaves(self) -> None:
        """Make the leaves as views of one flat tensor, whose memory is allocated when the weights come."""
        shapes, first = [c.shape for c in self.copies], self.copies[0].weight
        total = sum(torch.Size(shape).numel() for shape in shapes)
        self.flat = torch.empty(total, dtype=first.dtype, device=first.local.device)
        for copy, view in zip(self.copies, unpack(self.flat, shapes), strict=True):
            trained = copy.weight.parameter.requires_grad
            if self.saved_by_autograd and trained:
                # Autograd keeps a leaf to the end of backward, with its memory. So an empty anchor takes the gradient.
                copy.leaf, copy.anchor = view.data, torch.empty(0, device=view.device, requires_grad=True)
                continue
            copy.leaf = view.data.requires_grad_(trained)
            redirect_gradient(copy.leaf, copy)
        self.views = unpack(self.flat, shapes)
        self.num_bytes = self.flat.nbytes

    def depend_on(self, refreshes: Sequence[RefreshBucket]) -> None:
        """Note which buckets refresh the working copies that this one reads."""
        weights_here = {c.weight for c in self.copies}
        self.refreshes = [r for r in refreshes if weights_here & set(r.weights)]
        for bucket in self.refreshes:
            bucket.reader_collectives = max(bucket.reader_collectives, self.num_collectives)

    def begin(self) -> CollectiveSteps | None:
        """Return the collectives in order, or None if the weights are gathered already."""
        if self.is_gathered:
            return None
        for refresh in self.refreshes:
            refresh.issue()
            refresh.wait()
        return self._gather_steps()

    def issue(self, num_deferred: int = 0) -> None:
        """Issue the collectives but the last `num_deferred`, if there are any."""
        if self.members:
            super().issue(num_deferred)

    def make_ready(self) -> None:
        """Bring the weights to their last form."""
        if not self.members:
            self.collectives = self.begin()
        self.wait()

    def _gather_steps(self) -> CollectiveSteps:
        if not self.members:
            self._allocate_memory()
            copy_lists(self.views, [c.weight.local.detach() for c in self.copies])
            self.is_gathered = True
            return
        tensors, flat = tensors_to_send([c.weight for c in self.copies], self.members[0])
        yield from move_through(self.members, tensors, self.views, flat=flat, before_write=self._allocate_memory)
        self.is_gathered = True

    def _allocate_memory(self) -> None:
        """Allocate the memory of the gathered weights."""
        # Only the memory comes and goes. The leaves stay the same objects, unless autograd saves them (`free`).
        self.flat.untyped_storage().resize_(self.num_bytes)

    def free(self) -> None:
        """Free the memory, or leave it to autograd."""
        if self.saved_by_autograd and self.is_gathered:
            # New leaves with a storage of their own: the old storage lives exactly as long as autograd's saved tensors need it.
            self._make_leaves()
        self.flat.untyped_storage().resize_(0)
        self.is_gathered = False


def tensors_to_send(
    weights: Sequence[Weight], members: Sequence[BucketMember]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return the tensors that a gather sends, which are working copies or casts of the stored parameters, and the flat tensor
    of them if packed."""
    tensors = [(weight.working if weight.is_alias or weight.refresh else weight.local).detach() for weight in weights]
    if all(t.dtype == weights[0].dtype for t in tensors):
        return tensors, None
    flat = torch.empty(sum(m.num_sent for m in members), dtype=weights[0].dtype, device=tensors[0].device)
    pieces = unpack(
        flat, [t.shape if m.uneven_length is None else m.piece_shape for t, m in zip(tensors, members, strict=True)]
    )
    packed = [
        piece if m.uneven_length is None else piece.narrow(m.dim, 0, t.size(m.dim))
        for piece, t, m in zip(pieces, tensors, members, strict=True)
    ]
    # One kernel casts and packs. What lies behind a shorter part is sent as it is in memory, since no receiver reads it.
    copy_lists(packed, tensors)
    return packed, flat


class RefreshBucket(WeightBucket):
    """Refreshes the working copies of a unit from the stored parameters: a cast, and in ZeRO-1 a gather."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__(weights[0].refresh)
        self.weights = list(weights)

    def begin(self) -> CollectiveSteps | None:
        """Return the collectives of the stale copies, or None if all are up to date."""
        stale = [w for w in self.weights if w.is_stale()]
        return self._refresh_steps(stale) if stale else None

    @staticmethod
    def _refresh_steps(weights: Sequence[Weight]) -> CollectiveSteps:
        tensors = [w.local.detach() for w in weights]
        for weight in weights:
            # Now, when the values are read: whatever an optimizer writes from here on makes the copy stale again.
            weight.mark_fresh()
        if not any(w.refresh for w in weights):
            copy_lists([w.working for w in weights], tensors)
            return
        # Cast before it is sent: a float32 master of bfloat16 weights takes half the bytes on the wire.
        tensors = [t.to(w.dtype) for t, w in zip(tensors, weights, strict=True)]
        stages = bucket_stages(weights, [tuple(t.shape) for t in tensors], [w.refresh for w in weights])
        yield from move_through(stages, tensors, [w.working for w in weights])
