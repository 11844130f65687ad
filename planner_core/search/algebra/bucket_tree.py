"""A network solved by elimination with every table kept, and points that are carried through it.

Elimination makes one *bucket* per variable: it adds up the tables in which the variable stands and sends the minimum over the
variable (the *message*) to the bucket of the next variable in that message's scope. The buckets form a tree, whose root holds
the table over the variables that are kept. From the root back to the leaves, `compute_margins` finds for every entry of every bucket
the least cost of a whole assignment through that entry (its *margin*):

    margin[entry] = bucket.total[entry] + (least cost of all that is outside of the bucket, given the entry's other variables)

Example: the variables a and b with two states each, tables [a] = (0, 5) and [a, b] = ((1, 4), (2, 0)). Eliminating b gives
the bucket total ((1, 4), (2, 0)) and the message (1, 0). At a the sums are (0 + 1, 5 + 0), so the optimum is 1. The margins
of b's bucket are ((1, 4), (7, 5)): the best assignment with a = 0 and b = 1 costs 4. With a limit of 4, only the first row is
looked at: points of a = 1 are never formed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner_core.cost import Floats, Ints
from planner_core.search.algebra.elimination import Table, add_tables
from planner_core.search.algebra.least_sum import least_over
from planner_core.search.algebra.pareto_points import (
    MAX_ENTRIES,
    FormingPoints,
    Points,
    Pruning,
    SumCaps,
    TablesTooLarge,
    combine_points,
)


@dataclass
class Bucket:
    """One eliminated variable: `sums` [others..., variable] is the sum of its tables, `message` [others...] its minimum over the
    variable, and `parent` the number of the bucket that gets the message (-1: the root)."""

    name: str
    others: tuple[str, ...]
    sums: Floats
    message: Floats
    parent: int

    @property
    def scope(self) -> tuple[str, ...]:
        """Variables of `sums`."""
        return (*self.others, self.name)


class BucketTree:
    """A network solved by elimination with every table kept, so that the least cost through any entry is known.

    `root` is the table over `keep`. `margins` (after `compute_margins`) has one table per bucket, and that of the root last. Raises
    TablesTooLarge.
    """

    def __init__(
        self, sizes: Mapping[str, int], tables: Iterable[Table], sequence: Sequence[str], keep: Sequence[str]
    ) -> None:
        self.sizes, self.keep = dict(sizes), tuple(keep)
        self.rank = {v: i for i, v in enumerate(sequence)}
        pool: list[list[Table]] = [[] for _ in range(len(sequence) + 1)]
        for table in tables:
            pool[self.bucket_of(table[0])].append(table)
        self.buckets: list[Bucket] = []
        entries = 0.0
        for i, v in enumerate(sequence):
            others = tuple(dict.fromkeys(o for scope, _ in pool[i] for o in scope if o != v))
            # All buckets stay, so it is their sum that counts here; plain elimination only looks at the largest.
            entries += float(np.prod([float(sizes[o]) for o in (*others, v)]))
            if entries > MAX_ENTRIES:
                raise TablesTooLarge(f"{entries:.2g} entries of tables")
            total = add_tables(pool[i], (*others, v), sizes)
            bucket = Bucket(v, others, total, total.min(axis=-1), self.bucket_of(others))
            pool[bucket.parent].append((others, bucket.message))
            self.buckets.append(bucket)
        self.root = add_tables(pool[-1], self.keep, sizes)
        self.margins: list[Floats] = []
        self.children: list[list[tuple[int, tuple[str, ...], Points]]] = []
        self.points = [FormingPoints(np.zeros(0, dtype=np.int64), np.zeros((0, 0)), np.zeros(0))] * (len(sequence) + 1)

    def bucket_of(self, scope: Iterable[str]) -> int:
        """Return the number of the bucket that a table over `scope` belongs to: that of its first eliminated variable. -1 is the root."""
        return min((self.rank[v] for v in scope if v in self.rank), default=-1)

    def compute_margins(self, root: Floats | None = None) -> None:
        """Compute `margins`: the least cost of a whole assignment through every entry of every bucket.

        `root`: the margins of the root, if more than this network lies outside; by default the root's own table.
        """
        self.margins = [np.zeros(0)] * len(self.buckets) + [self.root if root is None else root]
        # A message goes to a later bucket or to the root. So in reverse order the parent's margins are there before they are read.
        for i in reversed(range(len(self.buckets))):
            b = self.buckets[i]
            # The parent's margin counts this bucket's message once; without it, it is what all the rest costs at least. In the example:
            # the root's margins (1, 5) less the message (1, 0) are (0, 5), so row a = 1 of b's bucket is (2, 0) + 5 = (7, 5).
            # An infinite message is not taken off: infinity less infinity is not a number.
            outside = self.margin_through(b.parent, b.others) - np.where(np.isfinite(b.message), b.message, 0.0)
            self.margins[i] = b.sums + outside[..., None]

    def scope_of(self, i: int) -> tuple[str, ...]:
        """Return the variables of a bucket, or of the root (-1)."""
        return self.keep if i == -1 else self.buckets[i].scope

    def margin_through(self, i: int, names: Sequence[str]) -> Floats:
        """Return the least cost through each entry of a table over `names`; these variables all stand in bucket `i`."""
        scope = self.scope_of(i)
        # Variables of the bucket that the caller does not name take their best states.
        least = least_over(self.margins[i], [a for a, v in enumerate(scope) if v not in names])
        kept_scope = [v for v in scope if v in names]
        table: Floats = least.transpose([kept_scope.index(v) for v in names])
        return table

    def enumerate_points(
        self,
        factors: Iterable[Table],
        point_sets: Iterable[tuple[tuple[str, ...], Points]],
        pruning: Pruning,
        bounds: WeightedBounds | None = None,
    ) -> Points:
        """Return all points of every entry of the root that are within the limit and not dominated.

        `factors`: tables [sum, entry of their variables]. `point_sets`: points of other networks, by entry of the variables that are
        named. `bounds`: other weighted sums of this network (without `point_sets`) that bound the cost. Raises TooManyPoints if a table
        has too many points.
        """
        tables_by_bucket: list[list[Table]] = [[] for _ in range(len(self.buckets) + 1)]
        self.children = [[] for _ in tables_by_bucket]
        for names, cost in factors:
            tables_by_bucket[self.bucket_of(names)].append((names, cost))
        for k, (names, points) in enumerate(point_sets):
            self.children[self.bucket_of(names)].append((-1 - k, names, points))
        for i, b in enumerate(self.buckets):
            forming = self._bucket_points(i, tables_by_bucket[i], pruning, bounds)
            # excess of an entry = its total less the least over the bucket's variable: with a = 0, entry b = 1 has 4 - 1 = 3. Summed
            # along the tree, excesses are the whole cost less the optimum, so `margin + excess ≤ limit` is exact, not a bound.
            below = np.where(np.isfinite(b.message), b.message, 0.0)[..., None]
            forming.excess = forming.excess + (b.sums - below).ravel()[forming.row]
            points, self.points[i] = group_points(forming, forming.row // self.sizes[b.name], b.message.size, pruning)
            self.children[b.parent].append((i, b.others, points))
        forming = self._bucket_points(-1, tables_by_bucket[-1], pruning, bounds)
        points, self.points[-1] = group_points(forming, forming.row, self.root.size, pruning)
        return points

    def _bucket_points(
        self, i: int, tables: Sequence[Table], pruning: Pruning, bounds: WeightedBounds | None
    ) -> FormingPoints:
        """Return the points of bucket `i`: each entry within the limit, combined with the points of the bucket's children."""
        scope, margin = self.scope_of(i), self.margins[i].ravel()
        # Entries through which no whole assignment is within the limit are never opened.
        rows = np.flatnonzero(margin <= pruning.limit)
        states_of = dict(zip(scope, np.unravel_index(rows, self.margins[i].shape) if scope else (), strict=True))
        cost = np.zeros((len(rows), len(pruning.steps)))
        for names, table in tables:
            entries: tuple[Any, ...] = (slice(None), *(states_of[v] for v in names))
            cost += table[entries].T.reshape(-1, len(pruning.steps))
        forming = FormingPoints(rows, cost, np.zeros(len(rows)))
        caps: SumCaps | None = None
        if bounds is not None:
            caps = SumCaps(bounds.prices, np.full((self.margins[i].size, bounds.prices.shape[1]), -np.inf))
            # The same test for each other weighted sum: what is left of the limit when all of the rest costs its least under that sum.
            # `margins` counts the least of the children, so each child's message is given back before its points are added.
            caps.room[rows] = pruning.limit - bounds.margins[i][rows] + cost @ bounds.prices
        for child, names, points in self.children[i]:
            entry = np.zeros(self.margins[i].size, dtype=np.int64)
            for v in names:
                # The flat index of the child's entry, first variable first: states (2, 1) of sizes (3, 4) are 2 * 4 + 1 = 9.
                entry[rows] = entry[rows] * self.sizes[v] + states_of[v]
            if caps is not None and bounds is not None:
                caps.room[rows] += bounds.messages[child][entry[rows]]
            forming = combine_points(
                forming, points, entry[forming.row], pruning.limit - margin[forming.row], pruning, caps
            )
        return forming

    def assignment(self, point: int) -> tuple[dict[str, int], dict[int, int]]:
        """Return the state of every variable in one point of the root, and for each of the point sets (by number) the point taken
        from it."""
        states, points_of_sets = self.assignments(np.array([point]))
        return {v: int(s[0]) for v, s in states.items()}, {k: int(s[0]) for k, s in points_of_sets.items()}

    def assignments(self, points: Ints) -> tuple[dict[str, Ints], dict[int, Ints]]:
        """`assignment` of each of the root's `points` [point], for all of them at once: arrays [point]."""
        states: dict[str, Ints] = {}
        points_of_sets: dict[int, Ints] = {}
        pending = [(-1, points)]
        while pending:
            i, points = pending.pop()
            bucket_points = self.points[i]
            if self.scope_of(i):
                entry_states = np.unravel_index(bucket_points.row[points], self.margins[i].shape)
                states.update(zip(self.scope_of(i), entry_states, strict=True))
            for (child, _, _), part in zip(self.children[i], bucket_points.parts, strict=True):
                if child < 0:
                    points_of_sets[-1 - child] = part[points]
                else:
                    pending.append((child, part[points]))
        return states, points_of_sets


