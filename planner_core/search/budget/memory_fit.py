"""The best assignment that fits the GPU when its memory is walked.

The search counts memory as a sum over the network, so that it can be exact; the walk along forward and backward is what a
GPU sees, and stands a few per cent above or below. So the search is asked again with the budget moved by what the
walk of its last answer says, until the best that fits lies just below one that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner_core.core import Graph
from planner_core.cost.memory import walk
from planner_core.search.algebra.pareto_labels import MAX_WORK
from planner_core.search.extract_plan import assemble
from planner_core.search.folded_solver import Assignment, solve
from planner_core.search.lagrangian import Answer, memory_of, objective_of, search
from planner_core.search.network.folded import Problem

WALKS = 6
"""How often a search is asked for another budget."""
ABOVE = 1.05
"""The first budget asked for: sums stand above the walk by about as much in the worst case seen."""
FAR = 2.0
"""A sum of this many budgets is not walked; the walk was never less than 0.9 of the sum."""
NEAR_LEAST = 1e-8
"""Seconds per byte at which memory counts far more than time, but not beyond all measure."""
CLOSE = 4e-3
"""Budgets nearer to each other than this share are not told apart."""


def walked(problem: Problem, graph: Graph, assignment: Assignment, budget: float) -> float:
    """Peak memory of an assignment, bytes per GPU; where its sum is far above the budget, the sum: a walk takes as long as the
    model is deep."""
    held = memory_of(assignment)
    return (
        held
        if held > FAR * budget
        else walk(assemble(problem, assignment), graph, problem.model).memory_bytes()["peak"]
    )


def hopeless(problem: Problem, rough: Answer, budget: float, objective: str) -> Answer | None:
    """The answer of a search without proof, with an assignment that holds nearly the least, where even that is far too much."""
    if rough.assignment is not None or rough.least_memory <= FAR * budget:
        return None
    return replace(rough, smallest=solve(problem, objective_of(problem, objective).priced(NEAR_LEAST, 0.0)))


def fit(
    problem: Problem, graph: Graph, budget: float, objective: str, abandon_above: float = float("inf"), rough: Answer | None = None,
    stop: Callable[[], bool] = lambda: False, work: int = MAX_WORK, prove: bool = True,
) -> Answer:  # fmt: skip
    """The best assignment whose walk stays within `budget` bytes per GPU. `rough`: what a search without proof said; `stop`,
    `work` and `prove` as in `search`.

    Its bound holds for the network's memory: `optimal` says that no assignment whose memory there is within the budget
    is better. Where nothing fits, `least_memory` and `smallest` are walked too.
    """
    free = rough if rough is not None and rough.solves == 1 else search(problem, objective=objective)
    if (
        free.assignment is None
        or free.value > abandon_above
        or walked(problem, graph, free.assignment, budget) <= budget
    ):
        return free
    aim = _Aim(problem, graph, budget, objective, abandon_above, free.bound, stop, work)
    high = memory_of(free.assignment)
    at = min(budget * ABOVE, high - 1)
    # where the walk meets the budget is found without proof, and proven there
    found = aim.near(at, high, prove=False)
    return found if found.assignment is None or not prove else aim.near(aim.hit, high, prove=True)


@dataclass
class _Aim:
    """Searches for one budget of the walk; `hit` is the budget of the sum that the best answer came from."""

    problem: Problem
    graph: Graph
    budget: float
    objective: str
    abandon_above: float
    bound: float
    stop: Callable[[], bool]
    work: int
    hit: float = 0.0
    peaks: list[tuple[Assignment, float]] = field(default_factory=list)

    def near(self, at: float, high: float, prove: bool) -> Answer:
        """The best answer whose walk fits, sums between 0 and `high` being tried, `at` first."""
        best: Answer | None = None
        low = 0.0
        for _ in range(WALKS):
            answer = self._within(at, prove)
            if answer.assignment is None or answer.bound > self.abandon_above:
                break
            self.bound = max(self.bound, answer.bound if at >= self.budget else 0.0)
            held, peak = memory_of(answer.assignment), self._walked(answer.assignment)
            if peak > self.budget:
                if held > at and best is None:  # even the least memory is too much
                    return replace(answer, assignment=None, least_memory=peak, smallest=answer.assignment)
                high = min(at, held)
                if not prove and held - (peak - self.budget) < self.budget < high:  # for its bound
                    at = self.budget
                    continue
            else:
                if best is None or answer.value < best.value:
                    bound = answer.bound if at >= self.budget else min(self.bound, answer.value)
                    best, self.hit = replace(answer, bound=bound), at
                low = max(at, held)
            at = held + self.budget - peak  # as if the walk stood as far from the sum there
            if high - low < CLOSE * high or (peak <= self.budget and at < low * (1 + CLOSE)):
                break
            if not low < at < high:
                at = (low + high) / 2
        return best or replace(answer, assignment=None)  # given up: something better is known elsewhere

    def _walked(self, assignment: Assignment) -> float:
        """As `walked`; the same assignment comes back for other budgets, and as the proven one."""
        known = next((peak for a, peak in self.peaks if a is assignment), None)
        if known is None:
            known = walked(self.problem, self.graph, assignment, self.budget)
            self.peaks.append((assignment, known))
        return known

    def _within(self, budget: float, prove: bool) -> Answer:
        """The best within the budget, or else an assignment that holds nearly the least (not the very least, which may send
        far more for a byte less)."""
        answer = search(
            self.problem, objective=self.objective, budget=budget, abandon_above=self.abandon_above, stop=self.stop, prove=prove,
            work=self.work,
        )  # fmt: skip
        if answer.assignment is None and answer.smallest is not None:
            near = solve(self.problem, objective_of(self.problem, self.objective).priced(NEAR_LEAST, 0.0))
            if near is not None:
                return replace(answer, assignment=near, value=near.seconds)
        return answer
