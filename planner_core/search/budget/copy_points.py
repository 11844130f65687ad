"""Points of a run of copies of one block (see `gap_closing` and `algebra.pareto_points`).

A point is one way to run some copies: its time (or communication) and its memory. Points of 2 copies are made of two points of
1 copy, points of 4 copies of two points of 2, and so on. So the work grows with the logarithm of the number of copies.

    points of 2m copies [k, l] = undominated of  { a + kept[i] + b :  a a point of m copies [k, i],  b one of m copies [i, l] }

Example: one copy runs in 3 s with 4 GB or in 5 s with 1 GB, and there is one state k. Two copies have the points (6, 8), (8, 5)
and (10, 2); (8, 5) stands for both orders. With 6 GB for two copies the answer is (8, 5): the copies differ. Four copies have
(12, 16), (14, 13), (16, 10), (18, 7) and (20, 4). Five copies are four and one. With 11 GB for five copies the answer is
(18, 7) + (3, 4) = (21, 11): two copies run in 3 s and three in 5 s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from planner_core.cost import Component, Floats, Ints
from planner_core.search.algebra.bucket_tree import BucketTree, WeightedBounds, group_points
from planner_core.search.algebra.pareto_points import (
    FormingPoints,
    Points,
    TablesTooLarge,
    TooManyPoints,
    combine_points,
    concatenate_points,
)
from planner_core.search.budget.goal import Goal
from planner_core.search.network.search_cache import Copy
from planner_core.search.objective import EVEN_SHARES
from planner_core.search.repeated_block import Chain, in_chain_states
from planner_core.search.units.pruned_unit import PrunedUnit, prune_by_limit
from planner_core.search.units.unit_points import sums_around

MAX_SHARED_AT_FIRST = 24
"""Shared states that are computed in the first attempt at the whole gap."""
MAX_SHARED = 200
"""Shared states of one run that are compared to close a gap."""
MAX_LONGEST_PARTS_LOG2 = 6
"""A run is put together of fewer than 2 to this power parts of the greatest length."""
EQUAL_MARGINS_SHARE = 1e-12
"""The share of the limit up to which margins are equal: of equal runs they differ by the order in which costs were added."""
NUMBERS_PER_CHUNK = 4_000_000
"""Numbers that one step of a (min, +) product holds at once (32 MB)."""


class CopyPoints(Protocol):
    """The points of one copy by entry of its view, and how it runs in each."""

    points: Points

    def copy(self, point: int) -> Copy:
        """Return how the copy runs in one point."""
        ...


MakeCopyPoints = Callable[[Chain, Goal, int, Floats], CopyPoints]
"""Makes the points of one copy of a chain in a shared state, with the least weighted cost of the whole model through each entry."""


class RunPoints:
    """The points of one run, by entry of the top variables that it touches, and the way back to each copy.

    `margin` has the shape of the chain's own table: the least weighted cost of the whole model through each entry. `make_copy_points` makes
    the points of one copy: by default all of them (`AllCopyPoints`).
    """

    points_by_row: Points
    """The points by entry of the chain's own table, with rows, after `points`."""
    block: CopyPoints
    lines: dict[int, _EqualCopies | _DifferingCopies]
    forming: FormingPoints

    def __init__(
        self, chain: Chain, tree: BucketTree, goal: Goal, make_copy_points: MakeCopyPoints | None = None
    ) -> None:
        self.chain, self.goal, self.compiled = chain, goal, chain.compiled
        self.make_copy_points = make_copy_points or AllCopyPoints
        self.names, self.entries = chain.top_entries
        self.margin = chain.margins(tree)
        self.shape = self.margin.shape

    @property
    def states_within_limit(self) -> list[int]:
        """The shared states within the limit."""
        return [int(s) for s in np.flatnonzero((self.margin <= self.goal.limit).any(axis=(1, 2)))]

    def compute_shared_states(self) -> bool:
        """Compute the shared states within the limit. Returns False if all were computed already. Raises TooManyPoints."""
        # A table over the whole boundary leaves no shared state to choose: it is the block's own.
        if self.chain.is_whole:
            return False
        if self.goal.sample_size:
            # A sample keeps the shared states through which the least whole cost leads.
            least = self.margin.min(axis=(1, 2))
            self.margin[np.argsort(least)[max(1, self.goal.sample_size // 4) :]] = np.inf
        states = self.states_within_limit
        uncomputed = [s for s in states if s not in self.chain.powers]
        if len(states) > MAX_SHARED or (self.goal.gives_up_early and len(uncomputed) > MAX_SHARED_AT_FIRST):
            raise TooManyPoints(f"{len(states)} states of shared tensors")
        for s in uncomputed:
            self.chain.compute_power(s)
        return bool(uncomputed)

    @property
    def kind(self) -> tuple[int, bytes]:
        """Runs of one kind have the same points: as many copies of one block, with the same margins.

        Example: layers with and without a window alternate in 16 runs each. Where the model's best states repeat, the runs in the middle
        have the same margins, up to rounding.
        """
        return id(self.chain.bounds), np.round(self.margin / (EQUAL_MARGINS_SHARE * self.goal.limit)).tobytes()

    def points(self, same_kind: RunPoints | None = None) -> Points:
        """Return the points of the run, by entry of the top variables that it touches. `same_kind`: a run of this kind that has them.
        Raises TooManyPoints."""
        if same_kind is not None:
            self.points_by_row = same_kind.points_by_row
            if self.chain.is_whole:
                self.block = same_kind.block
            else:
                self.lines, self.forming = same_kind.lines, same_kind.forming
        elif self.chain.is_whole:
            self.block = self.make_copy_points(self.chain, self.goal, 0, self.margin)
            self.points_by_row = self.goal.as_rows(self.block.points)
        else:
            make_line = _EqualCopies if self.chain.problem.uniform and self.chain.count > 1 else _DifferingCopies
            self.lines = {s: make_line(self, s) for s in self.states_within_limit}
            forming = concatenate_points([line.enumerate_points() for line in self.lines.values()])
            points, self.forming = group_points(forming, forming.row, self.margin.size, self.goal.pruning)
            self.points_by_row = self.goal.as_rows(points)
        return self.points_by_row.for_entries(self.entries)

    def copy_points(self) -> list[CopyPoints]:
        """Return the points of one copy, by shared state, after `points`."""
        return [self.block] if self.chain.is_whole else [line.block for line in self.lines.values()]

    def between_costs(self) -> Floats:
        """[state, sum]: what the tensor between two copies adds to a point."""
        costs = np.zeros((self.shape[1], 1 + len(self.goal.ends)))
        if Component.AFTER_FORWARD in self.goal.ends:
            costs[:, 1 + self.goal.ends.index(Component.AFTER_FORWARD)] = self.chain.between_bytes
        return costs

    def copies(self, point: int) -> list[Copy]:
        """Return how each copy runs in one point."""
        if self.chain.is_whole:
            return [self.block.copy(point)]
        s = int(self.forming.row[point]) // (self.shape[1] * self.shape[2])
        return self.lines[s].copies(int(self.forming.parts[0][point]))


class AllCopyPoints:
    """The points of one copy, in all its variants, in shared state `s`. `margin` is the least weighted cost of the whole model
    through each entry of the copy's view."""

    def __init__(self, chain: Chain, goal: Goal, s: int, margin: Floats) -> None:
        self.unit, self.view = chain.unit, chain.view(s)
        fixed, bound = dict(self.view.fixed), chain.unit.bound(self.view)
        # margin = bound + rest: `rest` is the least cost of all that lies outside of this copy.
        rest = margin - np.where(np.isfinite(bound), bound, 0.0)
        self.trees: list[tuple[str, PrunedUnit, BucketTree]] = []
        no_points = np.zeros(0, dtype=np.int64)
        parts = [FormingPoints(no_points, np.zeros((0, 1 + len(goal.ends))), np.zeros(0), [no_points, no_points])]
        for number, variant in enumerate(chain.unit.variants):
            # A variant's own least, `tree.root`, may be above the block's bound, the least of all variants: then less room is left to it.
            part, tree, bounds = self._prune_variant(variant, goal, fixed, rest)
            self.trees.append((variant, part, tree))
            if part.is_empty:
                continue
            points = tree.enumerate_points(goal.row_tables(part.factors), [], goal.row_pruning, bounds)
            entry, index = _points_by_entry(points, np.arange(tree.root.size))
            cost = goal.sums_of_rows(points.cost[index])
            # The tree cut at weighted sums, which are bounds of the maxima. Now the true costs are known, and what exceeds the limit
            # goes.
            excess = cost @ goal.prices - bound.ravel()[entry]
            parts.append(FormingPoints(entry, cost, excess, [np.full(len(index), number), index]))
        forming = concatenate_points(parts)
        forming = forming.select(forming.excess + margin.ravel()[forming.row] <= goal.limit)
        self.points, self.forming = group_points(forming, forming.row, bound.size, goal.pruning)

    def _prune_variant(
        self, variant: str, goal: Goal, fixed: dict[str, int], rest: Floats
    ) -> tuple[PrunedUnit, BucketTree, WeightedBounds | None]:
        """Return one variant without what exceeds the limit: its network and tree, weighed at some shares, and its bounds at the
        other shares."""
        shares = self.unit.shares.get(variant, [EVEN_SHARES])[-1]
        sequence = self.unit.solver(variant, shares).elimination_order(self.view.free, fixed)
        part = PrunedUnit.from_network(self.unit.variants[variant], sequence, fixed, keep=self.view.free)
        tree, bounds = part.bucket_tree(goal.objective, shares, rest), None
        if not goal.objective.is_sum:
            with contextlib.suppress(TablesTooLarge):
                sums = sums_around(shares, goal.time_sums, goal.prices[1:].tolist())
                part, bounds = prune_by_limit(part, tree, sums, goal.limit, rest)
                tree = tree if part.is_empty else part.bucket_tree(goal.objective, shares, rest)
        return part, tree, bounds

    def copy(self, point: int) -> Copy:
        """Return how the copy runs in one point."""
        number, index = (int(part[point]) for part in self.forming.parts)
        variant, part, tree = self.trees[number]
        return self.unit.copy_in_states(variant, part.full_states(tree.assignment(index)[0]))


class _EqualCopies:
    """The points of a run in one shared state, if all its copies are equal. One copy has as many points."""

    def __init__(self, copies: RunPoints, s: int) -> None:
        self.count, self.s, self.between = copies.chain.count, s, copies.between_costs()
        chain, limit = copies.chain, copies.goal.limit
        # All copies run alike, so an excess counts once a copy: with the limit 22, the margin 20 and 4 copies, one may exceed by 0.5.
        margin = limit - (limit - copies.margin[s]) / chain.count
        self.links = _matrix_entries(chain)
        self.block = copies.make_copy_points(chain, copies.goal, s, _in_block_states(chain, self.links, margin))

    def enumerate_points(self) -> FormingPoints:
        """Return the points of the whole run. Their `row` is the flat index of (shared state, entry, exit)."""
        n, count, link = len(self.links), self.count, self.block.points
        between = self.between * (count - 1)
        state, index = _points_by_entry(link.for_entries(self.links.diagonal()), np.arange(n))
        return FormingPoints(
            self.s * n * n + state * n + state,
            link.cost[index] * count + between[state],
            link.excess[index] * count,
            [index],
        )

    def copies(self, point: int) -> list[Copy]:
        """Return how each copy runs in one point of the run."""
        return [self.block.copy(point)] * self.count


def _matrix_entries(chain: Chain) -> Ints:
    """[state k, state l]: the entry (flat) of the block's own table that leads from k to l, or -1. k and l are states of the tensor
    that links copies."""
    c, axes = chain.compiled, chain.boundary
    shape = len(c.alive[axes.entry]), len(c.alive[axes.exit])
    wide = in_chain_states(np.arange(shape[0] * shape[1], dtype=float).reshape(shape), axes, c)
    return np.where(np.isfinite(wide), wide, -1.0).astype(np.int64)


def _in_block_states(chain: Chain, links: Ints, table: Floats) -> Floats:
    """Return a table [state k, state l] as a table [entry, exit] in the block's own numbering. `links` is what `_matrix_entries`
    returned."""
    c, axes = chain.compiled, chain.boundary
    block_table = np.full((len(c.alive[axes.entry]), len(c.alive[axes.exit])), np.inf)
    block_table.reshape(-1)[links[links >= 0]] = table[links >= 0]
    return block_table


class _DifferingCopies:
    """The points of a run in one shared state, if its copies may differ.

    Points of 2^j copies [k, l], from state k of the linking tensor to state l, are made of two points of 2^(j-1) copies. The run
    is put together of such parts, the longest first: 13 copies are 8 + 4 + 1. A point is dropped if its weighted cost plus the
    least cost of the rest of the model exceeds the limit. For parts, the rest is the least over all places in the run where the
    part may stand (`least_outside`). When the run is put together, the place is known, and so is the rest (`least_after`).
    """

    def __init__(self, copies: RunPoints, s: int) -> None:
        self.s, self.goal, self.between_costs = s, copies.goal, copies.between_costs()
        self.chain = chain = copies.chain
        self.powers = [chain.copy_matrix(s)]
        # powers[j] [k, l] costs 2^j copies with the tensors between them:  powers[j + 1] = (powers[j] + between) ⊗ powers[j]
        while 2 ** len(self.powers) <= chain.count:
            self.powers.append(_min_plus(self.powers[-1] + chain.between, self.powers[-1]))
        self.n = len(self.powers[0])
        margin = copies.margin[s]
        within = margin <= self.goal.limit
        self.entries = np.flatnonzero(within.any(axis=1))
        # whole cost through (entry, exit) = cost of the run + `outside`
        outside = np.where(within, margin - np.where(within, chain.cost[s], 0.0), np.inf)[self.entries]
        self.least_before, self.least_after = self._least_before(), self._least_after(outside)
        self.links = _matrix_entries(chain)
        self.block = copies.make_copy_points(
            chain, copies.goal, s, _in_block_states(chain, self.links, self.powers[0] + self.least_outside(0))
        )
        self.halves: list[list[Ints]] = [[]]
        self.steps: list[tuple[int, list[Ints]]] = []

    def _least_before(self) -> Floats:
        """[p, entry, k]: the least weighted cost of the first p copies and of what is kept after each, from `entry` to state k."""
        least = np.full((self.chain.count, len(self.entries), self.n), np.inf)
        least[0, np.arange(len(self.entries)), self.entries] = 0.0
        for j, cost in enumerate(self.powers):
            m = 2**j
            # Copies 0 to 4 are copy 0 and then four: least[1 + 4] = least[1] ⊗ (powers[2] + between). So all p need log2(count) products.
            least[m : 2 * m] = _min_plus(least[: min(m, len(least) - m)], cost + self.chain.between)
        return least

    def _least_after(self, outside: Floats) -> Floats:
        """[q, entry, l]: the least weighted cost of the model without the first q copies, if these start at `entry` and end at l."""
        least = np.full((self.chain.count, *outside.shape), np.inf)
        least[0] = outside  # first by the number of copies that are left
        for j, cost in enumerate(self.powers):
            m = 2**j
            least[m : 2 * m] = _min_plus(least[: min(m, len(least) - m)], (self.chain.between[:, None] + cost).T)
        return np.concatenate([np.full((1, *outside.shape), np.inf), least[::-1]])

    def least_outside(self, j: int) -> Floats:
        """[k, l]: the least weighted cost of the model without 2^j copies that lead from k to l, over the places where they may stand."""
        m = 2**j
        # The longest parts come first, so a part of m copies begins at a multiple of m: 13 = 8 + 4 + 1 begin at 0, 8 and 12.
        starts = np.arange(0, self.chain.count // m * m, m)
        least = np.full((self.n, self.n), np.inf)
        before, after = self.least_before[starts].reshape(-1, self.n), self.least_after[starts + m].reshape(-1, self.n)
        size = max(1, NUMBERS_PER_CHUNK // self.n**2)
        for i in range(0, len(before), size):
            least = np.minimum(least, (before[i : i + size, :, None] + after[i : i + size, None, :]).min(axis=0))
        return least

    def enumerate_points(self) -> FormingPoints:
        """Return the points of the whole run. Their `row` is the flat index of (shared state, entry, exit)."""
        # long parts may stand in several places, which weakens `least_outside`: so they may be many; a sample takes few
        top = max(0, len(self.powers) - (1 if self.goal.sample_size else MAX_LONGEST_PARTS_LOG2))
        parts = [self.block.points.for_entries(self.links.ravel())]
        for j in range(top):
            parts.append(self._double_copies(parts[j], j))
        num_copies = 2**top
        forming = _points_from(parts[top], self.entries, self.n)
        forming = forming.select(
            forming.cost @ self.goal.prices + self.least_after[num_copies].ravel()[forming.row] <= self.goal.limit
        )
        self.steps = [(top, forming.parts)]
        # 13 copies with top = 2: three parts of 4, one there already, then the bit 1. So j is 2, 2, 0.
        for j in [top] * (self.chain.count // num_copies - 1) + [
            j for j in reversed(range(top)) if self.chain.count >> j & 1
        ]:
            num_copies += 2**j
            forming = self._append_copies(forming, parts[j], j, self.least_after[num_copies], num_copies)
            self.steps.append((j, forming.parts))
        a, b = self.entries[forming.row // self.n], forming.row % self.n
        # Excess is measured from the chain's own table, since the top network has counted that as the least of the run.
        excess = forming.cost @ self.goal.prices - self.chain.cost[self.s][a, b]
        return FormingPoints(self.s * self.n**2 + a * self.n + b, forming.cost, excess, [np.arange(len(a))])

    def _double_copies(self, half: Points, j: int) -> Points:
        """Return the points of 2^(j+1) copies, by (k, l), from those of 2^j copies."""
        first = _points_from(half, np.arange(self.n), self.n)
        doubled = self._append_copies(first, half, j, self.least_outside(j + 1), 2 ** (j + 1))
        # `parts` names rows of `first`, and these name points of `half`.
        doubled.parts[0] = first.parts[0][doubled.parts[0]]
        doubled.excess = doubled.cost @ self.goal.prices - self.powers[j + 1].ravel()[doubled.row]
        points, doubled = group_points(doubled, doubled.row, self.n**2, self.goal.pruning)
        self.halves.append(doubled.parts)
        return points

    def _append_copies(
        self, forming: FormingPoints, part: Points, j: int, beyond: Floats, num_copies: int
    ) -> FormingPoints:
        """Add 2^j copies to the points `forming`, which then have `num_copies` copies. Rows are (a, state), where a is a start of the run.

        `beyond` [a, l]: the least weighted cost of the rest of the model, without the point and without the copies added.
        """
        n, pruning = self.n, self.goal.pruning
        # [a, state, l]: all that is not in the point
        least = self.chain.between[:, None] + self.powers[j] + beyond[:, None, :]
        # what the point costs + the tensor kept after it + the least of the copies to add + the least of all the rest
        total = (forming.cost @ self.goal.prices)[:, None] + least.reshape(-1, n)[forming.row]
        index, to = np.nonzero(total <= pruning.limit)
        state = forming.row[index] % n
        # the limit was applied to `total`, so these points need no excess of their own
        # Row (a, k) becomes row (a, i) for each state i to which the copies may lead: only the last digit of the row changes.
        step = FormingPoints(
            forming.row[index] - state + to,
            forming.cost[index] + self.between_costs[state],
            np.zeros(len(index)),
            [index],
        )
        # `RunPoints.points` samples the whole run, with its own excess (`group_points`), so it is not sampled here.
        pruning = replace(pruning, sample_size=0) if num_copies == self.chain.count else pruning
        step = combine_points(step, part, state * n + to, pruning.limit - total[index, to], pruning)
        step.excess[:] = 0.0
        return step

    def copies(self, point: int) -> list[Copy]:
        """Return how each copy runs in one point of the run."""
        path: list[int] = []
        for j, parts in reversed(self.steps):
            path = self._single_copies(j, int(parts[-1][point])) + path
            point = int(parts[0][point])
        # Copies that run alike are one object, so that totals can count them.
        copy_of = {i: self.block.copy(i) for i in set(path)}
        return [copy_of[i] for i in path]

    def _single_copies(self, j: int, point: int) -> list[int]:
        """Return the points of the single copies that make up a point of 2^j copies."""
        if j == 0:
            return [point]
        # Each point of 2^j copies names its two halves, down to single copies.
        first, second = (int(part[point]) for part in self.halves[j])
        return self._single_copies(j - 1, first) + self._single_copies(j - 1, second)


def _min_plus(a: Floats, b: Floats) -> Floats:
    """Return the (min, +) product [..., l]: min over k of a[..., k] + b[k, l]."""
    flat = a.reshape(-1, len(b))
    product = np.empty((len(flat), b.shape[1]))
    size = max(1, NUMBERS_PER_CHUNK // b.size)
    for i in range(0, len(flat), size):
        # Some rows at a time: all at once would form rows * k * l numbers.
        product[i : i + size] = (flat[i : i + size, None, :] + b.T[None]).min(axis=2)
    return product.reshape(*a.shape[:-1], b.shape[1])


def _points_from(points: Points, starts: Ints, n: int) -> FormingPoints:
    """Return the points by (k, l) whose k is in `starts`. Their `row` is the flat index of (number of k in `starts`, l)."""
    row, index = _points_by_entry(points, (starts[:, None] * n + np.arange(n)).ravel())
    return FormingPoints(row, points.cost[index], np.zeros(len(index)), [index])


def _points_by_entry(points: Points, entries: Ints) -> tuple[Ints, Ints]:
    """Return all points of `entries`: the number of its entry among these, and its index, for each point."""
    counts = (points.last - points.first)[entries]
    index = np.concatenate([np.arange(points.first[e], points.last[e]) for e in entries]).astype(np.int64)
    return np.repeat(np.arange(len(entries)), counts), index
