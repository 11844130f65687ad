"""Elimination that carries sets of points instead of numbers: the exact minimum of one sum under limits on other sums.

A point stands for one assignment of the variables below a bucket. It holds the sums of that assignment, for example seconds
and bytes. A point is dropped for one of two reasons:

1. Dominance. Another point of the same entry is no worse in every sum.
2. The limit. The point cannot be part of a solution whose *weighted* cost is at most `limit`. The weighted problem was solved
   before (`BucketTree`), so the least cost through each entry is known exactly. The *excess* of a point is its weighted cost
   less the least one of its entry. Excesses add up on the way to the root:

       weighted cost of a whole assignment = least weighted cost + sum of the excesses of its parts  ≤  limit

With the prices of the Lagrange bound as weights, and the incumbent's cost as limit, few points are left.

Example: seconds and GB, 1 s per GB. An entry has the points (3, 4), (5, 1), (6, 3) and (9, 0). (6, 3) is dominated by (5, 1).
The weighted costs of the others are 7, 6 and 9, so the least is 6 and the excesses are 1, 0 and 3. If the least whole cost
through the entry is 20 and the limit is 22, then an excess of at most 2 is allowed, and (9, 0) is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from planner_core.core import PlannerError
from planner_core.cost import Bools, Floats, Ints
from planner_core.search.algebra.distinct import sorted_distinct

MAX_POINTS = 400_000
"""Points that are held at once (about 0.1 GB); a search that needs more gives up."""
MAX_ENTRIES = 3e7
"""Entries of all tables of one tree, kept twice (half a gigabyte)."""
MAX_PROOF_POINTS = 2_000_000
"""Points that one search may form to close a gap: some seconds. They are counted and not timed, so that every machine finds the
same plan."""
MAX_UNIT_POINTS = 400_000
"""Points that may be formed to settle units of one model on one mesh: without prices of memory, and at all prices together."""
SKYLINE_CHUNK = 256
"""Points that are compared with each other at once, by a table with an entry for each pair of them."""
POINTS_PER_CHUNK = 200_000
"""Points that are formed at once before the dominated ones are dropped."""
NUM_NEIGHBOURS = 8
"""Each point is first compared with this many points before it, for all groups at once; then group by group."""
COMPARISONS_PER_POINT = 200
"""Pairs of points that are compared in the time in which one point is formed."""
INT64_LIMIT = 2**62
"""Whole numbers below this fit into 64 bits."""


class TooManyPoints(PlannerError):
    """More points or states lie within the limit than the search may compare."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} lie within the gap, more than are compared")


class TablesTooLarge(TooManyPoints):
    """The tables of the network are too large to be stored, whatever the limit."""


@dataclass
class PointAllowance:
    """The number of points that a search may still form. Points are counted and not timed, so that every machine finds the same plan."""

    remaining: int = MAX_PROOF_POINTS

    @contextmanager
    def portion(self, max_points: int) -> Iterator[PointAllowance]:
        """Lend at most `max_points` points to one piece of the work. The points that it forms are taken from this allowance."""
        granted = max(0, min(max_points, self.remaining))
        portion = PointAllowance(granted)
        try:
            yield portion
        finally:
            self.remaining -= granted - max(portion.remaining, 0)

    def spend(self, num_points: int) -> None:
        """Take `num_points` points. Raises TooManyPoints if fewer are left; the allowance is then empty, and not negative by
        as many points, since these points are not formed."""
        self.remaining = max(self.remaining - num_points, -1)
        if self.remaining < 0:
            raise TooManyPoints("the partial plans of this part")


