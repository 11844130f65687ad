"""A block's network with two sums, seconds of communication and bytes, as far as it may lie between two corners of their hull.

Take two corners, A (faster) and B (smaller), and the price of the line through them. What takes fewer seconds than B and holds less
memory than A has a weighted sum below B's seconds plus A's bytes at this price. A state through which no whole assignment is below
this limit is in nothing between A and B, and is dropped. So corners and points that are looked for between A and B, and later
between two of these, meet fewer and fewer states, and most variables have one state left and are in no table.

Example: A = (0 s, 4 GB) and B = (4 s, 0 GB) have the price 1 s per GB and the limit 4 + 4 = 8. A state through which the least
weighted sum is 9 is dropped, although its point (5 s, 4 GB) might be all that is known of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner_core.cost import Component, Floats, Ints
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.convex_hull import Point, slope
from planner_core.search.algebra.elimination import Table
from planner_core.search.algebra.elimination_order import choose_elimination_order
from planner_core.search.algebra.pareto_points import Points, Pruning
from planner_core.search.candidates.clear_choices import without_clear_choices
from planner_core.search.network.folded import CompiledNetwork
from planner_core.search.units.tables import drop_fixed_variables

SUMS = [Component.COMMUNICATION, Component.AFTER_FORWARD]
SUM_TOLERANCE = 1e-9
"""Share by which equal sums may differ."""


@dataclass(frozen=True, slots=True)
class TwoSums:
    """The states of each variable that are left (`alive`, numbered as in the compiled block), and the tables over them, [sum, entry of
    their variables]. An entry that cannot be takes infinite seconds. A variable with one state is in no table. Variables whose choice is
    clear are gone, except those in `reported`."""

    alive: Mapping[str, Ints]
    tables: Sequence[Table]
    sequence: Sequence[str]
    reported: Sequence[str]

    @staticmethod
    def from_network(compiled: CompiledNetwork, reported: Sequence[str]) -> TwoSums:
        """Return the network of a whole block. The caller wants the states of the variables in `reported`."""
        tables = []
        for f in compiled.factors:
            sums = np.stack([f.costs.component(number) for number in SUMS])
            # Bytes stay 0: at a price of 0 an infinite number of bytes would give 0 * inf, which is not a number.
            sums[:, ~f.allowed] = [[np.inf], [0.0]]
            tables.append(drop_fixed_variables(f.vars, sums))
        alive = {v: np.arange(n) for v, n in compiled.sizes.items()}
        variables = [v for v, n in compiled.sizes.items() if n > 1]
        network = TwoSums(alive, tables, variables, reported)._without_clear_choices(variables)
        scopes = [names for names, _ in network.tables]
        return replace(
            network, sequence=choose_elimination_order({v: len(network.alive[v]) for v in network.sequence}, scopes, ())
        )

    def _without_clear_choices(self, changed: Iterable[str]) -> TwoSums:
        sizes = {v: len(self.alive[v]) for v in self.sequence}
        tables = without_clear_choices(self.tables, sizes, self.reported, changed)
        remaining = {v for names, _ in tables for v in names}
        alive = {v: states for v, states in self.alive.items() if v in remaining or v in self.reported}
        return TwoSums(alive, tables, [v for v in self.sequence if v in remaining], self.reported)

    def bucket_tree(self, price: float) -> BucketTree:
        """Return the network as one sum, in which a byte costs `price` seconds, weighed."""
        sizes = {v: len(self.alive[v]) for v in self.sequence}
        tree = BucketTree(sizes, [(names, t[0] + price * t[1]) for names, t in self.tables], self.sequence, ())
        tree.compute_margins()
        return tree

    def best_assignment(self, tree: BucketTree) -> tuple[dict[str, int], Floats]:
        """Return the states of the variables that are left at the least weighted sum, in the numbering of the compiled block; and its two
        sums."""
        states_of: dict[str, int] = {}
        # The other variables of a bucket are eliminated later, so in reverse order their states are known.
        for bucket in reversed(tree.buckets):
            states_of[bucket.name] = int(bucket.sums[tuple(states_of[o] for o in bucket.others)].argmin())
        sums = np.zeros(2)
        for names, t in self.tables:
            index: tuple[Any, ...] = (slice(None), *(states_of[v] for v in names))
            sums += t[index]
        return {v: int(states[states_of.get(v, 0)]) for v, states in self.alive.items()}, sums

    def prune_between(self, tree: BucketTree, limit: float) -> TwoSums:
        """Return the part without the states through which every assignment exceeds the limit, and without choices that are
        clear among the states that are left. `tree` is the bucket tree of this part."""
        pick = {}
        for bucket, margin in zip(tree.buckets, tree.margins, strict=False):
            least = margin.reshape(-1, margin.shape[-1]).min(axis=0)
            if least.max() > limit:
                pick[bucket.name] = np.flatnonzero(least <= limit)
        alive = {v: states[pick[v]] if v in pick else states for v, states in self.alive.items()}
        tables = [
            _select_states(names, t, pick) if any(v in pick for v in names) else (names, t) for names, t in self.tables
        ]
        pruned = TwoSums(alive, tables, [v for v in self.sequence if len(alive[v]) > 1], self.reported)
        changed = {v for names, _ in self.tables if any(v in pick for v in names) for v in names}
        return pruned._without_clear_choices(v for v in pruned.sequence if v in changed)

    def points_between(self, left: Point, right: Point) -> list[tuple[tuple[int, ...], float, float]]:
        """Return what takes fewer seconds than the corner `right` and holds fewer bytes than the corner `left`: the states of
        `reported`, and the two sums. Dominated points may be among them. Raises TooManyPoints."""
        price = slope(left, right)
        tree = self.bucket_tree(price)
        constant = sum((t for scope, t in self.tables if not scope), start=np.zeros(2))
        pruning = Pruning(limit_between(left, right), np.array([max(right[0], 1e-9) * SUM_TOLERANCE, 1e-2]))
        points = tree.enumerate_points([t for t in self.tables if t[0]], [], pruning)
        return self._reported_points(tree, points, constant)

    def _reported_points(
        self, tree: BucketTree, points: Points, constant: Floats
    ) -> list[tuple[tuple[int, ...], float, float]]:
        count = len(points.cost)
        states_of, _ = tree.assignments(np.arange(count))
        zeros = np.zeros(count, dtype=np.int64)
        reported = zip(*(self.alive[n][states_of.get(n, zeros)].tolist() for n in self.reported), strict=True)
        return [(state, float(s), float(b)) for state, (s, b) in zip(reported, points.cost + constant, strict=True)]


def limit_between(left: Point, right: Point) -> float:
    """Return the weighted sum that nothing reaches which takes fewer seconds than `right` and holds fewer bytes than `left`."""
    return right[0] + slope(left, right) * left[1]


def _select_states(names: tuple[str, ...], table: Floats, pick: Mapping[str, Ints]) -> Table:
    for axis, v in enumerate(names):
        if v in pick:
            table = table.take(pick[v], axis + 1)
    return drop_fixed_variables(names, table)
