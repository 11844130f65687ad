"""The Pareto front of a block's candidates, if there are too many to score each.

First the corners of the lower hull of (communication, memory) are found. Between two corners A and B, all labels up to the
limit of the front are enumerated (as in `budget.pareto_front`), and dominated ones are dropped (`algebra.pareto_labels`). So a
candidate that is never formed is dominated, or it lies in a part that held too much to enumerate (then `complete` is False).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner_core.cost import NUM_COMPONENTS, Component, CostVector
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.convex_hull import Point, hull, slope
from planner_core.search.algebra.elimination import Elimination, Floats, eliminate, given, order
from planner_core.search.algebra.pareto_labels import Pruning, TooMuch
from planner_core.search.network.folded import Compiled
from planner_core.search.units.tables import scalar, vectors
from planner_core.search.units.unit import total

MAX_CORNERS = 40
TIE = 1e-9


@dataclass(frozen=True)
class Generated:
    """Ways to run a block: `at` [way] has the state of every variable (numbered as in `alive`), `comm_s` [way] the seconds of
    communication, `memory_bytes` [way] the bytes per GPU. `complete`: whether no part was left out."""

    at: list[dict[str, int]]
    comm_s: Floats
    memory_bytes: Floats
    complete: bool


def generate(compiled: Compiled, at: Mapping[str, int]) -> Generated:
    """The Pareto front of communication and memory over all ways to run a block with the variables in `at` fixed. It may hold
    some dominated ways too."""
    block = _Block(compiled, at)
    corners = block.hull()
    found: list[dict[str, int]] = [c for c, _, _ in corners]
    costs = [(c, m) for _, c, m in corners]
    complete = True
    for (_, c, m), (_, high, low) in pairwise(corners):
        try:
            for state, cost in block.between((c, m), (high, low)):
                found.append(state)
                costs.append(cost)
        except TooMuch:
            complete = False
    comm, memory = (np.array([x[i] for x in costs]) for i in (0, 1))
    return Generated(found, comm, memory, complete)


class _Block:
    def __init__(self, compiled: Compiled, at: Mapping[str, int]) -> None:
        self.compiled, self.at = compiled, dict(at)
        self.sizes = {v: n for v, n in compiled.sizes.items() if v not in at}
        scopes = [[v for v in f.vars if v not in at] for f in compiled.factors]
        self.sequence = order(self.sizes, scopes, ())

    def tables(self, weights: CostVector) -> list[tuple[tuple[str, ...], Floats]]:
        """The block's weighted tables, with the variables in `at` fixed."""
        return given(scalar(self.compiled.factors, weights.array()), self.at)

    def best(self, comm: float, memory: float) -> tuple[dict[str, int], float, float] | None:
        """The way that minimises `comm` · communication + `memory` · memory, with its communication and memory; None if none runs."""
        solved: Elimination = eliminate(
            self.sizes, self.tables(CostVector(communication=comm, after_forward=memory)), self.sequence, ()
        )
        if not np.isfinite(solved.table):
            return None
        state = {**self.at, **solved.assignment({})}
        totals = total(self.compiled.factors, state)
        return state, float(totals[Component.COMMUNICATION]), float(totals[Component.AFTER_FORWARD])

    def hull(self) -> list[tuple[dict[str, int], float, float]]:
        """Corners of the lower hull, by rising communication."""
        fast, small = self.best(1.0, 1e-22), self.best(1e-12, 1.0)
        if fast is None or small is None:
            return []
        return hull(fast, small, lambda way: (way[1], way[2]), lambda price: self.best(1.0, price), MAX_CORNERS, TIE)

    def between(self, left: Point, right: Point) -> list[tuple[dict[str, int], Point]]:
        """The ways with less communication than the corner `right` and less memory than the corner `left`. Raises TooMuch."""
        price = slope(left, right)
        tree = BucketTree(
            self.sizes, self.tables(CostVector(communication=1.0, after_forward=price)), self.sequence, ()
        )
        tree.weigh()
        sums = np.zeros((2, NUM_COMPONENTS))
        sums[0, Component.COMMUNICATION], sums[1, Component.AFTER_FORWARD] = 1.0, 1.0
        tables = given(vectors(self.compiled.factors, sums), self.at)
        constant = sum((t for names, t in tables if not names), start=np.zeros(2))
        pruning = Pruning(right[0] + price * left[1], np.array([max(right[0], 1e-9) * TIE, 1e-2]))
        labels = tree.carry([t for t in tables if t[0]], [], pruning)
        costs = labels.cost + constant
        return [({**self.at, **tree.assignment(i)[0]}, (float(c), float(m))) for i, (c, m) in enumerate(costs)]
