"""Close the gap that prices of memory leave: find the least value within a budget exactly, by points (see `copy_points`).

A price m of memory gives a lower bound, and there is an incumbent. A better plan takes fewer seconds than the incumbent and
holds at most the budget, so

    seconds + m · memory  <  incumbent's seconds + m · budget  =  limit

All points within this limit are carried through the blocks, through their copies, and through the top network. Copies may
differ. The best point within the budget is the optimum. If no point is within the budget, the incumbent is the optimum.

If that is too much, a sample of the points brings a better incumbent first, without proof. Then the limit is raised from the
bound on: all plans up to it are enumerated, and what is not found there is proven not to exist.

Example: the bound is 11 s, the incumbent takes 14 s, the price is 1 s per GB and the budget 8 GB. The whole gap is the limit
14 + 8 = 22. If it holds too many points, the first part goes up to 11 + 3/64 + 8 = 19.05 and proves a bound of 11.05 s, the
next one is four times as wide, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner_core.cost import Component, Floats
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.elimination import Table
from planner_core.search.algebra.pareto_points import PointAllowance, TablesTooLarge, TooManyPoints
from planner_core.search.budget.copy_points import MakeCopyPoints, RunPoints
from planner_core.search.budget.goal import Goal
from planner_core.search.folded_solver import FoldedTables, make_assignment, tables_at
from planner_core.search.network.folded import Problem
from planner_core.search.network.search_cache import Assignment
from planner_core.search.objective import TIE, Objective

FIRST_SHARE, WIDENING = 64, 4
"""If the whole gap holds too much: 1/FIRST_SHARE of it is enumerated first, and each next part is WIDENING times as wide."""
MAX_PART_POINTS, MAX_FIRST_POINTS = 1_500_000, 100_000
"""Points that may be formed for one part of the gap, and for the first attempt at the whole gap."""
MAX_GROWTH, MIN_PART_POINTS = 6, 30_000
"""A part of the gap may form MAX_GROWTH times the points of the part before, or MIN_PART_POINTS; more say that it is too wide."""
SAMPLE_SIZES = (16, 48)
"""Points of each group in the first sample, and in the second one if a gap is left."""
MAX_FAILURES = 3
"""After this many parts that held too many points, the rest of the gap is left open."""


def enumerate_points(
    folded: FoldedTables, goal: Goal, make_copy_points: MakeCopyPoints | None = None, extra_tables: Sequence[Table] = ()
) -> ModelPoints | None:
    """Return all undominated points of the whole model that are within the goal's limit; None if there are none.

    `folded` is under the goal's objective. `make_copy_points` is that of `RunPoints`. `extra_tables` are further tables over variables of
    the top block. Raises TooManyPoints.
    """
    problem = folded.problem
    # A shared state within the limit may have a bound only. It is computed, which can raise its entry and so the whole tree; then what
    # is within the limit is asked again. The loop ends when every state within the limit is exact.
    while True:
        tree = folded.weighed_tree(extra_tables)
        if not np.isfinite(tree.root) or tree.root > goal.limit:
            return None
        copies = [RunPoints(run, tree, goal, make_copy_points) for run in folded.runs]
        if not sum(c.compute_shared_states() for c in copies):
            break
    first_of_kind: dict[tuple[int, bytes], RunPoints] = {}
    sets = []
    for c in copies:
        first = first_of_kind.setdefault(c.kind, c)
        sets.append((c.names, c.points(None if first is c else first)))
    # A run of 32 copies is one set of points over the top variables that it touches, so the top network carries it like any table.
    points = tree.enumerate_points(goal.row_tables(problem.top.factors), sets, goal.row_pruning)
    return ModelPoints(problem, goal.objective, tree, copies, goal.sums_of_rows(points.cost))


@dataclass
class ModelPoints:
    """Points of a whole model: `cost` [point, sum], and the way back to the assignment of each point."""

    problem: Problem
    objective: Objective
    tree: BucketTree
    copies: list[RunPoints]
    cost: Floats

    def assignment(self, point: int) -> Assignment:
        """Return the assignment of one point."""
        states, run_points = self.tree.assignment(point)
        calls = [copy for k, c in enumerate(self.copies) for copy in c.copies(run_points[k])]
        return make_assignment(self.problem, self.objective, [c.chain for c in self.copies], states, calls)


@dataclass
class GapClosing:
    """The search for the least value of `objective` within `budget` bytes per GPU, given a lower `bound` and an incumbent `best`.

    The objective has the prices of memory that gave the bound. Assignments that cost more than `max_seconds` are ignored.
    `points` are the points that may be formed.
    """

    problem: Problem
    objective: Objective
    budget: float
    best: Assignment
    bound: float
    max_seconds: float = float("inf")
    points: PointAllowance = field(default_factory=PointAllowance)

    def __post_init__(self) -> None:
        self.folded = tables_at(self.problem, self.objective)
        solution = self.folded.best_assignment()  # makes the bounds exact where the best assignments use them
        if solution is not None:
            # Lagrange: a plan that fits pays at most price · budget for its memory, so 19 priced seconds are at least 19 - 1 · 8 = 11 s.
            self.bound = max(self.bound, solution.bound - self._price * self.budget)
            if max(solution.totals[list(self._ends_by_price)]) <= self.budget:
                self._consider(solution)

    @property
    def _price(self) -> float:
        """Seconds per byte of the budget."""
        return self.objective.after_forward + self.objective.after_backward

    @property
    def target(self) -> float:
        """A better assignment costs less than this; it is the incumbent's value less what counts as a tie."""
        return min(self.best.seconds, self.max_seconds) * (1 - TIE / 2)

    def run(self, stop: Callable[[], bool], only_at_once: bool = False) -> None:
        """Enumerate the gap at once. If that is too much: sample it for better incumbents, and enumerate growing parts of it.

        With `only_at_once`, only the first attempt is made.

        Ends when the gap is closed, when `stop` returns True, or when the gap holds too much.
        """
        try:
            if self.bound >= self.target or self._enumerate_up_to(self.target, gives_up_early=True) or only_at_once:
                return
            # A better incumbent narrows the gap from above, a part that was enumerated narrows it from below.
            for sample_size in SAMPLE_SIZES:
                continues = self._sample_for_better(sample_size, stop)
                self._enumerate_growing_parts(stop)
                if not continues:
                    return
        except TablesTooLarge:
            return

    def _enumerate_growing_parts(self, stop: Callable[[], bool]) -> None:
        """Enumerate parts of the gap that grow, from the bound on. Raises TablesTooLarge."""
        # Invariant: no plan below `self.bound` is better than the incumbent. With the bound 11 and the target 14 the parts end at 11.05,
        # 11.23, 11.98 and 14: each is four times as wide as the one before, until one holds too much.
        width, failures, narrow, max_points = (self.target - self.bound) / FIRST_SHARE, 0, False, MAX_PART_POINTS
        while self.bound < self.target and failures < MAX_FAILURES and self.points.remaining >= 0 and not stop():
            before, points_left = self.target, self.points.remaining
            if self._enumerate_up_to(min(before, self.bound + width), max_points=max_points):
                # Points grow with the width of a part, but not suddenly: a part with six times the points of the one before is too wide.
                max_points = min(
                    MAX_PART_POINTS, max(MIN_PART_POINTS, MAX_GROWTH * (points_left - self.points.remaining))
                )
                # Once a part was too wide, the width only falls: a part that is too wide costs all of its points and proves nothing.
                width *= 1 if narrow else WIDENING
                # A better incumbent made the gap smaller, and a part of the old width might now be all of it.
                if self.target < before:
                    width = min(width, (self.target - self.bound) / WIDENING)
            else:
                # A part that stopped at a smaller allowance was only too wide. Only one that used the full allowance counts as a failure.
                failures += max_points == MAX_PART_POINTS
                narrow = True
                width /= WIDENING

    def _enumerate_up_to(self, limit: float, gives_up_early: bool = False, max_points: int = MAX_PART_POINTS) -> bool:
        """Enumerate all assignments within `limit`, which then is the bound. Returns False if they have more than `max_points` points.

        Raises TablesTooLarge.
        """
        try:
            self._consider(self._best_within(limit, gives_up_early=gives_up_early, max_points=max_points))
        except TablesTooLarge:
            raise
        except TooManyPoints:
            return False
        # Everything up to the limit was seen, so nothing below it is better than what `_consider` has now.
        self.bound = limit
        return True

    def _consider(self, candidate: Assignment | None) -> None:
        if candidate is not None and candidate.seconds < self.target:
            self.best = candidate

    def _sample_for_better(self, sample_size: int, stop: Callable[[], bool]) -> bool:
        """Look for a better incumbent in samples of growing parts of the gap. This proves nothing.

        Returns False if even the first part holds too much. Raises TablesTooLarge.
        """
        first = width = (self.target - self.bound) / FIRST_SHARE
        while 0 < width <= self.target - self.bound and not stop():
            try:
                self._consider(self._best_within(self.bound + width, sample_size))
            # TablesTooLarge is a TooManyPoints, but a narrower part has the same tables, so it must not count as a part that is too wide.
            except TablesTooLarge:
                raise
            except TooManyPoints:
                return width > first
            width *= WIDENING
        return True

    def _make_goal(self, num_ends: int, limit: float, sample_size: int, gives_up_early: bool, max_points: int) -> Goal:
        """Return the goal: sums of value and of memory at the first `num_ends` ends of the step, within `limit` + price · budget."""
        # Points whose values differ by less than a thousandth of a tie, or whose bytes by less than a hundredth, are taken as equal.
        steps = np.array([self.best.seconds * TIE * 1e-3, 1e-2, 1e-2][: 1 + num_ends])
        max_points = min(MAX_FIRST_POINTS if gives_up_early else max_points, self.points.remaining)
        # value + price · memory < limit + price · budget holds for each plan that fits and whose value is below the limit.
        within = limit + self._price * self.budget if self._price else limit
        return Goal(
            self.objective,
            self._ends_by_price[:num_ends],
            within,
            steps,
            sample_size,
            gives_up_early,
            PointAllowance(max_points),
        )

    @property
    def _ends_by_price(self) -> tuple[Component, Component]:
        """Memory at the end of the step that has the higher price, then at the other end."""
        both = (Component.AFTER_FORWARD, Component.AFTER_BACKWARD)
        return both[::-1] if self.objective.after_backward > self.objective.after_forward else both

    def _best_within(
        self, limit: float, sample_size: int = 0, gives_up_early: bool = False, max_points: int = MAX_PART_POINTS
    ) -> Assignment | None:
        """Return the least assignment within the budget among those with (priced cost - price · budget) at most `limit`, or None.

        `sample_size`: look at a sample only.
        """
        for num_ends in (1, 2):  # the other end of the step is a sum of its own only if it exceeds the budget
            goal = self._make_goal(num_ends, limit, sample_size, gives_up_early, max_points)
            granted = goal.points.remaining
            try:
                points = enumerate_points(self.folded, goal)
            finally:
                self.points.remaining -= granted - goal.points.remaining
            if points is None:
                return None
            # Column 0 is the value; the others are bytes, at one end of the step or at both.
            fits = np.flatnonzero((points.cost[:, 1:] <= self.budget).all(axis=1))
            if not len(fits):
                return None
            best = points.assignment(int(fits[points.cost[fits, 0].argmin()]))
            # One end is one sum less than two, so there are fewer points. The other end is checked afterwards.
            if best.totals[self._ends_by_price[1]] <= self.budget:
                return best
        return best
