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

FinishBucket = Callable[[], list[torch.Tensor]]
"""Waits for a bucket, and returns its tensors."""
CollectiveSteps = Iterator[None]
"""A bucket on its way through its collectives (see `advance_steps`)."""
NO_MOVE = AxisMove(Axis(""), "divide")
"""A step of a member that has none where others have one."""


@dataclass(frozen=True)
class BucketMember:
    """One tensor of a bucket: its shape before the step, the fused segments of its dims, and its step, of the bucket's kind."""

    shape: tuple[int, ...]
    segments: Segments
    step: AxisMove

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dim(self) -> int:
        """The dim that the step shards or gathers."""
        return require_dim(self.step.dst if self.step.kind in ("reduce_scatter", "slice") else self.step.src)

    @property
    def uneven(self) -> int | None:
        """The whole length of that dim if its parts differ in length."""
        return None if self.step.src is None and self.step.dst is None else uneven_length(self.segments, self.dim)

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a rank's piece in the flat tensor of an all_gather or reduce_scatter."""
        shape, n = list(self.shape), self.step.axis.size
        if self.uneven is not None:
            shape[self.dim] = longest_part(self.uneven, n)
        elif self.step.kind == "reduce_scatter":
            shape[self.dim] //= n
        return tuple(shape)

    @property
    def sent(self) -> int:
        """Number of elements in the flat tensor that a rank sends."""
        if self.step.kind == "reduce_scatter":
            return math.prod(self.piece) * self.step.axis.size
        return math.prod(self.piece) if self.step.kind == "all_gather" else self.numel

    @property
    def shape_after(self) -> tuple[int, ...]:
        """Shape after the step."""
        shape, step, whole = list(self.shape), self.step, self.uneven
        if step.kind == "all_gather":
            shape[self.dim] = whole or shape[self.dim] * step.axis.size
        elif step.kind in ("reduce_scatter", "slice"):
            shape[self.dim] = (
                shape[self.dim] // step.axis.size
                if whole is None
                else shard_length(whole, step.axis.size, step.axis.rank)
            )
        elif step.kind in ("all_to_all", "pad") and whole is None:
            shape[self.dim] *= step.axis.size
            if step.kind == "all_to_all":
                shape[require_dim(step.dst)] //= step.axis.size
        return tuple(shape)


def can_bucket(step: AxisMove) -> bool:
    """Whether the members of a bucket take such a step in one collective."""
    return step.axis.size > 1 and step.kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def communicates(step: AxisMove) -> bool:
    """Whether a step sends a message. One that does not is taken at once: nothing is waited for."""
    return step.collective and step.axis.size > 1


def advance_steps(way: CollectiveSteps) -> bool:
    """Wait for the collective in flight of a bucket on its way, and issue its next one. Whether there was one."""
    with torch.no_grad():
        for _ in way:
            return True
    return False


def message_key(steps: Sequence[AxisMove]) -> tuple[tuple[str, str], ...]:
    """A key: two members may be in one bucket if the keys of their steps are equal. They send the same messages."""
    return tuple((s.axis.name, s.kind) for s in steps if communicates(s))


def align_chains(chains: Sequence[Sequence[AxisMove]]) -> list[tuple[AxisMove, ...]]:
    """Chains that are alike, with steps that do nothing, so that their messages stand at the same places.

    Example: (slice, all_reduce) and (all_reduce, slice) become (slice, all_reduce, nothing) and (nothing, all_reduce, slice).
    """
    runs = [_split_at_messages(chain) for chain in chains]
    lengths = [max(map(len, run)) for run in zip(*runs, strict=True)]
    return [
        tuple(s for run, n in zip(one, lengths, strict=True) for s in (*run, *[NO_MOVE] * (n - len(run))))
        for one in runs
    ]


def _split_at_messages(chain: Sequence[AxisMove]) -> list[list[AxisMove]]:
    """The steps up to the first message, then each message with the steps after it."""
    found: list[list[AxisMove]] = [[]]
    for step in chain:
        if communicates(step):
            found.append([])
        found[-1].append(step)
    return found


