"""Buckets of weights that are on their way to a unit: gathered, or made again from what is stored. They are issued before they are used."""

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
from planner_core.runtime.program.weights.weight import GatheredWeight, Weight, bucket_stages, redirect_gradient


class WeightBucket(ABC):
    """Weights that take the same steps to the form in which a unit uses them. The steps are issued early, one or more units ahead.

    On several axes each collective needs the result of the one before. So the last is issued one unit ahead, the one before it two
    units ahead, and none is waited for at once.
    """

    def __init__(self, steps: Sequence[AxisMove]) -> None:
        self.stages = max(1, sum(map(communicates, steps)))
        """Number of collectives; 1 if there are none."""
        self.earlier = 0
        """The most collectives of a bucket that reads the weights of this one."""
        self.issued = 0
        self.way: CollectiveSteps | None = None

    @abstractmethod
    def begin(self) -> CollectiveSteps | None:
        """The way through all steps, or None if there is nothing to do."""

    def issue(self, left: int = 0) -> None:
        """Issue the collectives, all but the last `left` of them. What was issued before is not issued again."""
        while self.issued < self.stages - max(0, left - self.earlier):
            self.way = self.way or self.begin()
            if self.way is None:
                return
            advance_steps(self.way)
            self.issued += 1

    def ready(self) -> None:
        """See to it that the weights are in their last form."""
        self.wait()

    def wait(self) -> None:
        """Wait until the weights are in their last form, if they are on their way."""
        if self.way is not None:
            while advance_steps(self.way):
                pass
            self.way, self.issued = None, 0


class GatherBucket(WeightBucket):
    """The bucket that gathers some weights of a unit. Its memory is freed after use. If it is `lasting`, each gather has memory of its
    own, which autograd keeps until backward has used it. Of weights of one rank alone (no `members`) it holds casts, made just before
    their use, since there is nothing to wait for."""

    def __init__(self, copies: Sequence[GatheredWeight], *, lasting: bool = False) -> None:
        super().__init__(copies[0].steps)
        self.copies, self.lasting = list(copies), lasting
        self._allocate()
        self.members = bucket_stages(
            [c.weight for c in copies], [c.weight.form for c in copies], [c.steps for c in copies]
        )
        self.here = False
        self.after: list[RefreshBucket] = []
        """The buckets of its working copies. It reads them, so it waits for them."""
        self.free()

    def _allocate(self) -> None:
        """Make the leaves as views of one flat tensor, whose memory is taken when the weights come."""
        shapes, first = [c.shape for c in self.copies], self.copies[0].weight
        total = sum(torch.Size(shape).numel() for shape in shapes)
        self.flat = torch.empty(total, dtype=first.dtype, device=first.local.device)
        for copy, view in zip(self.copies, unpack(self.flat, shapes), strict=True):
            trained = copy.weight.parameter.requires_grad
            if self.lasting and trained:
                copy.leaf, copy.anchor = view.data, torch.empty(0, device=view.device, requires_grad=True)
                continue
            copy.leaf = view.data.requires_grad_(trained)
            redirect_gradient(copy.leaf, copy)
        self.views = unpack(self.flat, shapes)
        self.num_bytes = self.flat.nbytes

    def reads(self, refreshes: Sequence[RefreshBucket]) -> None:
        """Say which buckets make the unit's working copies."""
        mine = {c.weight for c in self.copies}
        self.after = [r for r in refreshes if mine & set(r.weights)]
        for refresh in self.after:
            refresh.earlier = max(refresh.earlier, self.stages)

    def begin(self) -> CollectiveSteps | None:
        """The way from what is stored, unless the weights are here."""
        if self.here:
            return None
        for refresh in self.after:
            refresh.issue()
            refresh.wait()
        return self._gathered()

    def issue(self, left: int = 0) -> None:
        """Issue the collectives, if there are any."""
        if self.members:
            super().issue(left)

    def ready(self) -> None:
        """See to it that the weights are in their last form."""
        if not self.members:
            self.way = self.begin()
        self.wait()

    def _gathered(self) -> CollectiveSteps:
        if not self.members:
            self._take()
            torch._foreach_copy_(self.views, [c.weight.local.detach() for c in self.copies])
            self.here = True
            return
        tensors, flat = tensors_to_send([c.weight for c in self.copies], self.members[0])
        yield from move_through(self.members, tensors, self.views, flat=flat, ready=self._take)
        self.here = True

    def _take(self) -> None:
        """Take the memory of the whole weights."""
        self.flat.untyped_storage().resize_(self.num_bytes)

    def free(self) -> None:
        """Free the memory, or leave it to autograd."""
        if self.lasting and self.here:
            self._allocate()
        self.flat.untyped_storage().resize_(0)
        self.here = False


def tensors_to_send(
    weights: Sequence[Weight], members: Sequence[BucketMember]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The tensors that a gather sends: working copies, or the stored parameters, cast. Second: the flat tensor of them, if packed."""
    tensors = [(w.working if w.alias or w.refresh else w.local).detach() for w in weights]
    if all(t.dtype == weights[0].dtype for t in tensors):
        return tensors, None
    flat = torch.empty(sum(m.sent for m in members), dtype=weights[0].dtype, device=tensors[0].device)
    pieces = unpack(flat, [t.shape if m.uneven is None else m.piece for t, m in zip(tensors, members, strict=True)])
    packed = [
        piece if m.uneven is None else piece.narrow(m.dim, 0, t.size(m.dim))
        for piece, t, m in zip(pieces, tensors, members, strict=True)
    ]
    torch._foreach_copy_(packed, tensors)
    return packed, flat


class RefreshBucket(WeightBucket):
    """Makes the working copies of a unit again from the stored parameters: a cast, and in ZeRO-1 a gather."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__(weights[0].refresh)
        self.weights = list(weights)

    def begin(self) -> CollectiveSteps | None:
        """The way of the copies that are stale."""
        stale = [w for w in self.weights if w.stale()]
        return self._made(stale) if stale else None

    @staticmethod
    def _made(weights: Sequence[Weight]) -> CollectiveSteps:
        tensors = [w.local.detach() for w in weights]
        for weight in weights:
            weight.fresh()
        if not any(w.refresh for w in weights):
            torch._foreach_copy_([w.working for w in weights], tensors)
            return
        tensors = [t.to(w.dtype) for t, w in zip(tensors, weights, strict=True)]
        stages = bucket_stages(weights, [tuple(t.shape) for t in tensors], [w.refresh for w in weights])
        yield from move_through(stages, tensors, [w.working for w in weights])
