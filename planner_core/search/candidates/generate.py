"""The Pareto front of a block's candidates, if there are too many to score each.

First the corners of the lower hull of (communication, memory) are found. Between two corners A and B, all points up to the limit of
the front are enumerated (as in `budget.pareto_front`), and dominated ones are dropped (`algebra.pareto_points`). So a candidate that
is never formed is dominated, or it lies in a part that held too much to enumerate.

All this works on a smaller network, without the states through which nothing lies between the two corners (`two_sums`), and without
the variables whose choice is clear among the remaining states (`clear_choices`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from planner_core.cost import CostVector, Floats
from planner_core.search.algebra.convex_hull import find_hull_corners, slope
from planner_core.search.algebra.elimination_order import TooWide, choose_elimination_order
from planner_core.search.algebra.pareto_points import TablesTooLarge, TooManyPoints
from planner_core.search.candidates.two_sums import SUM_TOLERANCE, SUMS, TwoSums, limit_between
from planner_core.search.network.factors import Costs, Factor
from planner_core.search.network.folded import CompiledNetwork
from planner_core.search.units.reduction import ReducedVariant, eliminate_inside
from planner_core.search.units.unit import VariantSolver, sum_factors

MAX_CORNERS = 40

BlockChoice = tuple[tuple[int, ...], float, float]
"""A choice for a block: the state of each reported variable (numbered as in `alive`), the seconds of communication, and
the bytes per GPU."""


def generate_front(compiled: CompiledNetwork, names: Sequence[str]) -> list[BlockChoice]:
    """Generate the Pareto front of communication and memory over all ways to run a block; each point lists the states of `names`.

    Some dominated points may be among them.
    """
    block = _FrontOfBlock(compiled, names)
    choices = block.hull_corners()
    for left, right in pairwise(tuple(choices)):
        with contextlib.suppress(TooManyPoints):
            choices += block.points_between(left, right)
    return choices


def tie_variables(compiled: CompiledNetwork, first: str, last: str) -> CompiledNetwork:
    """Return the block whose variable `last` is in the state of `first`, and has no variable of its own."""
    common = np.intersect1d(compiled.alive[first], compiled.alive[last])
    pick = {v: np.searchsorted(compiled.alive[v], common) for v in (first, last)}

    def tie(f: Factor) -> Factor:
        cost, allowed = f.costs.rows, f.allowed
        for axis, v in enumerate(f.vars):
            if v in pick:
                cost, allowed = cost.take(pick[v], axis + 1), allowed.take(pick[v], axis)
        names = tuple(first if v == last else v for v in f.vars)
        # A table over both is looked up at equal states only: its diagonal is a table over one variable.
        if len(set(names)) < len(names):
            names, cost, allowed = (first,), np.diagonal(cost, axis1=1, axis2=2), np.diagonal(allowed)
        return Factor(names, Costs(f.costs.components, cost), allowed)

    alive = {v: common if v == first else states for v, states in compiled.alive.items() if v != last}
    compiled_pair = CompiledNetwork(compiled.net, (), alive, [tie(f) for f in compiled.factors], [])
    compiled_pair.sequence = choose_elimination_order(compiled_pair.sizes, [f.vars for f in compiled_pair.factors], ())
    return compiled_pair


class _FrontOfBlock:
    """The front of a block whose points list the states of `names`.

    `parts` [two corners] is the network of what may lie between them, a part of the `unpruned` network.
    """

    def __init__(self, compiled: CompiledNetwork, names: Sequence[str]) -> None:
        self.compiled, self.names = compiled, names
        self.unpruned: TwoSums | None = None
        self.parts: dict[tuple[BlockChoice, BlockChoice], TwoSums] = {}

    def best_choice(self, comm: float, memory: float) -> BlockChoice | None:
        """Return the choice that minimises `comm` · communication + `memory` · memory; None if none runs."""
        weights = CostVector(communication=comm, after_forward=memory).array()
        solved = VariantSolver(
            self.compiled, ReducedVariant(eliminate_inside([self.compiled], weights), 0)
        ).eliminate_except((), {})
        if not np.isfinite(solved.table):
            return None
        state = solved.assignment({})
        totals = sum_factors(self.compiled.factors, state)
        return self._make_choice(state, totals[SUMS])

    def _make_choice(self, state: Mapping[str, int], sums: Floats) -> BlockChoice:
        return tuple(state[n] for n in self.names), float(sums[0]), float(sums[1])

    def hull_corners(self) -> list[BlockChoice]:
        """Corners of the lower hull, by rising communication."""
        # The tiny second weight breaks ties: of the fastest choices the smallest, and of the smallest the fastest.
        fastest, smallest = self.best_choice(1.0, 1e-22), self.best_choice(1e-12, 1.0)
        if fastest is None or smallest is None:
            return []
        with contextlib.suppress(TooWide):
            self.unpruned = self.parts[fastest, smallest] = TwoSums.from_network(self.compiled, self.names)
        return find_hull_corners(
            fastest, smallest, lambda choice: choice[1:], self._corner_below, MAX_CORNERS, SUM_TOLERANCE
        )

    def _corner_below(self, left: BlockChoice, right: BlockChoice) -> BlockChoice | None:
        """Return the best choice at the price of the line through two corners. Stores the network of what may lie between them, unless its
        tables are too large."""
        ends, part = (left[1:], right[1:]), self.parts.get((left, right), self.unpruned)
        price = slope(*ends)
        try:
            tree = part.bucket_tree(price) if part else None
        except TablesTooLarge:
            tree = None
        if part is None or tree is None:
            return self.best_choice(1.0, price)
        corner = self._make_choice(*part.best_assignment(tree))
        pruned = part.prune_between(tree, limit_between(*ends) * (1 + SUM_TOLERANCE))
        # What lies between left and corner, or corner and right, lies between left and right too, so the pruned part serves all three.
        self.parts |= {(left, right): pruned, (left, corner): pruned, (corner, right): pruned}
        return corner

    def points_between(self, left: BlockChoice, right: BlockChoice) -> list[BlockChoice]:
        """Return the choices with less communication than the corner `right` and less memory than the corner `left`. Raises
        TooManyPoints."""
        if (left, right) not in self.parts:
            self._corner_below(left, right)
        part = self.parts.get((left, right))
        return part.points_between(left[1:], right[1:]) if part else []