def start_move(
    members: Sequence[BucketMember],
    tensors: Sequence[torch.Tensor],
    *,
    flat: torch.Tensor | None = None,
    into: Sequence[torch.Tensor] | None = None,
) -> FinishBucket:
    """Issue one step for all tensors, which have one dtype.

    `flat` holds the tensors packed already; it may be overwritten. `into`: tensors that receive what is gathered. If a flat tensor
    cannot serve the step, it is taken at once, tensor by tensor.
    """
    step = members[0].step
    if not can_bucket(step):
        moved = [m.step.take(t, m.segments) for m, t in zip(members, tensors, strict=True)]
        return lambda: copy_into(moved, into)
    if step.kind == "all_reduce":
        packed = pack(tensors) if flat is None else flat
        finish = step.axis.start_all_reduce(packed, owned=flat is not None or len(tensors) > 1, packed=len(members))
        return lambda: unpack(finish(), [m.shape for m in members])
    if step.kind == "reduce_scatter":
        finish = step.axis.start_reduce_scatter(pack_by_rank(members, tensors) if flat is None else flat, len(members))
        return lambda: trim_padding(members, unpack(finish(), [m.piece for m in members]))
    if step.kind == "all_to_all":
        swapping = step.axis.start_all_to_all(pack_rank_rows(members, tensors), packed=len(members))
        return lambda: copy_into(unpack_rank_rows(members, swapping()), into)
    gathering = step.axis.start_all_gather(pack_own_pieces(members, tensors) if flat is None else flat, len(members))

    def whole() -> list[torch.Tensor]:
        gathered = gathering()
        made = [gathered.new_empty(m.shape_after) for m in members] if into is None else list(into)
        unpack_by_rank(members, gathered, made)
        return made

    return whole


def move_through(
    stages: Sequence[Sequence[BucketMember]],
    tensors: list[torch.Tensor],
    into: Sequence[torch.Tensor],
    *,
    flat: torch.Tensor | None = None,
    ready: Callable[[], None] = lambda: None,
) -> CollectiveSteps:
    """Take tensors through all stages, the last of which writes `into`. `ready` is called before it writes. The list is emptied: what a
    collective needs, it holds itself."""
    for members in stages[:-1]:
        tensors, flat = (yield from _one_stage(members, tensors, flat)), None
    finish = start_move(stages[-1], tensors, flat=flat, into=into)
    tensors.clear()
    if communicates(stages[-1][0].step):
        yield
    ready()
    finish()


def _one_stage(
    members: Sequence[BucketMember], tensors: list[torch.Tensor], flat: torch.Tensor | None
) -> Generator[None, None, list[torch.Tensor]]:
    finish = start_move(members, tensors, flat=flat)
    tensors.clear()
    if communicates(members[0].step):
        yield
    return finish()


