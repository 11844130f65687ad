"""Collectives along one mesh axis, issued early and waited for late, and the moves of one tensor."""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from planner_core.cost import Event
from planner_core.runtime.program.collectives.dim_parts import (
    NO_SEGMENTS,
    Segments,
    join_shards,
    local_shard,
    longest_part,
    pad_dim,
    place_in_zeros,
    ring_counts,
    shard_length,
    split_by_rank,
    split_unevenly,
    uneven_length,
)
from planner_core.runtime.program.collectives.launches import PendingCollective
from planner_core.runtime.program.collectives.torch_names import all_gather_into, reduce_scatter_into
from planner_core.runtime.program.operators.selective import is_replaying

Finish = Callable[[], torch.Tensor]
"""Waits for a collective, and returns its result."""


@dataclass
class Trace:
    """The events of one rank, in order."""

    events: list[Event] = field(default_factory=list)

    def add(self, what: str, kind: str, axis: str = "", num_bytes: int = 0, packed: int = 0) -> None:
        """Add one event."""
        self.events.append(Event(what, kind, axis, num_bytes, packed))

    def rows(self) -> list[list[Any]]:
        """Return the events as plain data: the arguments of each `Event`."""
        return [[e.what, e.kind, e.axis, e.num_bytes, e.packed] for e in self.events]