@dataclass(frozen=True)
class Pruning:
    """The rules by which points are dropped.

    A point is dropped if its weighted cost exceeds `limit`, or if it is dominated once the sums are rounded to multiples of `steps`
    [sum]. With a `sample_size` above 0, it is also dropped if it is not in the sample (see `sample_points`). TooManyPoints is raised
    for more than `max_points` points at once, and when the `points` is used up.
    """

    limit: float
    steps: Floats
    max_points: int = MAX_POINTS
    sample_size: int = 0
    points: PointAllowance = field(default_factory=PointAllowance)
    sampled_sum: int = 1
    """The sum whose range a sample covers."""

    def undominated(self, forming: FormingPoints) -> FormingPoints:
        """Return the points of each row that are not dominated, in order of rows."""
        if (np.diff(forming.row) > 0).all():
            return forming
        forming = forming.select(undominated_points(forming.row, forming.cost, self.steps, self.points))
        return (
            forming.select(sample_points(forming, self.sample_size, self.sampled_sum)) if self.sample_size else forming
        )


@dataclass(frozen=True)
class SumCaps:
    """Further limits on points: the sums of a point, weighted with `prices` [sum, bound], may be at most `room` [entry, bound]."""

    prices: Floats
    room: Floats

    def within(self, forming: FormingPoints) -> FormingPoints:
        """Return the points that are within all limits."""
        return forming.select((self.prices.T @ forming.cost.T <= self.room[forming.row].T).all(axis=0))


@dataclass
class Points:
    """The points of a table. Entry e has the points first[e] to last[e] - 1, by rising excess.

    `cost` [point, sum] are the sums of each point. `excess` [point] is its weighted cost less the least one of its entry.
    """

    first: Ints
    last: Ints
    cost: Floats
    excess: Floats

    def for_entries(self, entries: Ints) -> Points:
        """Return the same points under other entries: the new entry i has the points of `entries[i]`. Entry -1 has none."""
        exists = entries >= 0
        return Points(
            np.where(exists, self.first[entries], 0), np.where(exists, self.last[entries], 0), self.cost, self.excess
        )


@dataclass
class FormingPoints:
    """Points that are being formed: `row` [point] is the entry of the bucket, `cost` [point, sum] and `excess` [point] as in
    `Points`, and `parts` says for each child of the bucket which of the child's points is in each point."""

    row: Ints
    cost: Floats
    excess: Floats
    parts: list[Ints] = field(default_factory=list)

    def select(self, index: Any) -> FormingPoints:
        """Return only the points at `index`."""
        return FormingPoints(self.row[index], self.cost[index], self.excess[index], [p[index] for p in self.parts])


def concatenate_points(parts: Sequence[FormingPoints]) -> FormingPoints:
    """Concatenate the points of all `parts`."""
    columns = zip(*(p.parts for p in parts), strict=True)
    return FormingPoints(
        np.concatenate([p.row for p in parts]),
        np.concatenate([p.cost for p in parts]),
        np.concatenate([p.excess for p in parts]),
        [np.concatenate(c) for c in columns],
    )


def combine_points(
    left: FormingPoints, child: Points, child_entry: Ints, room: Floats, pruning: Pruning, caps: SumCaps | None = None
) -> FormingPoints:
    """Combine each point of `left` with the points of one entry of `child`: sums and excesses are added.

    `child_entry` [point of mine] names the child's entry. A pair is formed if its excess is at most `room` [point of mine] and all
    `caps` allow it. Returns what `pruning` leaves of each row, in order of rows. Raises TooManyPoints.
    """
    first, end = child.first[child_entry], child.last[child_entry]
    # A child's points lie by rising excess, so those that fit are a range from its first one on.
    # What a point already exceeds is not left to the child: with room 2 and an excess of 1.5, the child may add 0.5.
    counts = _bisect(child.excess, first, end, room - left.excess) - first
    parts = []
    for some in _chunks(counts):
        pruning.points.spend(int(counts[some].sum()))
        # All pairs at once. Points 0, 1, 2 of `left` with 2, 0 and 1 fitting points that begin at 4, 6 and 7 of the child:  take = (0, 0,
        # 2) and position = (4, 5, 7).
        take = np.repeat(np.arange(some.start, some.stop), counts[some])
        start = np.cumsum(counts[some]) - counts[some]
        position = np.arange(len(take)) - np.repeat(start - first[some], counts[some])
        formed = FormingPoints(
            left.row[take],
            left.cost[take] + child.cost[position],
            left.excess[take] + child.excess[position],
            [*(p[take] for p in left.parts), position],
        )
        parts.append(pruning.undominated(caps.within(formed) if caps else formed))
        if sum(len(p.row) for p in parts) > pruning.max_points:
            # A point of one chunk may dominate points of another, so what is too much may still become less.
            parts = [pruning.undominated(concatenate_points(parts))]
            if len(parts[0].row) > pruning.max_points:
                raise TooManyPoints(f"{len(parts[0].row)} partial plans")
    return parts[0] if len(parts) == 1 else pruning.undominated(concatenate_points(parts))


