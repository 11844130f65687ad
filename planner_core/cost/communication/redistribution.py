"""The cheapest path from one placement to another: which collective on which mesh axis, in which order.

A move changes the placement on one axis. Its collective carries the tensor as the other axes have left it, so the order
matters. All pairs of placements are solved at once (Floyd-Warshall over the (2 + rank)^axes placements of a tensor), and the
steps are read off the result.

Example: a tensor of 8 MB on a mesh of 2 x 4 goes from (P, S(0)) to (S(1), R). To reduce-scatter on axis 0 first carries 2 MB,
and the later all_gather on axis 1 carries 4 MB. The other order carries 8 MB twice.

If two axes shard the same tensor dim, the outer axis holds the larger pieces, so only the innermost of them may move.

The gradient of a weight that is Partial on several axes, and whole on them in the end, is summed over all of them by one all_reduce
(`group_sums`). It is one move here too, on the link of the joint group, though the steps name each axis. Example: B bytes on 4 nodes of
8 GPUs, summed over both axes. Axis by axis each of the 8 GPUs of a node sends 2 · 3/4 B through the node's cards, so 12 B leave it. In one
group the GPUs of a node divide what leaves: 1.5 B.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner_core.core import (
    CollectiveKind,
    P,
    Placement,
    Placements,
    R,
    Shard,
    Step,
    largest_local_shape,
    needs_uneven_split,
)
from planner_core.cost.communication.collectives import collective_times
from planner_core.cost.communication.links import AxisLink, JointLinks
from planner_core.cost.step_time import Bools, Floats, Ints

STEP_S = 1e-10
"""Price of a local move. Of two paths without communication the one with fewer moves wins."""

MAX_STEPS = 16
"""Steps of the longest path: on each of four axes a scatter, an exchange, a gather, and one more."""

Segments = tuple[tuple[int, tuple[int, ...]], ...]
"""Pairs (dim, sizes of its fused parts), hashable."""


@dataclass(frozen=True, slots=True)
class Redistributions:
    """All redistributions of one kind of tensor on one mesh.

    A placement is coded as a number in base 2 + rank with one digit per axis, the outermost first: R = 0, P = 1, Shard(d) = 2 + d.
    `cost` [from, to] is seconds (infinite: impossible), `first` [from, to] the code after the first step, and `local` [from, to]
    whether the path needs no message. `known_steps` are the answers of `steps` so far.
    """

    rank: int
    num_axes: int
    cost: Floats
    first: NDArray[np.int32]
    local: Bools
    known_steps: dict[tuple[Placements, Placements], tuple[Step, ...]] = field(default_factory=dict, repr=False)

    def code(self, placements: Placements) -> int:
        """Return the number of a placement."""
        return encode(placements, self.rank)

    def steps(self, src: Placements, dst: Placements) -> tuple[Step, ...]:
        """Return the moves from `src` to `dst`, in order. Raises ValueError if there are none, also where the tensor lacks a dim that is
        split."""
        # Example: a request of Jamba mini on 16 GPUs asks 35 694 times for 1 293 pairs.
        if (src, dst) not in self.known_steps:
            self.known_steps[src, dst] = self._find_steps(src, dst)
        return self.known_steps[src, dst]

    def _find_steps(self, src: Placements, dst: Placements) -> tuple[Step, ...]:
        if any(isinstance(p, Shard) and p.dim >= self.rank for p in (*src, *dst)):
            raise ValueError(f"no path from {src} to {dst} of a tensor of {self.rank} dims")
        at, end = self.code(src), self.code(dst)
        moves = []
        while at != end:
            after = int(self.first[at, end])
            if after < 0:
                raise ValueError(f"no path from {src} to {dst}")
            a, b = decode(at, self.rank, self.num_axes), decode(after, self.rank, self.num_axes)
            moves += [Step(i, a[i], b[i]) for i in range(self.num_axes) if a[i] != b[i]]  # several: one sum over them
            at = after
        return tuple(moves)

    def divides(self, src: NDArray[np.integer], dst: NDArray[np.integer], axes: Iterable[int]) -> Bools:
        """[pair]: whether the path from code `src` [pair] to code `dst` [pair] makes of a whole tensor terms of a sum on one of `axes`.

        On 4 x 8, the path from (R, P) to (P, S(0)) may cut the tensor on the first axis, scatter it on the second, and fill the cut parts
        with zeros: it sends a fourth of what is scattered after a division.
        """
        base, is_division = 2 + self.rank, np.zeros(len(src), dtype=bool)
        for at, after in _follow_paths(self.first, src, dst):
            for axis in axes:
                digit = base ** (self.num_axes - 1 - axis)
                is_division |= (at // digit % base == 0) & (after // digit % base == 1)
        return is_division


def placement_code(placement: Placement) -> int:
    """Code of one placement."""
    if isinstance(placement, Shard):
        return 2 + placement.dim
    return 0 if placement == R else 1


def encode(placements: Placements, rank: int) -> int:
    """Code of placements on all axes, base 2 + rank. Example: (P, S(0)) of a matrix is 1 · 4 + 2 = 6."""
    return functools.reduce(lambda code, p: code * (2 + rank) + placement_code(p), placements, 0)


def decode(code: int, rank: int, num_axes: int) -> Placements:
    """Return the inverse of `encode`."""
    digits = []
    for _ in range(num_axes):
        code, d = divmod(code, 2 + rank)
        digits.append(d)
    return tuple(R if d == 0 else P if d == 1 else Shard(d - 2) for d in reversed(digits))


def step_bytes(
    shape: tuple[int, ...], item_bytes: int, placements: Placements, step: Step, sizes: tuple[int, ...]
) -> int:
    """B of a step's collective: bytes on one rank of the tensor that is whole on the step's axis and local on the other axes. Where
    parts differ in length, each is sent as long as the longest."""
    n = sizes[step.axis]
    whole = largest_local_shape(shape, (*placements[: step.axis], R, *placements[step.axis + 1 :]), sizes)
    cut = {p.dim for p in (step.src, step.dst) if isinstance(p, Shard)}
    return math.prod(-(-e // n) * n if d in cut else e for d, e in enumerate(whole)) * item_bytes


def splits_evenly(
    shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...], segments: Segments = ()
) -> bool:
    """Return whether every device gets an equal share of every sharded dim, and of each of its fused parts."""
    parts = dict(segments)
    for d, extent in enumerate(shape):
        n = math.prod(s for p, s in zip(placements, sizes, strict=True) if p == Shard(d))
        if n > 1 and any(e % n for e in parts.get(d, (extent,))):
            return False
    return True


@functools.lru_cache(maxsize=4096)
def all_redistributions(
    shape: tuple[int, ...],
    item_bytes: int,
    sizes: tuple[int, ...],
    links: tuple[AxisLink, ...],
    segments: Segments = (),
    share: float = 1.0,
    weight: bool = False,
    joint: JointLinks = (),
) -> Redistributions:
    """Return every redistribution of a tensor of global `shape` on a mesh of `sizes`. The tensor is a `share` of each message. Parts of a
    `weight` may differ in length (`needs_uneven_split`), and sums of its gradient over axes of `joint` are one all_reduce each."""
    rank, axes, joint = len(shape), len(sizes), joint if weight else ()
    single = _single_moves(rank, axes, tuple(d for d in range(rank) if shape[d] > 1))
    loose = weight and any(needs_uneven_split(shape, dict(segments), d, n) for d in range(rank) for n in sizes)
    even = np.array(
        [
            splits_evenly(shape, p, sizes, segments) or (loose and _is_uneven_split_allowed(shape, p, sizes, segments))
            for p in single.placements
        ]
    )
    n = len(even)
    cost = np.full((n, n), np.inf)
    first = np.full((n, n), -1, dtype=np.int32)
    np.fill_diagonal(cost, np.where(even, 0.0, np.inf))
    # [axis, code]: bytes of the tensor that is whole on the step's axis and local on the others, which is what its collective carries
    parts = np.where(single.sharded, np.array(sizes), 1)
    num_bytes = math.prod(shape) * item_bytes // np.stack([np.delete(parts, a, 1).prod(axis=1) for a in range(axes)])
    silent = []
    for (axis, kind), (src, dst) in single.by_kind.items():
        both_even = even[src] & even[dst]
        i, j = src[both_even], dst[both_even]
        size = num_bytes[axis, i]
        if loose:
            i, j, size = _uneven_moves(shape, item_bytes, sizes, axis, single.placements, i, j)
        cost[i, j] = STEP_S + (collective_times(kind, size, links[axis], share) if kind else 0.0)
        first[i, j] = j
        if kind is None or sizes[axis] == 1:  # one rank sends nothing
            silent.append((i, j))
    for summed_axes, link in joint:
        i = np.flatnonzero(even & single.partial[:, summed_axes].all(axis=1))
        j = i - sum((2 + rank) ** (axes - 1 - axis) for axis in summed_axes)  # codes: Partial is 1 and Replicate 0
        # Each of these axes would carry as much: the part that the other axes have left.
        cost[i, j] = STEP_S + collective_times("all_reduce", num_bytes[summed_axes[0], i], link, share)
        first[i, j] = j
    of_move = cost.copy()
    _all_pairs(cost, first, single, np.flatnonzero(even), {axis for summed_axes, _ in joint for axis in summed_axes})
    cost = _add_up_steps(cost, of_move, first)
    return Redistributions(rank, axes, cost, first, _reachable_without_messages(even, silent, axes))


def _add_up_steps(table: Floats, of_move: Floats, first: NDArray[np.int32]) -> Floats:
    """[from, to]: seconds of the steps that a run makes: `of_move` are those of each single move, and `first` the code after the first
    step. `table` has those of the paths from which `first` was put together.

    They may be fewer than these. Example: on 2 x 8, (P, P) to (S(1), R) was put together at (S(1), P), to which a path scatters on axis 1
    and fills in zeros again. A run that has scattered gathers.
    """
    grid: Ints = np.indices(first.shape)
    last, end = grid[0], grid[1]
    cost = np.zeros_like(of_move)
    for at, after in _follow_paths(first, last, end):
        cost += np.where(at != after, of_move[at, after], 0.0)
        last = after
    # A path that does not end at `dst` keeps the cost of the table.
    return np.where((last == end) & np.isfinite(table), cost, table)


def _follow_paths(
    first: NDArray[np.int32], src: NDArray[np.integer], dst: NDArray[np.integer]
) -> Iterator[tuple[NDArray[np.integer], NDArray[np.integer]]]:
    """Yield the codes before and after each step of the paths from `src` to `dst`, which stay where a path has ended."""
    at = np.array(src)
    # Some steps of equal cost lead in a circle, of pairs that no plan has.
    for _ in range(MAX_STEPS):
        moving = (at != dst) & (first[at, dst] >= 0)
        if not moving.any():
            return
        after = np.where(moving, first[at, dst], at)
        yield at, after
        at = after


def _is_uneven_split_allowed(
    shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...], segments: Segments
) -> bool:
    """Return whether each dim has equal parts, or is cut by one axis into parts that may differ."""
    fused = dict(segments)
    for d, extent in enumerate(shape):
        cuts = [n for p, n in zip(placements, sizes, strict=True) if p == Shard(d) and n > 1]
        equal = all(e % math.prod(cuts) == 0 for e in fused.get(d, (extent,)))
        if not equal and not (len(cuts) == 1 and needs_uneven_split(shape, fused, d, cuts[0])):
            return False
    return True


def _uneven_moves(
    shape: tuple[int, ...],
    item_bytes: int,
    sizes: tuple[int, ...],
    axis: int,
    placements: tuple[Placements, ...],
    src: Ints,
    dst: Ints,
) -> tuple[Ints, Ints, Ints]:
    """Return the moves on `axis` that can be made where parts may differ in length, and their bytes. Such parts are gathered, reduced or
    cut off, but not exchanged and not padded with zeros."""
    moves: list[tuple[int, int, int]] = []
    for i, j in zip(src.tolist(), dst.tolist(), strict=True):
        step = Step(axis, placements[i][axis], placements[j][axis])
        uneven = any(isinstance(p, Shard) and shape[p.dim] % sizes[axis] for p in (step.src, step.dst))
        if not uneven or step.collective in ("all_gather", "reduce_scatter") or step.src == R:
            moves.append((i, j, step_bytes(shape, item_bytes, placements[i], step, sizes)))
    table = np.array(moves, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _reachable_without_messages(even: Bools, silent: list[tuple[Ints, Ints]], axes: int) -> Bools:
    """[from, to]: whether moves without a message, the pairs `silent`, lead there; they move at most once on each axis.

    The placements from which one can be reached are the bits of a row, so that a move adds one row to another.
    """
    origins = np.packbits(np.diag(even), axis=1)
    for _ in range(axes if silent else 0):
        before = origins.copy()
        for src, dst in silent:
            np.bitwise_or.at(origins, dst, before[src])
    return np.unpackbits(origins, axis=1, count=len(even)).astype(bool).T


@dataclass(frozen=True, slots=True)
class _SingleMoves:
    """What does not depend on sizes: all placements by code; whether each shards, is Replicate, or is Partial on each axis ([code, axis]);
    and the codes (from, to) of every move on one axis, by that axis and its collective."""

    placements: tuple[Placements, ...]
    sharded: Bools
    whole: Bools
    partial: Bools
    by_kind: Mapping[tuple[int, CollectiveKind | None], tuple[Ints, Ints]]


@functools.lru_cache(maxsize=256)
def _single_moves(rank: int, axes: int, dims: tuple[int, ...]) -> _SingleMoves:
    every = tuple(decode(c, rank, axes) for c in range((2 + rank) ** axes))
    options: list[Placement] = [R, P, *(Shard(d) for d in dims)]
    pairs_by_kind: dict[tuple[int, CollectiveKind | None], list[tuple[int, int]]] = {}
    for i, here in enumerate(every):
        for axis, to in itertools.product(range(axes), options):
            if to != here[axis] and _moves_innermost(here, to, axis):
                j = encode((*here[:axis], to, *here[axis + 1 :]), rank)
                pairs_by_kind.setdefault((axis, Step(axis, here[axis], to).collective), []).append((i, j))
    by_kind = {key: (np.array(pairs)[:, 0], np.array(pairs)[:, 1]) for key, pairs in pairs_by_kind.items()}
    sharded = np.array([[isinstance(p, Shard) for p in here] for here in every]).reshape(len(every), axes)
    whole = np.array([[p == R for p in here] for here in every]).reshape(sharded.shape)
    return _SingleMoves(every, sharded, whole, ~(sharded | whole), by_kind)


def _moves_innermost(here: Placements, to: Placement, axis: int) -> bool:
    # Example: 8 rows in (S(0), S(0)) on 2 x 4. GPU (0, 2) has row 2 and GPU (1, 2) row 6. A gather on axis 0 would join these two, which do
    # not lie together; one on axis 1 joins rows 0 to 3.
    inner = here[axis + 1 :]
    return not any(isinstance(p, Shard) and p in inner for p in (here[axis], to))


def _all_pairs(
    cost: Floats,
    first: NDArray[np.int32],
    single: _SingleMoves,
    even: Ints,
    jointly: Collection[int],
) -> None:
    """Change `cost` and `first` [from, to] to those of the cheapest paths over the placements `even`.

    A sum over an axis stays one all_reduce, as a run sends it: a path from Partial or Replicate to Replicate on an axis does not
    shard on that axis in between. Over the axes `jointly` a path has one sum at most, of terms that were there when it began, and does not
    shard on them behind it. For a joint sum may be cheaper than two gathers or scatters, which runs do nevertheless.
    """
    among = np.ix_(even, even)
    least, start = cost[among], first[among]
    sharded, whole = single.sharded[even], single.whole[even]
    through, better = np.empty_like(least), np.empty(least.shape, dtype=bool)
    stays = [sharded[:, axis, None] | ~whole[None, :, axis] for axis in range(sharded.shape[1])]
    partial, sums = single.partial[even], np.zeros(least.shape, dtype=bool)
    for axis in jointly:
        sums |= partial[:, axis, None] & whole[None, :, axis]
    scatters = {axis: partial[:, axis, None] & sharded[None, :, axis] for axis in jointly}
    has_terms = {axis: partial[:, axis, None] | partial[None, :, axis] for axis in jointly}
    for k in range(len(even)):
        np.add(least[:, k, None], least[None, k, :], out=through)
        np.less(through, least, out=better)
        for axis in np.flatnonzero(sharded[k]).tolist():
            better &= stays[axis]
        if jointly:
            better &= ~(sums[:, k, None] & sums[None, k, :])
        for axis in jointly:
            if whole[k, axis]:
                better &= ~scatters[axis]
            elif partial[k, axis]:
                better &= has_terms[axis]
        if better.any():
            np.copyto(least, through, where=better)
            np.copyto(start, np.broadcast_to(start[:, k, None], start.shape), where=better)
    cost[among], first[among] = least, start
