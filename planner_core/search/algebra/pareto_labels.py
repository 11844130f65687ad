"""Elimination that carries sets of labels instead of numbers: the exact minimum of one sum under limits on others.

A label is what one way of filling in the variables below a bucket costs, as a vector of sums. Of two labels of one
entry the one that is worse in every sum is dropped (Pareto dominance), and so is every label that cannot be part of
a solution whose *weighted* cost is at most `limit`: the weighted problem was solved before (`BucketTree`), so the least cost
through each entry is known exactly, and a label's excess over it adds up on the way to the root. With the
multipliers of the Lagrange bound as weights, and the best solution known as limit, few labels are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner_core.core import PlannerError
from planner_core.search.algebra.elimination import Floats

Ints = NDArray[np.int64]
MAX_LABELS = 400_000
"""Labels held at once; beyond it the search gives up (about 0.1 GB)."""
MAX_ENTRIES = 3e7
"""Entries of all tables of one tree, kept twice (half a gigabyte)."""
MAX_WORK = 1_000_000
"""Labels that one search may form to close a gap: some seconds. Counted, not timed, so that every machine finds the same."""
CHUNK = 200_000
"""Labels that are formed at once, before those that others beat are dropped."""
NEAR = 8
"""Predecessors that each label is compared with at once, before groups are gone through one by one."""
COMPARED = 200
"""Pairs of labels that are compared in the time in which one is formed."""
FITS = 2**62
"""What a whole number of 64 bits holds."""


class TooMuch(PlannerError):
    """More lies within the limit than can be compared; `what` says of what."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} lie within the gap, more than are compared")


class TooLarge(TooMuch):
    """The tables of the network are too large to keep, whatever the limit."""


@dataclass
class Allowance:
    """The work that is left, in labels."""

    left: int = MAX_WORK

    def take(self, labels: int) -> None:
        """Raises TooMuch where none is left."""
        self.left -= labels
        if self.left < 0:
            raise TooMuch("the partial plans of this part")


@dataclass(frozen=True)
class Pruning:
    """What labels are dropped: those beyond the `limit` of the weighted cost, those that others beat in whole `steps` of each sum,
    and with `few` all but a `sample`. More than `most` at once, or than the `work` allows, are too much."""

    limit: float
    steps: Floats
    most: int = MAX_LABELS
    few: int = 0
    work: Allowance = field(default_factory=Allowance)

    def keep(self, found: Partial) -> Partial:
        """The undominated ones of each row, in order of rows."""
        if (np.diff(found.row) > 0).all():
            return found
        found = found.take(undominated(found.row, found.cost, self.steps, self.work))
        return found.take(sample(found, self.few)) if self.few else found


@dataclass(frozen=True)
class Caps:
    """Further bounds on labels: their sums at each of several `prices` [sum, bound] may be at most `room` [entry, bound]."""

    prices: Floats
    room: Floats

    def keep(self, found: Partial) -> Partial:
        """The labels that stay below all of them."""
        return found.take((found.cost @ self.prices <= self.room[found.row]).all(axis=1))


@dataclass
class Labels:
    """Labels by entry of a table: entry e has those from first[e] to last[e] - 1, by rising excess. `cost` is [label, sum];
    `excess` is what each costs more, weighted, than the best of its entry."""

    first: Ints
    last: Ints
    cost: Floats
    excess: Floats

    def at(self, entries: Ints) -> Labels:
        """The same labels under other entries; entry -1 has none."""
        there = entries >= 0
        return Labels(
            np.where(there, self.first[entries], 0), np.where(there, self.last[entries], 0), self.cost, self.excess
        )


@dataclass
class Partial:
    """Labels on the way: of which entry of the bucket, their cost and excess, and which label of each child they take."""

    row: Ints
    cost: Floats
    excess: Floats
    parts: list[Ints] = field(default_factory=list)

    def take(self, index: Any) -> Partial:
        """Only those at `index`."""
        return Partial(self.row[index], self.cost[index], self.excess[index], [p[index] for p in self.parts])


def concatenate(parts: Sequence[Partial]) -> Partial:
    """All of them, one after another."""
    columns = zip(*(p.parts for p in parts), strict=True)
    return Partial(
        np.concatenate([p.row for p in parts]), np.concatenate([p.cost for p in parts]),
        np.concatenate([p.excess for p in parts]), [np.concatenate(c) for c in columns],
    )  # fmt: skip


def join(
    mine: Partial, child: Labels, entry: Ints, room: Floats, pruning: Pruning, caps: Caps | None = None
) -> Partial:
    """Every label with every label of its entry of `child` (`entry`: one per label) whose excesses together stay within the
    label's `room`, and that all `caps` allow; of each row what is left after `pruning`, in order of rows. Raises TooMuch."""
    first, end = child.first[entry], child.last[entry]
    counts = _bisect(child.excess, first, end, room - mine.excess) - first
    parts = []
    for some in _chunks(counts):
        pruning.work.take(int(counts[some].sum()))
        take = np.repeat(np.arange(some.start, some.stop), counts[some])
        start = np.cumsum(counts[some]) - counts[some]
        position = np.arange(len(take)) - np.repeat(start - first[some], counts[some])
        formed = Partial(
            mine.row[take], mine.cost[take] + child.cost[position], mine.excess[take] + child.excess[position],
            [*(p[take] for p in mine.parts), position],
        )  # fmt: skip
        parts.append(pruning.keep(caps.keep(formed) if caps else formed))
        if sum(len(p.row) for p in parts) > pruning.most:
            parts = [pruning.keep(concatenate(parts))]
            if len(parts[0].row) > pruning.most:
                raise TooMuch(f"{len(parts[0].row)} partial plans")
    return parts[0] if len(parts) == 1 else pruning.keep(concatenate(parts))


