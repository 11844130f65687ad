"""The Pareto front of a block's candidates, if there are too many to score each.

First the corners of the lower hull of (communication, memory) are found, for each state of the residual stream. Between two
corners A and B, all points up to the limit of the front are enumerated (as in `budget.pareto_front`), and dominated ones are
dropped (`algebra.pareto_points`). So a candidate that is never formed is dominated, or it lies in a part that held too much to
enumerate.

Nothing between A and B is below the line of least weighted sum through them. If the corners that are known, those of other
states of the stream too, dominate this line, they dominate all that is between A and B, and it is not enumerated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Component, CostVector
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.convex_hull import Point, hull, slope
from planner_core.search.algebra.elimination import Elimination
from planner_core.search.algebra.elimination_order import order
from planner_core.search.algebra.pareto_points import Pruning, TooMuch
from planner_core.search.network.factors import Factor
from planner_core.search.network.folded import Compiled
from planner_core.search.units.reduction import Inside, reduced
from planner_core.search.units.tables import scalar, vectors
from planner_core.search.units.unit import Solver, total

MAX_CORNERS = 40
TIE = 1e-9

Way = tuple[tuple[int, ...], float, float]
"""A way to run a block: the state of each variable that was asked for (numbered as in `alive`), the seconds of communication, and
the bytes per GPU."""


def generate(compiled: Compiled, held: Iterable[Mapping[str, int]], names: Sequence[str]) -> list[Way]:
    """The Pareto front of communication and memory over all ways to run a block, of each of which the states of `names` are told.
    `held`: the variables that are held at a state, in each of the ways to hold them. Some dominated ways may be there too."""
    blocks = [_Block(compiled, at, names) for at in held]
    corners = [block.hull() for block in blocks]
    found = [way for ways in corners for way in ways]
    known = sorted(way[1:] for way in found)
    for block, ways in zip(blocks, corners, strict=True):
        for (_, c, m), (_, high, low) in pairwise(ways):
            if not dominated((c, m), (high, low), block.least((c, m), (high, low)), known):
                with contextlib.suppress(TooMuch):
                    found += block.between((c, m), (high, low))
    return found


def dominated(left: Point, right: Point, least: float, known: Sequence[Point]) -> bool:
    """Whether the `known` points (by rising cost) dominate all that costs less than the corner `right`, holds less than the corner
    `left`, and has at least the weighted sum `least` at the price of the line through the two.

    Example: the corners (0, 4) and (4, 0) at the price 1, with `least` 4. The points (0, 3), (1, 2), (2, 1) and (3, 0) dominate
    the line between them. Without (1, 2) they do not: (1.9, 2.1) is on the line and is not dominated.
    """
    price = slope(left, right)
    inside = [c for c, _ in known if left[0] < c < right[0]]
    for cost, following in pairwise([left[0], *inside, right[0]]):
        if min((m for c, m in known if c <= cost), default=np.inf) > (least - following) / price:
            return False
    return True


class _Block:
    """A block with the variables in `at` held at a state, whose ways are told by the states of `names`."""

    def __init__(self, compiled: Compiled, at: Mapping[str, int], names: Sequence[str]) -> None:
        self.compiled, self.names = _held(compiled, at), names
        self.solved: dict[tuple[float, float], Elimination] = {}

    def _at(self, comm: float, memory: float) -> Elimination:
        """The block, eliminated at these prices of communication and memory."""
        if (comm, memory) not in self.solved:
            weights = CostVector(communication=comm, after_forward=memory).array()
            inside = Inside(reduced([self.compiled], weights), 0)
            self.solved[comm, memory] = Solver(self.compiled, inside).over((), {})
        return self.solved[comm, memory]

    def best(self, comm: float, memory: float) -> Way | None:
        """The way that minimises `comm` · communication + `memory` · memory; None if none runs."""
        solved = self._at(comm, memory)
        if not np.isfinite(solved.table):
            return None
        state = solved.assignment({})
        totals = total(self.compiled.factors, state)
        told = tuple(state[n] for n in self.names)
        return told, float(totals[Component.COMMUNICATION]), float(totals[Component.AFTER_FORWARD])

    def hull(self) -> list[Way]:
        """Corners of the lower hull, by rising communication."""
        fast, small = self.best(1.0, 1e-22), self.best(1e-12, 1.0)
        if fast is None or small is None:
            return []
        return hull(fast, small, lambda way: way[1:], lambda price: self.best(1.0, price), MAX_CORNERS, TIE)

    def least(self, left: Point, right: Point) -> float:
        """The least weighted sum of any way at the price of the line through two corners."""
        return float(self._at(1.0, slope(left, right)).table)

    def between(self, left: Point, right: Point) -> list[Way]:
        """The ways with less communication than the corner `right` and less memory than the corner `left`. Raises TooMuch."""
        price, c = slope(left, right), self.compiled
        weights = CostVector(communication=1.0, after_forward=price).array()
        tree = BucketTree(c.sizes, scalar(c.factors, weights), c.sequence, ())
        tree.weigh()
        sums = np.zeros((2, NUM_COMPONENTS))
        sums[0, Component.COMMUNICATION], sums[1, Component.AFTER_FORWARD] = 1.0, 1.0
        tables = vectors(c.factors, sums)
        constant = sum((t for names, t in tables if not names), start=np.zeros(2))
        pruning = Pruning(right[0] + price * left[1], np.array([max(right[0], 1e-9) * TIE, 1e-2]))
        points = tree.carry([t for t in tables if t[0]], [], pruning)
        at, _ = tree.assignments(np.arange(len(points.cost)))
        told = zip(*(at[n].tolist() for n in self.names), strict=True)
        return [(state, float(m), float(b)) for state, (m, b) in zip(told, points.cost + constant, strict=True)]


def _held(compiled: Compiled, at: Mapping[str, int]) -> Compiled:
    """The block with the variables in `at` held: each has one state left."""

    def one(f: Factor) -> Factor:
        pick = tuple(slice(at[v], at[v] + 1) if v in at else slice(None) for v in f.vars)
        return Factor(f.vars, f.cost[(slice(None), *pick)], f.allowed[pick])

    alive = {v: states[at[v] : at[v] + 1] if v in at else states for v, states in compiled.alive.items()}
    found = Compiled(compiled.net, (), alive, [one(f) for f in compiled.factors], [])
    found.sequence = order(found.sizes, [f.vars for f in found.factors], ())
    return found
