"""Solve the folded network of a whole model: runs of equal blocks as tables over the top network's variables (`chain`),
then the top network, then the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.elimination import Floats, Table, eliminate
from planner_core.search.algebra.pareto_labels import TooMuch
from planner_core.search.network.factors import MEMORY, NUM_COMPONENTS, Network
from planner_core.search.network.folded import Problem
from planner_core.search.repeated_block import Chain, Solver, Weights, between_copies, boundary, chain_states, scalar


@dataclass
class Assignment:
    """The state of every variable: of the top block, and of each call in order. Numbers as in the networks."""

    top: dict[str, int]
    calls: list[dict[str, int]]
    totals: Floats


def solve(problem: Problem, weights: Weights) -> Assignment | None:
    """The assignment of least weighted cost, or None where there is none. The problem keeps it: searches for other budgets
    ask for the same weights, and start from what was found."""
    if weights not in problem.solved:
        problem.solved[weights] = None if problem.impossible else Folded(problem, weights).best()
    found: Assignment | None = problem.solved[weights]
    return found


class Folded:
    """A folded network under given weights: the tables of its runs, and what remains at the top."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem = problem
        blocks = {name: Solver(c, weights) for name, c in problem.blocks.items()}
        self.runs = [Chain(problem, run, weights, blocks[run.block]) for run in problem.runs]
        self.fixed = scalar(problem.top.factors, weights)
        self._tree: tuple[int, BucketTree] | None = None

    @property
    def tables(self) -> list[Table]:
        """All tables over the top variables; those of runs may hold lower bounds."""
        return [*self.fixed, *(r.table() for r in self.runs)]

    def weighed(self) -> BucketTree:
        """The top network with all its tables kept, and the least cost through every entry; made anew where copies were
        worked out since. Raises TooLarge."""
        known = sum(len(r.powers) for r in self.runs)
        if self._tree is None or self._tree[0] != known:
            tree = BucketTree(self.problem.top.sizes, self.tables, self.problem.top.sequence, ())
            tree.weigh()
            self._tree = known, tree
        return self._tree[1]

    def best(self) -> Assignment | None:
        """The assignment of least cost: found again until it rests on no lower bound."""
        top = self.problem.top
        first = True
        while True:
            result = eliminate(top.sizes, self.tables, top.sequence, ())
            if not np.isfinite(result.table):
                return None
            assignment = result.assignment({})
            if not sum(r.work_out(assignment) for r in self.runs):
                break
            if not first:
                self._work_out_more(assignment)
            first = False
        return finish(self.problem, assignment, [c for r in self.runs for c in r.walk(assignment)])

    def _work_out_more(self, assignment: Mapping[str, int]) -> None:
        """Make all else exact, together, that may be as good as an assignment whose cost is exact now."""
        try:
            tree = self.weighed()
        except TooMuch:  # then one after the other
            return
        value = sum(float(t[tuple(assignment[v] for v in names)]) for names, t in self.tables)
        for r in self.runs:
            r.work_out_below(tree, value)


def finish(problem: Problem, top: Mapping[str, int], calls: list[dict[str, int]]) -> Assignment:
    """An assignment with its totals: `top` in the numbering of states alive there, `calls` in the networks' own."""
    full = {v: int(problem.top.alive[v][s]) for v, s in top.items()}
    totals = _total(problem.top.net, full)
    weight: Weights = (0.0, 1.0, 0.0, 0.0)
    position = 0
    for run in problem.runs:
        mine = calls[position : position + len(run.calls)]
        position += len(run.calls)
        alike = Counter(map(id, mine))
        by_id = {id(at): at for at in mine}
        for key, count in alike.items():
            totals = totals + count * _total(problem.blocks[run.block].net, by_id[key])
        if len(mine) > 1:  # what the next copy keeps of the tensor between two
            axes = boundary(problem, run)
            both = chain_states(axes, problem.blocks[run.block])
            between = between_copies(problem, run, weight)
            for key, count in Counter(map(id, mine[:-1])).items():
                totals[MEMORY] += count * between[np.searchsorted(both, by_id[key][axes.exit])]
    return Assignment(full, calls, totals)


def block_totals(problem: Problem, a: Assignment, name: str) -> Floats:
    """What all copies of one block add to an assignment's totals."""
    net = problem.blocks[name].net
    copies = [at for call, at in zip(problem.coarse.graph.calls(), a.calls, strict=True) if call.block == name]
    by_id = {id(at): at for at in copies}
    zero = np.zeros(NUM_COMPONENTS)
    return sum((n * _total(net, by_id[key]) for key, n in Counter(map(id, copies)).items()), start=zero)


def _total(net: Network, at: Mapping[str, int]) -> Floats:
    total = np.zeros(NUM_COMPONENTS)
    for f in net.factors:
        where: tuple[Any, ...] = (slice(None), *(at[v] for v in f.vars))
        total += f.cost[where]
    return total
