"""One collective for all weights, or gradients, of a unit: they are packed into one flat tensor, and unpacked from it.

The flat tensor holds the pieces rank by rank, so that one all_gather or reduce_scatter serves tensors that are sharded along
different dims:

    flat [ranks, total]  =  rank 0: piece of a, piece of b, ...   rank 1: piece of a, piece of b, ...

Example: a [4, 6] is sharded along dim 0 and b [3, 2] along dim 1, over 2 ranks. The flat tensor is [2, 12 + 3]: the row of a rank
has its 2 x 6 elements of a, then its 3 x 1 elements of b. If a has 5 rows, the parts have 3 and 2 rows, and the pieces 3 x 6: what
follows a shorter part is not read.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from planner_core.runtime.program.collectives import (
    NO_SEGMENTS,
    Axis,
    AxisMove,
    Segments,
    join_shards,
    longest_part,
    pad_dim,
    require_dim,
    shard_length,
    split_by_rank,
    split_segments,
    split_unevenly,
    uneven_length,
)
from planner_core.runtime.program.torch_private import join_chunks

FinishBucket = Callable[[], list[torch.Tensor]]
"""Waits for the move of a bucket, and returns its tensors."""
CollectiveSteps = Iterator[None]
"""The collectives of a bucket in order: each `next` waits for the one in flight and issues another (`advance_steps`)."""
NO_MOVE = AxisMove(Axis(""), "divide")
"""The move of a member where other members of its bucket have one and it has none."""


@dataclass(frozen=True)
class BucketMember:
    """One tensor of a bucket: its shape before the move, the fused segments of its dims, and the move."""

    shape: tuple[int, ...]
    segments: Segments
    move: AxisMove

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dim(self) -> int:
        """The dim that the move shards or gathers."""
        return require_dim(self.move.dst if self.move.kind in ("reduce_scatter", "slice") else self.move.src)

    @property
    def uneven_length(self) -> int | None:
        """The full length of that dim if ranks have parts of different length, else None."""
        return None if self.move.src is None and self.move.dst is None else uneven_length(self.segments, self.dim)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of one rank's piece in the flat tensor of an all_gather or reduce_scatter."""
        shape, n = list(self.shape), self.move.axis.size
        # A message has pieces of one length. Example: 5 rows over 2 ranks are 3 + 2, so each piece has 3 rows, and rank 1 pads its 2.
        if self.uneven_length is not None:
            shape[self.dim] = longest_part(self.uneven_length, n)
        elif self.move.kind == "reduce_scatter":
            shape[self.dim] //= n
        return tuple(shape)

    @property
    def num_sent(self) -> int:
        """Number of elements in the flat tensor that a rank sends."""
        if self.move.kind == "reduce_scatter":
            return math.prod(self.piece_shape) * self.move.axis.size
        return math.prod(self.piece_shape) if self.move.kind == "all_gather" else self.numel

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape after the move."""
        shape, move, full_length = list(self.shape), self.move, self.uneven_length
        if move.kind == "all_gather":
            shape[self.dim] = full_length or shape[self.dim] * move.axis.size
        elif move.kind in ("reduce_scatter", "slice"):
            shape[self.dim] = (
                shape[self.dim] // move.axis.size
                if full_length is None
                else shard_length(full_length, move.axis.size, move.axis.rank)
            )
        # An all_to_all of [4, 6] on 2 ranks from dim 0 to dim 1: dim 0 grows to 8, and dim 1 shrinks to 3.
        elif move.kind in ("all_to_all", "pad") and full_length is None:
            shape[self.dim] *= move.axis.size
            if move.kind == "all_to_all":
                shape[require_dim(move.dst)] //= move.axis.size
        return tuple(shape)


def can_bucket(move: AxisMove) -> bool:
    """Return whether one collective can take this move of all members of a bucket."""
    return move.axis.size > 1 and move.kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def communicates(move: AxisMove) -> bool:
    """Return whether a move sends a message. Any other move is made at once, since nothing is waited for."""
    return move.collective and move.axis.size > 1


def advance_steps(collectives: CollectiveSteps) -> bool:
    """Wait for the collective in flight, and issue the next one. Return whether there was a next one."""
    with torch.no_grad():
        for _ in collectives:
            return True
    return False


def message_key(steps: Sequence[AxisMove]) -> tuple[tuple[str, str], ...]:
    """Return a key of the messages of a chain. Members whose keys are equal may share a bucket."""
    return tuple((s.axis.name, s.kind) for s in steps if communicates(s))


def align_chains(chains: Sequence[Sequence[AxisMove]]) -> list[tuple[AxisMove, ...]]:
    """Pad chains with moves that do nothing, so that their messages stand at the same places.

    Example: (slice, all_reduce) and (all_reduce, slice) become (slice, all_reduce, nothing) and (nothing, all_reduce, slice).
    """
    runs = [_split_at_messages(chain) for chain in chains]
    lengths = [max(map(len, run)) for run in zip(*runs, strict=True)]
    return [
        tuple(s for run, n in zip(one, lengths, strict=True) for s in (*run, *[NO_MOVE] * (n - len(run))))
        for one in runs
    ]


def _split_at_messages(chain: Sequence[AxisMove]) -> list[list[AxisMove]]:
    """Split a chain: the moves before the first message, then each message with the moves after it."""
    tensors: list[list[AxisMove]] = [[]]
    for move in chain:
        if communicates(move):
            tensors.append([])
        tensors[-1].append(move)
    return tensors


def start_move(
    members: Sequence[BucketMember],
    tensors: Sequence[torch.Tensor],
    *,
    flat: torch.Tensor | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> FinishBucket:
    """Issue one move of all tensors, which have one dtype.

    `flat` holds the tensors packed already, and may be overwritten. `out` receives what is gathered. If a flat tensor cannot
    serve the move, it is made at once, tensor by tensor.
    """
    move = members[0].move
    if not can_bucket(move):
        results = [m.move.apply(t, m.segments) for m, t in zip(members, tensors, strict=True)]
        return lambda: copy_into(results, out)
    if move.kind == "all_reduce":
        # `pack` copies nothing of a single tensor. That one is the caller's, and all_reduce writes in place, so it is not `owned`.
        packed = pack(tensors) if flat is None else flat
        finish = move.axis.start_all_reduce(packed, owned=flat is not None or len(tensors) > 1, packed=len(members))
        return lambda: unpack(finish(), [m.shape for m in members])
    if move.kind == "reduce_scatter":
        finish = move.axis.start_reduce_scatter(pack_by_rank(members, tensors) if flat is None else flat, len(members))
        return lambda: trim_padding(members, unpack(finish(), [m.piece_shape for m in members]))
    if move.kind == "all_to_all":
        swapping = move.axis.start_all_to_all(pack_rank_rows(members, tensors), packed=len(members))
        return lambda: copy_into(unpack_rank_rows(members, swapping()), out)
    gathering = move.axis.start_all_gather(pack_sent_pieces(members, tensors) if flat is None else flat, len(members))

    def finish_gather() -> list[torch.Tensor]:
        gathered = gathering()
        results = [gathered.new_empty(m.result_shape) for m in members] if out is None else list(out)
        unpack_by_rank(members, gathered, results)
        return results

    return finish_gather


def move_through(
    stages: Sequence[Sequence[BucketMember]],
    tensors: list[torch.Tensor],
    out: Sequence[torch.Tensor],
    *,
    flat: torch.Tensor | None = None,
    before_write: Callable[[], None] = lambda: None,
) -> CollectiveSteps:
    """Take tensors through all stages; the last one writes `out`, after a call of `before_write`.

    The list `tensors` is emptied, so that memory is freed as soon as no collective needs it.
    """
    if len(stages) > 1:
        tensors, flat = (yield from run_stages(stages[:-1], tensors, flat)), None
    finish = start_move(stages[-1], tensors, flat=flat, out=out)
    tensors.clear()
    # A yield means that a message is in flight (`advance_steps`). A move without one is finished at once.
    if communicates(stages[-1][0].move):
        yield
    # Only now: while the collective is in flight its own flat result exists, and `out` would lie unused beside it.
    before_write()
    finish()


def run_stages(
    stages: Sequence[Sequence[BucketMember]], tensors: list[torch.Tensor], flat: torch.Tensor | None
) -> Generator[None, None, list[torch.Tensor]]:
    """Take tensors through the stages, and yield while a message is in flight.

    The list `tensors` is emptied, so that memory is freed as soon as no collective needs it.
    """
    # `flat` is packed as the first stage sends it; the stages after it pack for themselves.
    for members in stages:
        tensors, flat = (yield from _one_stage(members, tensors, flat)), None
    return tensors


def _one_stage(
    members: Sequence[BucketMember], tensors: list[torch.Tensor], flat: torch.Tensor | None
) -> Generator[None, None, list[torch.Tensor]]:
    finish = start_move(members, tensors, flat=flat)
    tensors.clear()
    if communicates(members[0].move):
        yield
    return finish()


def copy_into(tensors: list[torch.Tensor], out: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """Copy the tensors into `out` and return it. If `out` is None, return the tensors themselves."""
    if out is None:
        return tensors
    for source, target in zip(tensors, out, strict=True):
        target.copy_(source)
    return list(out)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a flat tensor of all elements. It is a copy unless there is one contiguous tensor."""
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([t.reshape(-1) for t in tensors])