class Axis:
    """One mesh axis as this rank sees it. `start_*` issues a collective and returns a function that waits for it.

    An axis with only a name is a placeholder: its group is not known yet.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None = None, size: int = 1, rank: int = 0) -> None:
        self.name, self.group, self.size, self.rank = name, group, size, rank
        self.group_name = "" if group is None else group.group_name
        self.trace: Trace | None = None
        self.packed = 1
        """Number of tensors in the collective that is being issued."""

    def __repr__(self) -> str:
        return f"Axis({self.name}, size={self.size}, rank={self.rank})"

    # --- issuing --------------------------------------------------------------------------------------

    def start_all_gather(self, x: torch.Tensor, packed: int = 0) -> Finish:
        """Gather the tensors of all ranks along dim 0."""
        x = x.contiguous()
        if torch.compiler.is_compiling():
            return _finish_functional(torch.ops._c10d_functional.all_gather_into_tensor(x, self.size, self.group_name))
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return self._issue_collective("all_gather", packed, all_gather_into, out, out, x)

    def start_reduce_scatter(self, x: torch.Tensor, packed: int = 0) -> Finish:
        """Sum the tensors of all ranks, and keep this rank's part along dim 0."""
        x = x.contiguous()
        if torch.compiler.is_compiling():
            return _finish_functional(
                torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", self.size, self.group_name)
            )
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return self._issue_collective("reduce_scatter", packed, reduce_scatter_into, x, out, x)

    def start_all_reduce(
        self, x: torch.Tensor, reduction: str = "sum", *, owned: bool = False, packed: int = 0
    ) -> Finish:
        """Sum the tensors of all ranks, or take their maximum. `owned`: the result may overwrite `x`."""
        if torch.compiler.is_compiling():
            return _finish_functional(torch.ops._c10d_functional.all_reduce(x.contiguous(), reduction, self.group_name))
        # dist.all_reduce writes in place: a tensor that autograd or the model may read again is copied first
        out = x if owned else x.detach().clone(memory_format=torch.contiguous_format)
        op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        return self._issue_collective("all_reduce", packed, dist.all_reduce, out, out, op)

    def start_all_to_all(
        self,
        x: torch.Tensor,
        counts: list[int] | None = None,
        received: list[int] | None = None,
        *,
        back: bool = False,
        packed: int = 0,
    ) -> Finish:
        """Send `counts[r]` of the pieces along dim 0 to each rank r (default: an equal number), and receive `received[r]` from
        it (default: as many).

        The trace counts the bytes that are sent; if pieces go `back` to where they came from, those that are received.
        """
        x = x.contiguous()
        counts = counts or [x.shape[0] // self.size] * self.size
        received = received or counts
        if torch.compiler.is_compiling():
            return _finish_functional(
                torch.ops._c10d_functional.all_to_all_single(x, received, counts, self.group_name)
            )
        out = x.new_empty((sum(received), *x.shape[1:]))
        sized = out if back else x
        return self._issue_collective("all_to_all", packed, dist.all_to_all_single, sized, out, x, received, counts)

    def exchange(
        self, pieces: torch.Tensor, counts: list[int], received: list[int] | None = None, *, back: bool = False
    ) -> torch.Tensor:
        """Send `counts[r]` of the pieces along dim 0 to each rank r, and receive `received[r]` from it, in order of ranks."""
        return pieces if self.size == 1 else self.start_all_to_all(pieces, counts, received, back=back)()

    def start_send_recv(self, x: torch.Tensor) -> Finish:
        """Send a flat tensor to the next rank, and receive one of the same length from the rank before."""
        sent, received = ring_counts(x.numel(), self.size, self.rank)
        if torch.compiler.is_compiling():
            return _finish_functional(torch.ops._c10d_functional.all_to_all_single(x, received, sent, self.group_name))
        out = torch.empty_like(x)
        return self._issue_collective("send_recv", 0, dist.all_to_all_single, out, out, x, received, sent)

    def _issue_collective(
        self, kind: str, packed: int, collective: Callable[..., Any], sized: torch.Tensor, *args: Any
    ) -> Finish:
        """Issue a collective of `packed` weights, or add it to a launch. The trace counts the bytes of `sized`; `args` begin
        with the result."""
        # A recomputed block: `keep` gave back the result of the first run for the `new_empty` of this call, so nothing is sent.
        if is_replaying():
            out: torch.Tensor = args[0]
            return lambda: out
        trace, pending = self.trace, PendingCollective(self, kind, packed, collective, args)
        pending.start()
        # As `CountCollectives` counts: the tensor that is whole along the axis. An all_to_all's operand is one rank's share of it.
        num_bytes = sized.nbytes * (self.size if kind in ("all_to_all", "send_recv") else 1)
        if trace is not None:
            trace.add("issue", kind, self.name, num_bytes, packed)

        def finish() -> torch.Tensor:
            pending.wait()
            if trace is not None:
                trace.add("wait", kind, self.name, num_bytes, packed)
            out: torch.Tensor = args[0]
            return out

        return finish

    # --- moves of one tensor --------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        """Return the sum (or max) of every rank's tensor."""
        return x if self.size == 1 else self.start_all_reduce(x, reduction)()

    def all_gather(self, x: torch.Tensor, dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """Return the whole tensor, of which each rank has a part along `dim`."""
        full = uneven_length(segments, dim)
        gathered = self.start_all_gather(x if full is None else pad_dim(x, dim, longest_part(full, self.size)))()
        # Every rank sends a piece of the longest length, so the padding is at the end of the joined tensor and is cut off.
        if full is not None:
            return join_shards(gathered.chunk(self.size), dim).narrow(dim, 0, full)
        if math.prod(x.shape[:dim]) == 1 and len(segments.get(dim, ())) < 2:  # the ranks' parts lie in order
            return gathered.view(*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])
        return join_shards(gathered.chunk(self.size), dim, segments)

    def reduce_scatter(self, x: torch.Tensor, dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """Return this rank's part, along `dim`, of the sum of all ranks' tensors."""
        full = uneven_length(segments, dim)
        if full is not None:
            pieces = [pad_dim(piece, dim, longest_part(full, self.size)) for piece in split_unevenly(x, dim, self.size)]
            local = self.start_reduce_scatter(torch.cat(pieces))()
            return local.narrow(dim, 0, shard_length(full, self.size, self.rank)).contiguous()
        if dim == 0 and len(segments.get(0, ())) < 2:
            return self.start_reduce_scatter(x)()
        # torch scatters along dim 0 alone, so the ranks' pieces of another dim are put one after the other first.
        return self.start_reduce_scatter(torch.cat(split_by_rank(x, dim, self.size, segments)))()

    def all_to_all(self, x: torch.Tensor, src: int, dst: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """Exchange a part along `src` for a part along `dst`."""
        pieces = torch.stack(split_by_rank(x, dst, self.size, segments))
        return join_shards(self.start_all_to_all(pieces)().unbind(0), src, segments)

    def slice(self, x: torch.Tensor, dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """Return this rank's part of a whole tensor."""
        return local_shard(x, dim, self.size, self.rank, segments).contiguous()

    def view(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a whole tensor, as a view."""
        return local_shard(x, dim, self.size, self.rank)

    def pad(self, x: torch.Tensor, dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """Return a tensor of the full size with this rank's part in its place, and zeros elsewhere."""
        return place_in_zeros(x, dim, self.size, self.rank, segments)

    def divide(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's term of a sum over ranks that gives `x`."""
        return x / self.size


def _finish_functional(out: torch.Tensor) -> Finish:
    """Return the wait of a functional collective, which a compiler traces."""
    return lambda: torch.ops._c10d_functional.wait_tensor(out)