def copy_into(tensors: list[torch.Tensor], into: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """Copy the tensors into others, if there are others, and return these."""
    if into is None:
        return tensors
    for here, there in zip(tensors, into, strict=True):
        there.copy_(here)
    return list(into)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements one after the other in a flat tensor. It is a copy unless there is only one contiguous tensor."""
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([t.reshape(-1) for t in tensors])


def unpack(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Views of a flat tensor."""
    pieces = flat.split([math.prod(s) for s in shapes])
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def pack_own_pieces(members: Sequence[BucketMember], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's pieces one after the other, each as long as the longest rank's."""
    return pack(
        [t if m.uneven is None else pad_dim(t, m.dim, m.piece[m.dim]) for m, t in zip(members, tensors, strict=True)]
    )


def trim_padding(members: Sequence[BucketMember], pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """The own parts of pieces that may be longer."""
    return [
        x if tuple(x.shape) == m.shape_after else x.narrow(m.dim, 0, m.shape_after[m.dim]).contiguous()
        for m, x in zip(members, pieces, strict=True)
    ]


def pack_rank_rows(members: Sequence[BucketMember], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[ranks, total]: in row r the pieces, along the dim that is to be sharded, that rank r gets."""
    n = members[0].step.axis.size
    pairs = zip(members, tensors, strict=True)
    return torch.cat(
        [torch.stack(split_by_rank(t, require_dim(m.step.dst), n, m.segments)).view(n, -1) for m, t in pairs], 1
    )


def unpack_rank_rows(members: Sequence[BucketMember], rows: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose pieces came in `rows` [ranks, total], joined along the dim that was sharded before."""
    found, n = [], len(rows)
    for m, part in zip(members, rows.split([m.numel // n for m in members], 1), strict=True):
        piece = list(m.shape)
        piece[require_dim(m.step.dst)] //= n
        found.append(join_shards(part.reshape(n, *piece).unbind(0), require_dim(m.step.src), m.segments))
    return found


def pack_by_rank(members: Sequence[BucketMember], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The flat tensor [ranks, total] of what each rank is to get."""
    flat = tensors[0].new_empty(sum(m.sent for m in members))
    if is_row_sharded(members):
        torch._chunk_cat(list(tensors), 0, (n := members[0].step.axis.size), out=flat.view(n, -1))
        return flat
    for member, slots, tensor in zip(members, rank_slots(members, flat), tensors, strict=True):
        copy_to_slots(member, slots, tensor)
    return flat


def is_row_sharded(members: Sequence[BucketMember]) -> bool:
    """Whether each rank's piece of every member is its own rows, as they lie: cut along dim 0 into equal parts, without fused segments.
    Then one kernel packs or unpacks all of them, as FSDP2 does (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)."""
    return all(m.dim == 0 and m.uneven is None and len(m.segments.get(0, ())) < 2 for m in members)


def rank_slots(members: Sequence[BucketMember], flat: torch.Tensor) -> list[torch.Tensor]:
    """For each member its view [ranks, *piece] of a flat tensor [ranks, total], which is to be scattered or was gathered."""
    n = members[0].step.axis.size
    rows, at, found = flat.view(n, -1), 0, []
    for member in members:
        size = math.prod(member.piece)
        found.append(rows[:, at : at + size].view(n, *member.piece))
        at += size
    return found


def copy_to_slots(member: BucketMember, slots: torch.Tensor, whole: torch.Tensor, *, add: bool = False) -> None:
    """Copy a whole tensor into its slots [ranks, *piece], or `add` it to them."""
    for there, here in _matching_views(whole, slots, member):
        here.add_(there) if add else here.copy_(there)


def unpack_by_rank(members: Sequence[BucketMember], flat: torch.Tensor, wholes: Sequence[torch.Tensor]) -> None:
    """Copy every rank's pieces into the whole tensors `wholes`, in one kernel if all are cut by rows."""
    if is_row_sharded(members) and all(whole.is_contiguous() for whole in wholes):
        rows = flat.view(members[0].step.axis.size, -1)
        sizes, out = [math.prod(m.piece) for m in members], [w.view(len(rows), -1) for w in wholes]
        torch.split_with_sizes_copy(rows, sizes, 1, out=out)
        return
    for member, slots, whole in zip(members, rank_slots(members, flat), wholes, strict=True):
        for there, here in _matching_views(whole, slots, member):
            there.copy_(here)


def _matching_views(
    whole: torch.Tensor, slots: torch.Tensor, member: BucketMember
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views [ranks, *piece] of a whole tensor and of its slots that hold the same elements, segment by segment."""
    dim, n, fused = member.dim, member.step.axis.size, member.segments
    if member.uneven is not None:
        for there, here in zip(split_unevenly(whole, dim, n), slots, strict=True):
            yield there, here.narrow(dim, 0, there.size(dim))
        return
    own = split_segments(slots, dim + 1, {dim + 1: fused[dim]} if dim in fused else NO_SEGMENTS)
    for there, here in zip(split_segments(whole, dim, fused), own, strict=True):
        yield there.unflatten(dim, (n, -1)).movedim(dim, 0), here