def unpack(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the views of a flat tensor that have these shapes, in order."""
    pieces = flat.split([math.prod(s) for s in shapes])
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def pack_sent_pieces(members: Sequence[BucketMember], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a flat tensor of this rank's pieces, each as long as the longest rank's."""
    return pack(
        [
            t if m.uneven_length is None else pad_dim(t, m.dim, m.piece_shape[m.dim])
            for m, t in zip(members, tensors, strict=True)
        ]
    )


def trim_padding(members: Sequence[BucketMember], pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Cut the padding of the longest rank from this rank's pieces."""
    return [
        x if tuple(x.shape) == m.result_shape else x.narrow(m.dim, 0, m.result_shape[m.dim]).contiguous()
        for m, x in zip(members, pieces, strict=True)
    ]


def pack_rank_rows(members: Sequence[BucketMember], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor [ranks, total] that an all_to_all sends: row r has the pieces of rank r, cut along the dim to be
    sharded."""
    num_ranks = members[0].move.axis.size
    pairs = zip(members, tensors, strict=True)
    # Example: 2 ranks, a [4, 2] to be cut along dim 0 and b [2, 3] along dim 0: rows of 4 + 3 numbers, so the tensor is [2, 7].
    return torch.cat(
        [
            torch.stack(split_by_rank(t, require_dim(m.move.dst), num_ranks, m.segments)).view(num_ranks, -1)
            for m, t in pairs
        ],
        1,
    )


def unpack_rank_rows(members: Sequence[BucketMember], rows: torch.Tensor) -> list[torch.Tensor]:
    """Join the pieces in `rows` [ranks, total] along the dim that was sharded before."""
    tensors, n = [], len(rows)
    for m, part in zip(members, rows.split([m.numel // n for m in members], 1), strict=True):
        piece = list(m.shape)
        piece[require_dim(m.move.dst)] //= n
        tensors.append(join_shards(part.reshape(n, *piece).unbind(0), require_dim(m.move.src), m.segments))
    return tensors


def pack_by_rank(members: Sequence[BucketMember], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the flat tensor [ranks, total] that a reduce_scatter sends."""
    flat = tensors[0].new_empty(sum(m.num_sent for m in members))
    if is_row_sharded(members):
        join_chunks(list(tensors), 0, (n := members[0].move.axis.size), out=flat.view(n, -1))
        return flat
    for member, slots, tensor in zip(members, rank_slots(members, flat), tensors, strict=True):
        copy_to_slots(member, slots, tensor)
    return flat


def is_row_sharded(members: Sequence[BucketMember]) -> bool:
    """Return whether each rank's piece of every member is contiguous: rows of dim 0, in equal numbers, without fused segments.

    Then one kernel packs or unpacks all members, as in FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    return all(m.dim == 0 and m.uneven_length is None and len(m.segments.get(0, ())) < 2 for m in members)


def rank_slots(members: Sequence[BucketMember], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return for each member its view [ranks, *piece] of a flat tensor [ranks, total]."""
    n = members[0].move.axis.size
    rows, at, tensors = flat.view(n, -1), 0, []
    for member in members:
        size = math.prod(member.piece_shape)
        tensors.append(rows[:, at : at + size].view(n, *member.piece_shape))
        at += size
    return tensors


def copy_to_slots(member: BucketMember, slots: torch.Tensor, whole: torch.Tensor, *, accumulate: bool = False) -> None:
    """Copy a whole tensor into its slots [ranks, *piece], or add it to them if `accumulate`."""
    for part, slot in _matching_views(whole, slots, member):
        slot.add_(part) if accumulate else slot.copy_(part)


def unpack_by_rank(members: Sequence[BucketMember], flat: torch.Tensor, wholes: Sequence[torch.Tensor]) -> None:
    """Copy every rank's pieces into the tensors `wholes`. One kernel does it if all members are sharded by rows."""
    if is_row_sharded(members) and all(whole.is_contiguous() for whole in wholes):
        rows = flat.view(members[0].move.axis.size, -1)
        sizes, out = [math.prod(m.piece_shape) for m in members], [w.view(len(rows), -1) for w in wholes]
        torch.split_with_sizes_copy(rows, sizes, 1, out=out)
        return
    for member, slots, whole in zip(members, rank_slots(members, flat), wholes, strict=True):
        for part, slot in _matching_views(whole, slots, member):
            part.copy_(slot)


def _matching_views(
    whole: torch.Tensor, slots: torch.Tensor, member: BucketMember
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of views [ranks, *piece] of a whole tensor and of its slots with the same elements, segment by segment."""
    dim, n, fused = member.dim, member.move.axis.size, member.segments
    if member.uneven_length is not None:
        for part, slot in zip(split_unevenly(whole, dim, n), slots, strict=True):
            # A slot is as long as the longest part. What lies behind a shorter part is padding, and no view covers it.
            yield part, slot.narrow(dim, 0, part.size(dim))
        return
    # The slots have the ranks as an extra first dim, so what is dim 0 of the whole tensor is dim 1 of them.
    rank_parts = split_segments(slots, dim + 1, {dim + 1: fused[dim]} if dim in fused else NO_SEGMENTS)
    for part, slot in zip(split_segments(whole, dim, fused), rank_parts, strict=True):
        # Example: a whole [6, 4] cut along dim 0 over 2 ranks is viewed as [2, 3, 4], rank first, as the slots lie.
        yield part.unflatten(dim, (n, -1)).movedim(dim, 0), slot
