"""The Pareto front of one mesh between time (or communication) and memory: the corners of its hull, and every point of it.

Take two neighbouring corners of the hull, A (faster) and B (smaller), and let m be the slope of the line through them, in
seconds per byte. A point of the front between them takes fewer seconds than B and holds less memory than A, so

    seconds + m · memory  <  B's seconds + m · A's memory  =  limit

All points within this limit are enumerated (see `gap_closing`). So no point of the front is missed.

Example: A = (10 s, 9 GB) and B = (14 s, 5 GB) have the slope 1 s per GB and the limit 14 + 9 = 23. The point (12 s, 8 GB) costs
20 at this price. It is above the line, where the corners cost 19, but within the limit, so it is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from planner_core.cost import Component, Floats
from planner_core.search.algebra.convex_hull import Point, find_hull_corners, lower_hull, slope, weighted_sum
from planner_core.search.algebra.pareto_points import TooManyPoints
from planner_core.search.budget.gap_closing import ModelPoints, enumerate_points
from planner_core.search.budget.goal import Goal
from planner_core.search.folded_solver import FoldedTables, solve_folded, with_objective
from planner_core.search.lagrangian import find_least_memory, make_objective
from planner_core.search.network.folded import Problem
from planner_core.search.network.search_cache import Assignment
from planner_core.search.objective import TIE, Objective, least_memory_objective

FORWARD, BACKWARD = Component.AFTER_FORWARD, Component.AFTER_BACKWARD
LIMIT_MARGIN_SHARE = 1e-9
"""The limit is raised by this share, so that rounding errors do not exclude a point that lies on it."""
MAX_CORNERS = 64
MAX_ROUGH_CORNERS = 5
MAX_RUN_ENTRIES = 100_000
"""Corners are searched while no table of a run, over all that it shares with the rest of the model, has more entries."""


@dataclass(frozen=True)
class ParetoFront:
    """The Pareto front, by rising cost.

    `cost_s` [point]: seconds of the step or of communication, as asked. `memory_bytes` [point]: bytes per GPU at the end of
    forward. `exact`: whether these are all points; False if a part between two corners held too much to enumerate.
    """

    cost_s: Floats
    memory_bytes: Floats
    exact: bool
    make_assignment: tuple[Callable[[], Assignment], ...]

    def assignment(self, point: int) -> Assignment:
        """Return the assignment of one point."""
        return self.make_assignment[point]()


def find_pareto_front(problem: Problem, objective: str = "communication") -> ParetoFront:
    """Return the Pareto front between an objective and memory.

    All copies of a run are equal if `problem.uniform`; otherwise each copy may differ.
    """
    unpriced = make_objective(problem, objective)
    points: list[tuple[float, float, Callable[[], Assignment]]] = []
    exact = True
    corners = _hull_corners(problem, unpriced)
    for a in corners:
        points.append((a.seconds, float(a.totals[FORWARD]), lambda a=a: a))  # type: ignore[misc]
    for a, b in pairwise(corners):
        try:
            part = _points_between(problem, unpriced, a, b)
        except TooManyPoints:
            part, exact = None, False
        if part is not None:
            points += [(float(c), float(m), lambda f=part, i=i: f.assignment(i)) for i, (c, m) in enumerate(part.cost)]  # type: ignore[misc]
    front: list[tuple[float, float, Callable[[], Assignment]]] = []
    for point in sorted(points, key=lambda p: p[:2]):
        if not front or point[1] < front[-1][1] - 1:
            if front and point[0] <= front[-1][0] * (1 + TIE):  # they tie in cost, and the new point holds less
                front.pop()
            front.append(point)
    ends = [k[2]().totals for k in front]
    return ParetoFront(
        np.array([k[0] for k in front]),
        np.array([k[1] for k in front]),
        # Memory is that at the end of forward. If backward holds more, it says too little, and another point may be smaller.
        exact and all(e[BACKWARD] <= e[FORWARD] for e in ends),
        tuple(k[2] for k in front),
    )


def _points_between(problem: Problem, unpriced: Objective, a: Assignment, b: Assignment) -> ModelPoints | None:
    """Return the points that cost less than `b` and hold less than `a`, among others; None if there are none. Raises TooManyPoints."""
    price = slope((a.seconds, float(a.totals[FORWARD])), (b.seconds, float(b.totals[FORWARD])))
    limit = (b.seconds + price * float(a.totals[FORWARD])) * (1 + LIMIT_MARGIN_SHARE)
    objective = unpriced.with_prices(price, 0.0)
    folded = FoldedTables(problem, objective)
    folded.best_assignment()
    goal = Goal(objective, (FORWARD,), limit, np.array([b.seconds * TIE * 1e-3, 1e-2]))
    return enumerate_points(folded, goal)


def _hull_corners(problem: Problem, unpriced: Objective) -> list[Assignment]:
    """Corners of the lower left hull of (cost, memory at the end of forward), by rising cost."""
    fastest = solve_folded(problem, unpriced)
    smallest = solve_folded(problem, least_memory_objective(unpriced.step_time, 1.0))
    if fastest is None or smallest is None:
        return []
    smallest = with_objective(smallest, unpriced)
    return find_hull_corners(
        fastest, smallest, _hull_point, partial(_corner_below, problem, unpriced), MAX_CORNERS, TIE
    )


def find_corners(problem: Problem) -> list[Assignment]:
    """At most five corners of the lower left hull of (step time, memory), from the fastest to the smallest.

    The gaps between the step's time and its bounds stay open, so a corner need not be exact.
    """
    unpriced = replace(make_objective(problem, "time"), exact=False)
    fastest, smallest = solve_folded(problem, unpriced), find_least_memory(problem)
    if fastest is None or smallest is None:
        return []
    return find_hull_corners(
        fastest, smallest, _hull_point, partial(_corner_below, problem, unpriced), MAX_ROUGH_CORNERS, TIE
    )


def _corner_below(problem: Problem, unpriced: Objective, a: Assignment, b: Assignment) -> Assignment | None:
    """Return the best assignment at the price of the line through two corners."""
    return solve_folded(problem, unpriced.with_prices(slope(_hull_point(a), _hull_point(b)), 0.0))


def find_corners_below(problem: Problem, points: Sequence[Point], step: float) -> list[Assignment]:
    """Return the corners of a problem if one of them lies below the hull of `points`; otherwise only its fastest assignment, as
    for a problem whose calls share so many tensors that one corner takes many seconds.

    Two neighbouring points count as one if the second saves less than the share `step` of memory.
    """
    unpriced = replace(make_objective(problem, "time"), exact=False)
    fastest = solve_folded(problem, unpriced)
    if fastest is not None and _largest_run_table(problem) > MAX_RUN_ENTRIES:
        return [fastest]
    if fastest is None or not points:
        return find_corners(problem)
    for a, b in pairwise(lower_hull([*points, _hull_point(fastest)])):
        price = slope(a, b)
        if price == 0.0 or b[1] > a[1] * (1 - step):
            continue
        # Most problems lie above the hull. Their first bound proves it, so they need not be solved.
        corner = solve_folded(problem, unpriced.with_prices(price, 0.0), abandon_above=weighted_sum(a, price))
        if corner is not None and weighted_sum(_hull_point(corner), price) < weighted_sum(a, price) * (1 - TIE):
            return find_corners(problem)
    return [fastest]


def least_seconds_within(problems: Sequence[Problem], points: Sequence[Point], budgets: Sequence[float]) -> list[float]:
    """Return for each of `budgets`, in bytes at the end of forward, a bound in seconds of all assignments of the problems within it.
    It meets each corner of the hull of `points` that no assignment lies below.

    At a price p per byte let L be the least seconds + p · memory of all problems. Whatever holds at most m bytes takes L - p · m or longer.
    """
    hull = lower_hull(points)
    prices = [(0.0, math.inf), *((slope(a, b), weighted_sum(a, slope(a, b))) for a, b in pairwise(hull))]
    least = [(price, min(_least_priced(p, price, above) for p in problems)) for price, above in prices]
    return [max(seconds - price * m for price, seconds in least) for m in budgets]


def _least_priced(problem: Problem, price: float, above: float) -> float:
    """Return a lower bound on the seconds and the memory of every assignment at a price, as near as it need be if it is `above`."""
    unpriced = replace(make_objective(problem, "time"), exact=False)
    fastest = solve_folded(problem, unpriced)
    if fastest is None:
        return math.inf
    bound = fastest.bound + price * float(problem.least_bytes_at_ends[0])
    if price == 0.0 or bound > above or _largest_run_table(problem) > MAX_RUN_ENTRIES:
        return bound
    best = solve_folded(problem, unpriced.with_prices(price, 0.0), abandon_above=above)
    return math.inf if best is None else max(bound, best.bound)


def _hull_point(a: Assignment) -> Point:
    return a.seconds, float(a.totals[FORWARD])


def _largest_run_table(problem: Problem) -> float:
    """Return the entries of the largest table of a run over the variables of the top block."""
    scopes = [problem.scopes[k] for k in range(len(problem.runs))]
    return max((math.prod(float(problem.top.sizes[v]) for v in scope) for scope in scopes), default=0.0)
