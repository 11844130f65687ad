"""A run of equal blocks as one table: the (min, +) power of the block's table over its boundary.

    one copy:   cost [entry, exit] of the residual stream's states before and after it
    two copies: min over k of cost[entry, k] + kept[k] + cost[k, exit]
    L copies:   about log2 L such products

Tensors that all copies of a run share (an encoder's output) multiply the run's table. Where they have many joint
states, the block is solved only for those that an optimum asks for (`work_out`): any other stands with a lower bound,
at first from two smaller eliminations, then from chains in which one shared tensor is fixed at a time (`tighten`). An optimum
of the top network that rests on none of those is the optimum.

Example: T5's decoder layers share the encoder's output and its mask, 25 states each on two axes. Of the 625 joint states 16 are
worked out after 50 such chains, which bound the others within 1 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner_core.cost import Component
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.elimination import Floats, Table
from planner_core.search.algebra.minplus import Power, power, times
from planner_core.search.network.factors import tensor_name
from planner_core.search.network.folded import Compiled, Problem, Run
from planner_core.search.units.tables import opened
from planner_core.search.units.unit import Copy, UnitCost, View

EAGER = 4
"""Runs with at most this many shared states are worked out at once."""
BATCH = 16
"""Shared states of a run that are worked out together."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a block's boundary stands: names of its shared inputs of several states, of the chain's ends, and their top names."""

    shared: tuple[str, ...]
    entry: str
    exit: str
    top: dict[str, str]


def boundary(problem: Problem, run: Run) -> Boundary:
    """The boundary of the block of a run."""
    block = problem.coarse.graph.blocks[run.block]
    first, last = run.calls[0], run.calls[-1]
    entry = tensor_name(block.inputs[run.chain_in]) if run.chain_in >= 0 else ""
    exit_ = tensor_name(block.outputs[run.chain_out]) if run.chain_in >= 0 else ""
    inner = [*block.inputs, *block.outputs]
    outer = [*first.inputs, *last.outputs]
    top = {tensor_name(i): tensor_name(o) for i, o in zip(inner, outer, strict=True)}
    shared = problem.compiled(run.block).open
    return Boundary(tuple(k for k in shared if k not in (entry, exit_)), entry, exit_, top)


def as_matrix(table: Floats, axes: Boundary, compiled: Compiled) -> Floats:
    """A table over (..., entry, exit) with both in the numbering of the states alive at either."""
    both = chain_states(axes, compiled)
    entry, exit_ = (np.searchsorted(both, compiled.alive[v]) for v in (axes.entry, axes.exit))
    if len(entry) == len(exit_) == len(both):
        return table
    wide = np.full((*table.shape[:-2], len(both), len(both)), np.inf)
    wide[..., entry[:, None], exit_[None, :]] = table
    return wide


def chain_states(axes: Boundary, compiled: Compiled) -> NDArray[np.int64]:
    """States of the tensor that links copies, alive at either end, in the network's own numbering."""
    return np.union1d(compiled.alive[axes.entry], compiled.alive[axes.exit])


def between_bytes(problem: Problem, run: Run) -> Floats:
    """[state of the chain] bytes of the tensor between two copies, where one of them keeps it for backward."""
    compiled, axes = problem.compiled(run.block), boundary(problem, run)
    both = chain_states(axes, compiled)
    return compiled.net.tensors[axes.entry].local_bytes[both] * float(compiled.net.keeps_between)


def to_top(
    problem: Problem, axes: Boundary, compiled: Compiled, table: Floats, names: Sequence[str], matrix: bool = False
) -> Table:
    """The table over top variables, in their numbering of alive states."""
    for axis, name in enumerate(names):
        mine = chain_states(axes, compiled) if matrix and name in (axes.entry, axes.exit) else compiled.alive[name]
        theirs = problem.top.alive[axes.top[name]]
        if np.array_equal(mine, theirs):
            continue
        places = np.minimum(np.searchsorted(mine, theirs), len(mine) - 1)
        table = table.take(places, axis)
        table[(slice(None),) * axis + (mine[places] != theirs,)] = np.inf  # states that this run cannot take
    return opened(*_once(tuple(axes.top[n] for n in names), table))


def _once(names: tuple[str, ...], table: Floats) -> Table:
    """A table in which each variable stands once: a block may be given one tensor in two places."""
    for j in range(len(names)):
        i = names.index(names[j])
        if i < j:
            table = np.moveaxis(np.diagonal(table, axis1=i, axis2=j), -1, i)
            return _once((*names[:j], *names[j + 1 :]), table)
    return names, table


