"""The trade-off of one mesh between time (or communication) and memory: the corners of its hull, and every point of it.

Between two neighbouring corners of the hull a point that no other beats costs less than the one and holds less memory
than the other, so its cost priced along the line between them is below that of their far corner: the labels within that
limit are all there are (see `closing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner_core.search.algebra.convex_hull import Point, hull, slope
from planner_core.search.algebra.elimination import Floats
from planner_core.search.algebra.pareto_labels import TooMuch
from planner_core.search.budget.copy_labels import Goal
from planner_core.search.budget.gap_closing import Found, front_of
from planner_core.search.folded_solver import Assignment, Folded, solve
from planner_core.search.lagrangian import MEMORY_PRICE, TIE, least_memory, value_of, weights
from planner_core.search.network.factors import ENDING, MEMORY, NUM_COMPONENTS
from planner_core.search.network.folded import Problem

ROUNDING = 1e-9
"""Both corners lie on the limit between them: sums taken in another order must not fall beyond it."""
MAX_CORNERS = 64
FEW_CORNERS = 5


@dataclass(frozen=True)
class Front:
    """Points that no other beats, by rising cost: `cost_s` seconds (step time or communication, as asked), `memory_bytes` per GPU
    at the end of forward. `exact`: these are all; else parts between two corners held too much to look through."""

    cost_s: Floats
    memory_bytes: Floats
    exact: bool
    behind: tuple[Callable[[], Assignment], ...]

    def assignment(self, point: int) -> Assignment:
        """The states behind one point."""
        return self.behind[point]()


def front(problem: Problem, objective: str = "communication", stop: Callable[[], bool] = lambda: False) -> Front:
    """Every point of the trade-off between the objective and memory. With a problem of uniform repeats, all copies of a run are
    alike; else each may differ. `stop` is asked between parts."""
    cost = np.array(weights(objective)) * (1, 0, 1, 1)
    points: list[tuple[float, float, Callable[[], Assignment]]] = []
    exact = True
    found = _hull(problem, cost)
    for a in found:
        points.append((float(cost @ a.totals), float(a.totals[MEMORY]), lambda a=a: a))  # type: ignore[misc]
    for a, b in pairwise(found):
        if stop():
            exact = False
            break
        try:
            part = _between(problem, cost, a, b)
        except TooMuch:
            part, exact = None, False
        if part is not None:
            points += [(float(c), float(m), lambda f=part, i=i: f.assignment(i)) for i, (c, m) in enumerate(part.cost)]  # type: ignore[misc]
    kept: list[tuple[float, float, Callable[[], Assignment]]] = []
    for point in sorted(points, key=lambda p: p[:2]):
        if not kept or point[1] < kept[-1][1] - 1:
            if kept and point[0] <= kept[-1][0] * (1 + TIE):  # a tie in cost that holds less
                kept.pop()
            kept.append(point)
    ends = [k[2]().totals for k in kept]
    return Front(
        np.array([k[0] for k in kept]), np.array([k[1] for k in kept]),
        exact and all(e[ENDING] <= e[MEMORY] for e in ends), tuple(k[2] for k in kept),
    )  # fmt: skip


def _between(problem: Problem, cost: Floats, a: Assignment, b: Assignment) -> Found | None:
    """Labels with less cost than `b` and less memory than `a`; None where there are none. Raises TooMuch."""
    high = float(cost @ b.totals)
    price = slope((float(cost @ a.totals), float(a.totals[MEMORY])), (high, float(b.totals[MEMORY])))
    sums = np.zeros((2, NUM_COMPONENTS))
    sums[0] = cost
    sums[1, MEMORY] = 1.0
    limit = (high + price * float(a.totals[MEMORY])) * (1 + ROUNDING)
    goal = Goal(sums, np.array([1.0, price]), limit, np.array([high * TIE * 1e-3, 1e-2]))
    return front_of(Folded(problem, goal.weights), goal)


def _hull(problem: Problem, cost: Floats) -> list[Assignment]:
    """Corners of the lower left hull of (cost, memory at the end of forward), by rising cost."""
    fast = solve(problem, _priced(cost, MEMORY_PRICE))
    small = solve(problem, _priced(cost * 1e-9, 1.0))
    if fast is None or small is None:
        return []

    def at(a: Assignment) -> Point:
        return float(cost @ a.totals), float(a.totals[MEMORY])

    return hull(fast, small, at, lambda price: solve(problem, _priced(cost, price)), MAX_CORNERS, TIE)


def _priced(cost: Floats, price: float) -> tuple[float, float, float, float]:
    return (float(cost[0]), float(cost[1]) + price, float(cost[2]), float(cost[3]))


def corners(problem: Problem) -> list[Assignment]:
    """Corners of the lower left hull of (step time, memory), from the fastest to the smallest: five at most."""
    fast, small = solve(problem, weights("time")), least_memory(problem)
    if fast is None or small is None:
        return []

    def at(a: Assignment) -> Point:
        return value_of(a, "time"), float(a.totals[MEMORY])

    return hull(fast, small, at, lambda price: solve(problem, weights("time", price)), FEW_CORNERS, TIE)