SUM_NUMBER = "·"
"""The variable of `WeightedBounds` that numbers the weighted sums."""


class WeightedBounds:
    """Several weighted sums of one network, each weighed as the network itself: `prices` [row, sum].

    The networks are one network with one more variable, the number of the sum, which every table has and which is kept.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        tables: Sequence[Table],
        sequence: Sequence[str],
        prices: Floats,
        keep: tuple[str, ...] = (),
        rest: Floats | None = None,
    ) -> None:
        """`tables`: of all sums, with SUM_NUMBER as last variable. `rest` [keep...]: the least cost of all outside of the network.
        Raises TablesTooLarge."""
        self.prices = prices
        # One elimination instead of one for each sum: the sums differ in numbers only.
        self.tree = BucketTree({**sizes, SUM_NUMBER: prices.shape[1]}, tables, sequence, (*keep, SUM_NUMBER))
        self.tree.compute_margins(None if rest is None else add_outside_cost(self.tree.root, rest[..., None]))
        buckets = self.tree.buckets
        self.margins = [
            self._one_column_per_sum(self.tree.margins[i], self.tree.scope_of(i)) for i in (*range(len(buckets)), -1)
        ]
        """[entry, sum] for each bucket, and for the root last."""
        self.messages = [self._one_column_per_sum(b.message, b.others) for b in buckets]
        """[entry, sum] for each bucket."""

    def _one_column_per_sum(self, table: Floats, scope: tuple[str, ...]) -> Floats:
        count = self.prices.shape[1]
        if SUM_NUMBER not in scope:  # a variable that stands in no table
            return np.broadcast_to(table.reshape(-1, 1), (table.size, count))
        return np.moveaxis(table, scope.index(SUM_NUMBER), -1).reshape(-1, count)


def add_outside_cost(root: Floats, rest: Floats) -> Floats:
    """Return the margins of a root, if all outside of the network costs `rest` at least."""
    return np.where(np.isfinite(root), rest + np.where(np.isfinite(root), root, 0.0), np.inf)


def group_points(forming: FormingPoints, group: Ints, entries: int, pruning: Pruning) -> tuple[Points, FormingPoints]:
    """Drop dominated points of each group, and sort the others by group and excess.

    `group` [point] is the group of each point of `forming`, one of `entries`. Returns the points by group, and the rows of
    `forming` in the same order.
    """
    undominated = pruning.undominated(FormingPoints(group, forming.cost, forming.excess, [np.arange(len(group))]))
    # `combine_points` takes the points that fit as one range, so those of an entry must lie by rising excess.
    undominated = undominated.select(np.lexsort((undominated.excess, undominated.row)))
    ends = np.searchsorted(undominated.row, np.arange(entries + 1))
    return Points(ends[:-1], ends[1:], undominated.cost, undominated.excess), forming.select(undominated.parts[0])
