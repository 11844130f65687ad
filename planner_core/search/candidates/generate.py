"""The Pareto front of a block's candidates, if there are too many to score each.

First the corners of the lower hull of (communication, memory) are found, for each state of the residual stream. Between two
corners A and B, all points up to the limit of the front are enumerated (as in `budget.pareto_front`), and dominated ones are
dropped (`algebra.pareto_points`). So a candidate that is never formed is dominated, or it lies in a part that held too much to
enumerate.

All this works on a smaller network: states of which nothing lies between the two corners are gone (`two_sums`), and so are variables
whose choice is clear among the states that are left (`clear_choices`).

Nothing between A and B is below the line of least weighted sum through them. If the corners that are known, those of other
states of the stream too, dominate this line, they dominate all that is between A and B, and it is not enumerated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from planner_core.cost import CostVector
from planner_core.search.algebra.convex_hull import Point, hull, slope, weighed
from planner_core.search.algebra.elimination import Floats
from planner_core.search.algebra.elimination_order import TooWide, order
from planner_core.search.algebra.pareto_points import TooLarge, TooMuch
from planner_core.search.candidates.two_sums import SUMS, TIE, TwoSums, limit
from planner_core.search.network.factors import Factor
from planner_core.search.network.folded import Compiled
from planner_core.search.units.reduction import Inside, reduced
from planner_core.search.units.unit import Solver, total

MAX_CORNERS = 40

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
        for left, right in pairwise(ways):
            with contextlib.suppress(TooMuch):
                found += block.between(left, right, known)
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
    """A block with the variables in `at` held at a state, whose ways are told by the states of `names`.

    `parts` has what may lie between two corners, of the `whole` block, and `least` the least weighted sum at the price of the line
    through them.
    """

    def __init__(self, compiled: Compiled, at: Mapping[str, int], names: Sequence[str]) -> None:
        self.compiled, self.names = _held(compiled, at), names
        self.whole: TwoSums | None = None
        self.parts: dict[tuple[Way, Way], TwoSums] = {}
        self.least: dict[tuple[Way, Way], float] = {}

    def best(self, comm: float, memory: float) -> Way | None:
        """The way that minimises `comm` · communication + `memory` · memory; None if none runs."""
        weights = CostVector(communication=comm, after_forward=memory).array()
        solved = Solver(self.compiled, Inside(reduced([self.compiled], weights), 0)).over((), {})
        if not np.isfinite(solved.table):
            return None
        state = solved.assignment({})
        totals = total(self.compiled.factors, state)
        return self._way(state, totals[SUMS])

    def _way(self, state: Mapping[str, int], sums: Floats) -> Way:
        return tuple(state[n] for n in self.names), float(sums[0]), float(sums[1])

    def hull(self) -> list[Way]:
        """Corners of the lower hull, by rising communication."""
        fast, small = self.best(1.0, 1e-22), self.best(1e-12, 1.0)
        if fast is None or small is None:
            return []
        with contextlib.suppress(TooWide):
            self.whole = self.parts[fast, small] = TwoSums.of(self.compiled, self.names)
        return hull(fast, small, lambda way: way[1:], self._below, MAX_CORNERS, TIE)

    def _below(self, left: Way, right: Way) -> Way | None:
        """The best way at the price of the line through two corners. What may lie between them is kept, if its tables can be."""
        ends, part = (left[1:], right[1:]), self.parts.get((left, right), self.whole)
        price = slope(*ends)
        try:
            tree = part.tree(price) if part else None
        except TooLarge:
            tree = None
        if part is None or tree is None:
            best = self.best(1.0, price)
            self.least[left, right] = weighed(best[1:], price) if best else np.inf
            return best
        found = self._way(*part.best(tree))
        self.least[left, right] = float(tree.root)
        fewer = part.between(tree, limit(*ends) * (1 + TIE))
        self.parts |= {(left, right): fewer, (left, found): fewer, (found, right): fewer}
        return found

    def between(self, left: Way, right: Way, known: Sequence[Point]) -> list[Way]:
        """The ways with less communication than the corner `right` and less memory than the corner `left`; none if the `known` points
        dominate them. Raises TooMuch."""
        if (left, right) not in self.least:
            self._below(left, right)
        part = self.parts.get((left, right))
        if part is None or dominated(left[1:], right[1:], self.least[left, right], known):
            return []
        return part.points(left[1:], right[1:])


def _held(compiled: Compiled, at: Mapping[str, int]) -> Compiled:
    """The block with the variables in `at` held: each has one state left."""

    def one(f: Factor) -> Factor:
        pick = tuple(slice(at[v], at[v] + 1) if v in at else slice(None) for v in f.vars)
        return Factor(f.vars, f.cost[(slice(None), *pick)], f.allowed[pick])

    alive = {v: states[at[v] : at[v] + 1] if v in at else states for v, states in compiled.alive.items()}
    found = Compiled(compiled.net, (), alive, [one(f) for f in compiled.factors], [])
    found.sequence = order(found.sizes, [f.vars for f in found.factors], ())
    return found