def _chunks(counts: Ints) -> list[slice]:
    """Split the points into ranges that form about `POINTS_PER_CHUNK` pairs each. `counts` [point] are the pairs of one point."""
    ends = np.flatnonzero(np.diff(np.cumsum(counts) // POINTS_PER_CHUNK)) + 1
    return [slice(int(i), int(j)) for i, j in pairwise([0, *ends, len(counts)])]


def _bisect(values: Floats, first: Ints, last: Ints, limits: Floats) -> Ints:
    """[range]: where the values that are at most `limits` [range] end, in each range first to last of rising `values`."""
    low, high = first.copy(), last.copy()
    while True:
        open_ = low < high
        if not open_.any():
            return low
        middle = (low + high) // 2
        fits = open_ & (values[np.minimum(middle, len(values) - 1)] <= limits)
        # Invariant: values before `low` are at most the limit, values from `high` on are above it.
        low = np.where(fits, middle + 1, low)
        high = np.where(open_ & ~fits, middle, high)


def undominated_points(group: Ints, cost: Floats, steps: Floats, points: PointAllowance | None) -> Ints:
    """Return indices of the points that are not dominated in their `group` [point], ordered by group. `cost` is [point, sum].

    Sums are rounded to multiples of `steps` [sum], so that rounding errors do not separate equal points. Of two points that tie in the
    first sum both may stay. Comparisons are taken from `points`. Raises TooManyPoints if it is used up.
    """
    if not len(group):
        return np.zeros(0, dtype=np.int64)
    keys = np.round(cost / steps).astype(np.int64)
    # From 0 on, so that group and sum fit into one sort key, and bands of groups do not overlap.
    keys -= keys.min(axis=0)
    # With two sums, sorted by the first, the front is a staircase: one pass. With more sums, pairs must be compared.
    if keys.shape[1] == 2:
        order = _sort_by_group(group, keys[:, 0])
        return order[_staircase(group[order], keys[order, 1])]
    order = np.lexsort((*keys.T[::-1], group))
    g, k = group[order], keys[order]
    order, g, k = _drop_if_neighbour_dominates(order, g, k)
    ends = np.flatnonzero(np.diff(g, append=g[-1] + 1)) + 1
    sizes = np.diff(ends, prepend=0)
    keep = np.ones(len(g), dtype=bool)
    for end, size in zip(ends, sizes, strict=True):
        if size > NUM_NEIGHBOURS:
            if points is not None:
                points.spend(size * size // COMPARISONS_PER_POINT)
            # The first sum need not be compared: points are sorted by it, so a later point is never smaller in it.
            keep[end - size : end] = _skyline(k[end - size : end, 1:])
    return order[keep]


def sample_points(forming: FormingPoints, count: int, sampled_sum: int) -> Ints:
    """Return the indices of at most about 2 * `count` points of each row. `forming` is in order of rows.

    The range of sum number `sampled_sum` is cut into `count` equal parts, and the point of least excess is taken from each part. The
    first of these parts is cut into `count` parts again, and sampled in the same way. So sums of two sampled points lie close
    to each other.
    """
    if not len(forming.row):
        return np.zeros(0, dtype=np.int64)
    starts = np.flatnonzero(np.diff(forming.row, prepend=-1))
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(forming.row)))
    low = np.minimum.reduceat(forming.cost[:, sampled_sum], starts)[group]
    span = np.maximum.reduceat(forming.cost[:, sampled_sum], starts)[group] - low
    position = (forming.cost[:, sampled_sum] - low) / np.where(span > 0, span, 1.0) * count
    order = np.argsort(forming.excess, kind="stable")
    samples = []
    # The second round looks at the first part only, where it is `count` times finer: that is where the least of the sum lies.
    for scale in (1, count):
        order = order[position[order] * scale < count + 1]
        part = group * (count + 1) + np.floor(position * scale)
        samples.append(order[np.unique(part[order], return_index=True)[1]])
    return sorted_distinct(np.concatenate(samples))


def _sort_by_group(group: Ints, first: Ints) -> Ints:
    """Return the order by group, then by a sum that is not negative. It is one sort if both fit into one number."""
    span = int(first.max()) + 1
    if span * (int(group.max()) + 1) < INT64_LIMIT:
        return np.argsort(group * span + first)
    return np.lexsort((first, group))


def _drop_if_neighbour_dominates(order: Ints, g: Ints, k: Ints) -> tuple[Ints, Ints, Ints]:
    """Drop points that one of the NUM_NEIGHBOURS points before them dominates. This drops most dominated points at little cost."""
    alive, columns = np.ones(len(g), dtype=bool), np.ascontiguousarray(k[:, 1:].T)
    for distance in range(1, min(NUM_NEIGHBOURS, len(g) - 1) + 1):
        # A neighbour of another group cannot dominate; the first sum is at most as large by the sort.
        beaten = g[distance:] == g[:-distance]
        for column in columns:
            beaten &= column[:-distance] <= column[distance:]
        alive[distance:] &= ~beaten
    return order[alive], g[alive], k[alive]


def _staircase(g: Ints, second: Ints) -> Bools:
    """[point]: whether its second sum is below all before it in its group. Points are sorted by group and first sum; the second
    sum is not negative."""
    block = np.cumsum(np.diff(g, prepend=g[0]) != 0)
    if (int(second.max()) + 1) * (int(block[-1]) + 1) >= INT64_LIMIT:
        second = np.unique(second, return_inverse=True)[1]
    # Example: the second sums (5, 3, 4) of group 0 and (6, 2) of group 1. In bands of 7 they are (5, 3, 4) and (-1, -5). The running
    # minimum is 5, 3, 3, -1, -5, so only the 4 is not below all before it.
    falling = second - block * (int(second.max()) + 1)  # groups lie in bands, each below the one before
    least = np.minimum.accumulate(falling)
    keep: Bools = np.r_[True, falling[1:] < least[:-1]]
    return keep


def _skyline(points: Ints) -> Bools:
    """[point]: whether no point before it is at most as large in all columns. Points are sorted by a sum that is not among these."""
    keep = np.zeros(len(points), dtype=bool)
    columns = np.ascontiguousarray(points.T)
    kept_columns = columns[:, :0]
    for start in range(0, len(points), SKYLINE_CHUNK):
        end = min(start + SKYLINE_CHUNK, len(points))
        part, where = columns[:, start:end], np.arange(start, end)
        if kept_columns.shape[1]:
            alive = ~_at_most(kept_columns, part).any(axis=0)
            part, where = part[:, alive], where[alive]
        # Only an earlier point can dominate: its first sum is not larger, since points are sorted by it. So above the diagonal is enough.
        alive = ~np.triu(_at_most(part, part), 1).any(axis=0)
        keep[where[alive]] = True
        kept_columns = np.concatenate([kept_columns, part[:, alive]], axis=1)
    return keep


def _at_most(first: Ints, second: Ints) -> Bools:
    """[i, j]: whether point i of `first` is at most as large in all columns as point j of `second`. Both are [column, point]."""
    at_most: Bools = first[0][:, None] <= second[0]
    for column, other_column in zip(first[1:], second[1:], strict=True):
        at_most &= column[:, None] <= other_column
    return at_most
