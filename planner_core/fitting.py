"""The best assignment that fits the GPU when its memory is walked.

The search counts memory as a sum over the network, so that it can be exact; the walk along forward and backward is what a
GPU sees, and stands a few per cent above or below. So the search is asked again with the budget moved by what the
walk of its last answer says, until the best that fits lies just below one that does not.
"""

from __future__ import annotations

from dataclasses import replace

from planner_core.assemble import assemble
from planner_core.graph import Graph
from planner_core.memory import walk
from planner_core.problem import Problem
from planner_core.search import Answer, memory_of, search, value_of, weights
from planner_core.solve import Assignment, solve

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
    return held if held > FAR * budget else walk(assemble(problem, assignment), graph, problem.model)["peak"]


def hopeless(problem: Problem, rough: Answer, budget: float, objective: str) -> Answer | None:
    """The answer of a search without proof, with an assignment that holds nearly the least, where even that is far too much."""
    if rough.assignment is not None or rough.least_memory <= FAR * budget:
        return None
    return replace(rough, smallest=solve(problem, weights(objective, NEAR_LEAST)))


def fit(
    problem: Problem, graph: Graph, budget: float, objective: str, abandon_above: float = float("inf"), rough: Answer | None = None
) -> Answer:  # fmt: skip
    """The best assignment whose walk stays within `budget` bytes per GPU. `rough`: what a search without proof said.

    Its bound holds for the network's memory: `optimal` says that no assignment whose memory there is within the budget
    is better. Where nothing fits, `least_memory` and `smallest` are walked too.
    """
    free = rough if rough is not None and rough.solves == 1 else search(problem, objective=objective)
    if free.assignment is None or free.value > abandon_above or walked(problem, graph, free.assignment, budget) <= budget:
        return free
    best: Answer | None = None
    low, high, bound = 0.0, memory_of(free.assignment), free.bound
    at = min(budget * ABOVE, high - 1)
    for _ in range(WALKS):
        answer = _within(problem, objective, at, abandon_above)
        if answer.assignment is None or answer.bound > abandon_above:
            break
        bound = max(bound, answer.bound if at >= budget else 0.0)
        held, peak = memory_of(answer.assignment), walked(problem, graph, answer.assignment, budget)
        if peak > budget:
            if held > at and best is None:  # even the least memory is too much
                return replace(answer, assignment=None, least_memory=peak, smallest=answer.assignment)
            high = min(at, held)
            if held - (peak - budget) < budget < high:  # for its bound
                at = budget
                continue
        else:
            if best is None or answer.value < best.value:
                best = replace(answer, bound=answer.bound if at >= budget else min(bound, answer.value))
            low = max(at, held)
        at = held + budget - peak  # as if the walk stood as far from the sum there
        if high - low < CLOSE * high or (peak <= budget and at < low * (1 + CLOSE)):
            break
        if not low < at < high:
            at = (low + high) / 2
    return best or replace(answer, assignment=None)  # given up: something better is known elsewhere


def _within(problem: Problem, objective: str, budget: float, abandon_above: float) -> Answer:
    """The best within the budget, or else an assignment that holds nearly the least (not the very least, which may send far
    more for a byte less)."""
    answer = search(problem, objective=objective, budget=budget, abandon_above=abandon_above)
    if answer.assignment is None and answer.smallest is not None:
        near = solve(problem, weights(objective, NEAR_LEAST))
        if near is not None:
            return replace(answer, assignment=near, value=value_of(near, objective))
    return answer
