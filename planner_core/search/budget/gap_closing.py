"""Close the gap that prices of memory leave: the least value within a budget, exactly, by labels (see `copy_labels`).

A price of memory gives a lower bound and some plan within the budget. A better plan must cost less than that plan
and hold no more than the budget, so its *priced* cost is at most `limit`; the labels within that limit are carried
through the blocks, through their copies, and through the top network. Copies may all differ. What is found is
the optimum; if nothing is found, the plan at hand was it. Where that is too much, a sample of the labels brings a better plan
first, without proof, and the limit is then widened from the bound on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planner_core.cost import Component
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.elimination import Floats
from planner_core.search.algebra.pareto_labels import Allowance, TooLarge, TooMuch
from planner_core.search.budget.copy_labels import Copies, Goal
from planner_core.search.folded_solver import Assignment, Folded, finish
from planner_core.search.network.folded import Problem
from planner_core.search.objective import TIE, Objective

FIRST, WIDER = 64, 4
"""Where the whole gap holds too much: the part of it that is looked through first, and how much wider each next one is."""
PER_PASS, QUICKLY = 300_000, 100_000
"""Labels that may be formed to look through one part, and to try all of it at once."""
SAMPLES = (16, 48)
"""Labels of each group in a sample, and in a second one where a gap is left."""
MAX_FAILURES = 3
"""How often too much may be within the part looked through before the rest is left open."""


def front_of(folded: Folded, goal: Goal) -> Found | None:
    """Every undominated vector of sums within the goal's limit; None where nothing is. `folded` stands under the goal's
    objective; what was found with it before is lost. Raises TooMuch."""
    problem = folded.problem
    while True:
        tree = folded.weighed()
        if not np.isfinite(tree.root) or tree.root > goal.limit:
            return None
        copies = [Copies(run, tree, goal) for run in folded.runs]
        if not sum(c.work_out() for c in copies):
            break
    sets = [(c.names, goal.as_rows(c.labels())) for c in copies]
    labels = tree.carry(goal.rows(problem.top.factors), sets, goal.row_pruning)
    return Found(problem, goal.objective, tree, copies, goal.summed(labels.cost))


@dataclass
class Found:
    """Labels of a whole model: `cost` [label, sum], and the plan behind each."""

    problem: Problem
    objective: Objective
    tree: BucketTree
    copies: list[Copies]
    cost: Floats

    def assignment(self, label: int) -> Assignment:
        """The states of every variable in one label."""
        at, taken = self.tree.assignment(label)
        calls = [one for k, c in enumerate(self.copies) for one in c.copies(taken[k])]
        return finish(self.problem, self.objective, at, calls)


@dataclass
class GapClosing:
    """The search for the least value of `objective` within `budget` bytes per GPU, given a lower `bound` and an incumbent `best`.

    The objective's prices of memory are those that gave the bound. Solutions that cost more than `at_most` are ignored.
    """

    problem: Problem
    objective: Objective
    budget: float
    best: Assignment
    bound: float
    at_most: float = float("inf")
    work: Allowance = field(default_factory=Allowance)

    def __post_init__(self) -> None:
        self.folded = Folded(self.problem, self.objective)
        self.folded.best()  # its bounds are then tight where it matters

    @property
    def target(self) -> float:
        """What a better assignment would have to cost, ties apart."""
        return min(self.best.seconds, self.at_most) * (1 - TIE / 2)

    def run(self, stop: Callable[[], bool]) -> None:
        """Look through the gap, at once or, from a better plan on, in parts that grow, until it is closed, `stop` says so, or there
        is too much in it."""
        try:
            if self.bound >= self.target or self._through(self.target, quick=True):
                return
            for count in SAMPLES:
                more = self._look_for_better(count, stop)
                self._widen(stop)
                if not more:
                    return
        except TooLarge:
            return

    def _widen(self, stop: Callable[[], bool]) -> None:
        """Look through parts of the gap that grow. Raises TooLarge."""
        width, failures = (self.target - self.bound) / FIRST, 0
        while self.bound < self.target and failures < MAX_FAILURES and self.work.left >= 0 and not stop():
            before = self.target
            if self._through(min(before, self.bound + width)):
                width *= 1 if failures else WIDER
                if self.target < before:
                    width = min(width, (self.target - self.bound) / WIDER)
            else:
                failures += 1
                width /= WIDER

    def _through(self, limit: float, quick: bool = False) -> bool:
        """Look through all within `limit`, which is the bound then; False where there is too much. Raises TooLarge."""
        try:
            self._consider(self._within(limit, quick=quick))
        except TooLarge:
            raise
        except TooMuch:
            return False
        self.bound = limit
        return True

    def _consider(self, found: Assignment | None) -> None:
        if found is not None and found.seconds < self.target:
            self.best = found

    def _look_for_better(self, count: int, stop: Callable[[], bool]) -> bool:
        """A better plan without proof, among a sample of what lies near the bound, and of more while none is near; False where even
        the first of it is too much. Raises TooLarge."""
        first = width = (self.target - self.bound) / FIRST
        while 0 < width <= self.target - self.bound and not stop():
            try:
                self._consider(self._within(self.bound + width, count))
            except TooLarge:
                raise
            except TooMuch:
                return width > first
            width *= WIDER
        return True

    def _goal(self, ends: int, limit: float, few: int = 0, quick: bool = False) -> Goal:
        """Value and memory at one end of the step, or at both, within a limit of value and of memory beyond the budget, priced."""
        steps = np.array([self.best.seconds * TIE * 1e-3, 1e-2, 1e-2][: 1 + ends])
        most = min(QUICKLY if quick else PER_PASS, self.work.left)
        price = self.objective.after_forward + self.objective.after_backward
        within = limit + price * self.budget if price else limit
        return Goal(self.objective, self._ends[:ends], within, steps, few, quick, Allowance(most))

    @property
    def _ends(self) -> tuple[Component, Component]:
        """Memory at the priced end of the step, and at the other."""
        both = (Component.AFTER_FORWARD, Component.AFTER_BACKWARD)
        return both[::-1] if self.objective.after_backward > self.objective.after_forward else both

    def _within(self, limit: float, few: int = 0, quick: bool = False) -> Assignment | None:
        """The least cost within the budget of all whose priced cost less that of the budget is at most `limit`, or None;
        with `few` of a sample."""
        for count in (1, 2):  # the other end of the step counts only where it is above the budget
            goal = self._goal(count, limit, few, quick)
            given = goal.work.left
            try:
                found = front_of(self.folded, goal)
            finally:
                self.work.left -= given - goal.work.left
            if found is None:
                return None
            fits = np.flatnonzero((found.cost[:, 1:] <= self.budget).all(axis=1))
            if not len(fits):
                return None
            best = found.assignment(int(fits[found.cost[fits, 0].argmin()]))
            if best.totals[self._ends[1]] <= self.budget:
                return best
        return best