class Chain:
    """The copies of one block that follow each other: their cost over the top variables that they touch.

    `cost` [shared state, entry, exit] is a lower bound; for the shared states in `powers` it is as good as the unit's own
    bounds, and exact along a way whose entries are settled.
    """

    def __init__(self, problem: Problem, run: Run, unit: UnitCost) -> None:
        self.problem, self.run, self.unit = problem, run, unit
        self.axes, self.compiled = boundary(problem, run), unit.compiled
        self.count = len(run.calls)
        self.powers: dict[int, Power] = {}
        self.tight = False
        if self.count == 1:
            return
        self.between = unit.objective.weights()[Component.AFTER_FORWARD] * between_bytes(problem, run)  # [state]
        self.shape = [len(self.compiled.alive[v]) for v in self.axes.shared]
        states = int(np.prod(self.shape, dtype=int))
        if states <= EAGER:
            n = len(chain_states(self.axes, self.compiled))
            self.cost = np.zeros((states, n, n))
            for s in range(states):
                self.power(s)
        else:
            self.cost = self._bounds()

    def _bounds(self) -> Floats:
        """No chain is cheaper than its first and last copy at their ends plus the cheapest copy for every other."""
        axes, c, states = self.axes, self.compiled, int(np.prod(self.shape, dtype=int))
        first = self.unit.bound(View((*axes.shared, axes.entry))).reshape(states, -1)
        last = self.unit.bound(View((*axes.shared, axes.exit))).reshape(states, -1)
        least = first.min(axis=1)
        least[np.isfinite(least)] *= self.count - 2
        bound = least[:, None, None] + first[:, :, None] + last[:, None, :]
        return self._alike(as_matrix(bound, axes, c))

    def _alike(self, matrix: Floats) -> Floats:
        """Where all copies must run alike: no copy changes the state of the tensor between them."""
        if not self.problem.uniform:
            return matrix
        return np.where(np.eye(matrix.shape[-1], dtype=bool), matrix, np.inf)

    def shared_at(self, s: int) -> dict[str, int]:
        """The states of the shared tensors in their joint state `s`, among those alive."""
        return dict(zip(self.axes.shared, map(int, np.unravel_index(s, self.shape)), strict=True)) if self.shape else {}

    def view(self, s: int) -> View:
        """One copy in shared state `s`; a run of one copy has all its boundary kept."""
        if self.count == 1:
            return View(self.compiled.open)
        return View((self.axes.entry, self.axes.exit), tuple(self.shared_at(s).items()))

    def matrix(self, s: int) -> Floats:
        """[entry, exit] cost of one copy in shared state `s`; what is kept between copies is not in it."""
        return self._one(self.view(s))

    def _one(self, view: View) -> Floats:
        return self._alike(as_matrix(self.unit.bound(view), self.axes, self.compiled))

    def power(self, s: int) -> None:
        """Work out all copies in shared state `s` from the unit's bounds."""
        self.powers[s] = self._chained(self.matrix(s))
        self.cost[s] = self.powers[s].cost[0]

    def _chained(self, matrix: Floats) -> Power:
        """All copies in a row, of which one costs `matrix` [entry, exit]."""
        one = Power(matrix[None])
        return times(power(Power(one.cost + self.between), self.count - 1), one)

    def tighten(self) -> None:
        """Raise the bounds of shared states: no chain is cheaper than with one shared tensor in its state and the others as
        each copy likes best. Where several tensors are shared, that is nearly exact."""
        if self.count == 1 or len(self.shape) < 2 or self.tight:
            return
        self.tight = True
        bound = self.cost.reshape(*self.shape, *self.cost.shape[1:])
        for axis, name in enumerate(self.axes.shared):
            views = [View((self.axes.entry, self.axes.exit), ((name, s),)) for s in range(self.shape[axis])]
            alone = np.stack([self._chained(self._one(view)).cost[0] for view in views])  # [state, entry, exit]
            others = [i for i in range(len(self.shape)) if i != axis]
            np.maximum(bound, np.expand_dims(alone, others), out=bound)
        self.cost = bound.reshape(self.cost.shape)

    @property
    def own_table(self) -> Floats:
        """The run's costs so far, over its boundary (of a run of one copy) or [shared state, entry, exit]."""
        return self.unit.bound(self.view(0)) if self.count == 1 else self.cost

    def table(self) -> Table:
        """The run's costs so far, over top variables."""
        return self.over_top(self.own_table)

    def over_top(self, table: Floats) -> Table:
        """A table of the form of `own_table`, over top variables."""
        axes, c = self.axes, self.compiled
        if self.count == 1:
            return to_top(self.problem, axes, c, table, c.open)
        names = (*axes.shared, axes.entry, axes.exit)
        return to_top(self.problem, axes, c, table.reshape(*self.shape, *table.shape[1:]), names, matrix=True)

    @cached_property
    def places(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """The top variables touched, and for each of their entries (flat) the entry of the run's own table, or -1."""
        shape = self.own_table.shape
        names, there = self.over_top(np.arange(float(np.prod(shape))).reshape(shape))
        return names, np.where(np.isfinite(there), there, -1.0).astype(np.int64).ravel()

    def margins(self, tree: BucketTree) -> Floats:
        """Least weighted cost of all through each entry of the run's own table, in a top network that was weighed."""
        names, entries = self.places
        shape = self.own_table.shape
        found = np.full(int(np.prod(shape)), np.inf)
        np.minimum.at(found, entries[entries >= 0], tree.through(tree.home(names), names).ravel()[entries >= 0])
        return found.reshape(shape)

    def work_out_below(self, tree: BucketTree, value: float) -> None:
        """Work out the shared states through which something better than `value` may lead, the most promising ones first."""
        if self.count == 1:
            return
        least = self.margins(tree).min(axis=(1, 2))
        for s in map(int, np.argsort(least)[:BATCH]):
            if least[s] < value and s not in self.powers:
                self.power(s)

    def work_out(self, top: Mapping[str, int]) -> bool:
        """Work out the shared state that `top` uses; False where it was already."""
        if self.count == 1:
            return False
        s, _ = self._at(top)
        if s in self.powers:
            return False
        self.power(s)
        return True

    def settle(self, top: Mapping[str, int]) -> bool:
        """Make every copy exact on the way that `top` uses; whether that raised a bound."""
        s, way = self.way(top)
        view, raised = self.view(s), False
        for entry in dict.fromkeys(way):
            raised |= self.unit.settle(view, entry)
        if raised and self.count > 1:
            self.power(s)
        return raised

    def copies(self, top: Mapping[str, int]) -> list[Copy]:
        """How each copy runs."""
        s, way = self.way(top)
        view = self.view(s)
        for entry in dict.fromkeys(way):
            self.unit.settle(view, entry)
        return [self.unit.settled[view, entry].copy for entry in way]

    def slack(self, top: Mapping[str, int]) -> float:
        """How far the copies on the way may stand above what is proven."""
        s, way = self.way(top)
        view = self.view(s)
        found = [(f, n) for entry, n in Counter(way).items() if (f := self.unit.settled.get((view, entry)))]
        return sum(n * max(0.0, f.cost - f.bound) for f, n in found)

    def way(self, top: Mapping[str, int]) -> tuple[int, list[tuple[int, ...]]]:
        """The shared state, and the entry of the unit's view that each copy uses."""
        s, at = self._at(top)
        c = self.compiled
        if self.count == 1:
            return 0, [tuple(int(np.searchsorted(c.alive[v], at[v])) for v in c.open)]
        both = chain_states(self.axes, c)
        ends = [int(np.searchsorted(both, at[v])) for v in (self.axes.entry, self.axes.exit)]
        states = both[[ends[0], *self.powers[s].path(0, *ends), ends[1]]]
        entries = np.searchsorted(c.alive[self.axes.entry], states[:-1])
        exits = np.searchsorted(c.alive[self.axes.exit], states[1:])
        return s, list(zip(entries.tolist(), exits.tolist(), strict=True))

    def _at(self, top: Mapping[str, int]) -> tuple[int, dict[str, int]]:
        """The shared state, and the states of the boundary in the block's own numbering."""
        alive = self.problem.top.alive
        at = {inner: int(alive[outer][top[outer]]) for inner, outer in self.axes.top.items() if outer in top}
        if self.count == 1 or not self.shape:
            return 0, at
        shared = [int(np.searchsorted(self.compiled.alive[v], at[v])) for v in self.axes.shared]
        return int(np.ravel_multi_index(shared, self.shape)), at