def _chunks(counts: Ints) -> list[slice]:
    """Ranges of labels whose `counts` sum up to about `CHUNK`, or that are one label."""
    ends = np.flatnonzero(np.diff(np.cumsum(counts) // CHUNK)) + 1
    return [slice(int(i), int(j)) for i, j in pairwise([0, *ends, len(counts)])]


def _bisect(values: Floats, first: Ints, last: Ints, most: Floats) -> Ints:
    """Per range of rising `values`: the end of those that are at most `most`."""
    low, high = first.copy(), last.copy()
    while True:
        open_ = low < high
        if not open_.any():
            return low
        middle = (low + high) // 2
        fits = open_ & (values[np.minimum(middle, len(values) - 1)] <= most)
        low = np.where(fits, middle + 1, low)
        high = np.where(open_ & ~fits, middle, high)


def undominated(group: Ints, cost: Floats, steps: Floats, work: Allowance | None = None) -> Ints:
    """Indices of labels of which no other of their group equals or beats one in every sum, ordered by group; of two that tie in
    the first sum both may stay.

    Sums are compared in whole `steps`, so that rounding does not tell equal labels apart. Comparisons of many sums are taken
    from `work`; raises TooMuch where none is left.
    """
    if not len(group):
        return np.zeros(0, dtype=np.int64)
    keys = np.round(cost / steps).astype(np.int64)
    keys -= keys.min(axis=0)
    if keys.shape[1] == 2:
        order = _by_group(group, keys[:, 0])
        return order[_stairs(group[order], keys[order, 1])]
    order = np.lexsort((*keys.T[::-1], group))
    g, k = group[order], keys[order]
    order, g, k = _near(order, g, k)
    ends = np.flatnonzero(np.diff(g, append=g[-1] + 1)) + 1
    sizes = np.diff(ends, prepend=0)
    keep = np.ones(len(g), dtype=bool)
    for end, size in zip(ends, sizes, strict=True):
        if size > NEAR:
            if work is not None:
                work.take(size * size // COMPARED)
            keep[end - size : end] = _skyline(k[end - size : end, 1:])
    return order[keep]


def sample(found: Partial, count: int) -> Ints:
    """Indices of at most 2 * `count` labels of each row, in order of which they stand: in each of `count` equal parts of the range
    of the second sum the one of least excess; and as many in the first of these parts, so that two such samples add up to
    sums that lie close to each other."""
    if not len(found.row):
        return np.zeros(0, dtype=np.int64)
    starts = np.flatnonzero(np.diff(found.row, prepend=-1))
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(found.row)))
    low = np.minimum.reduceat(found.cost[:, 1], starts)[group]
    span = np.maximum.reduceat(found.cost[:, 1], starts)[group] - low
    place = (found.cost[:, 1] - low) / np.where(span > 0, span, 1.0) * count
    order = np.argsort(found.excess, kind="stable")
    kept = []
    for scale in (1, count):
        order = order[place[order] * scale < count + 1]
        part = group * (count + 1) + np.floor(place * scale)
        kept.append(order[np.unique(part[order], return_index=True)[1]])
    return np.unique(np.concatenate(kept))


def _by_group(group: Ints, first: Ints) -> Ints:
    """Order by group, then by a sum that is not negative: one sort, where both fit one number."""
    span = int(first.max()) + 1
    if span * (int(group.max()) + 1) < FITS:
        return np.argsort(group * span + first)
    return np.lexsort((first, group))


def _near(order: Ints, g: Ints, k: Ints) -> tuple[Ints, Ints, Ints]:
    """Without those that one of the few before them beats: most of the dominated, cheaply."""
    alive = np.ones(len(g), dtype=bool)
    for back in range(1, min(NEAR, len(g) - 1) + 1):
        beaten = (g[back:] == g[:-back]) & (k[:-back, 1:] <= k[back:, 1:]).all(axis=1)
        alive[back:] &= ~beaten
    return order[alive], g[alive], k[alive]


def _stairs(g: Ints, second: Ints) -> NDArray[np.bool_]:
    """Of labels sorted by group and first sum: those whose second sum, which is not negative, is below all before them."""
    block = np.cumsum(np.diff(g, prepend=g[0]) != 0)
    if (int(second.max()) + 1) * (int(block[-1]) + 1) >= FITS:
        second = np.unique(second, return_inverse=True)[1]
    falling = second - block * (int(second.max()) + 1)  # groups lie in bands, each below the one before
    least = np.minimum.accumulate(falling)
    keep: NDArray[np.bool_] = np.r_[True, falling[1:] < least[:-1]]
    return keep


def _skyline(points: Ints, chunk: int = 256) -> NDArray[np.bool_]:
    """Of points sorted by a first sum: those that none before them beats in the two others."""
    keep = np.zeros(len(points), dtype=bool)
    kept = points[:0]
    for start in range(0, len(points), chunk):
        part = points[start : start + chunk]
        alive = ~(kept[:, None, :] <= part[None]).all(axis=2).any(axis=0)
        part, where = part[alive], start + np.flatnonzero(alive)
        beats = (part[:, None, :] <= part[None]).all(axis=2)
        alive = ~np.triu(beats, 1).any(axis=0)
        keep[where[alive]] = True
        kept = np.concatenate([kept, part[alive]])
    return keep


# --- trees of buckets --------------------------------------------------------------------------------
