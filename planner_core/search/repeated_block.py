"""A run of equal blocks as one table: the (min, +) power of the block's table over its boundary.

Tensors that all copies of a run share (an encoder's output) multiply the run's table. Where they have many joint
states, the block is solved only for those that an optimum asks for (`work_out`): any other stands with a lower bound,
from two smaller eliminations, and an optimum of the top network that rests on none of those is the optimum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.elimination import Elimination, Floats, Table, eliminate, given, order, reduce
from planner_core.search.algebra.minplus import Power, power, times
from planner_core.search.network.factors import MEMORY, NUM_COMPONENTS, Factor, tensor_name
from planner_core.search.network.folded import Compiled, Problem, Run

Weights = tuple[float, float, float, float]
"""Prices of the components of `network`: time, memory, communication, memory at the end of backward."""
EAGER = 4
"""Runs with at most this many shared states are worked out at once."""
BATCH = 16
"""Shared states of a run that are worked out together."""
SMALL = 1_000_000
"""Entries of the largest table that is made for all shared states together; the rest of a block is solved for each."""


def scalar(factors: Sequence[Factor], weights: Weights) -> list[Table]:
    """Tables of one number per entry: the weighted components, infinite where impossible."""
    w = np.asarray(weights)
    return [
        _open(f.vars, (w @ f.cost.reshape(NUM_COMPONENTS, -1)).reshape(f.allowed.shape) + f.barrier) for f in factors
    ]


def vectors(factors: Sequence[Factor], sums: Floats) -> list[Table]:
    """Tables of `sums` [sum, component] of the components: arrays [sum, entry of their variables]."""
    return [_open(f.vars, np.tensordot(sums, f.cost, axes=1)) for f in factors]


def _open(names: tuple[str, ...], array: Floats) -> Table:
    """The table without variables of one state, of which there may be more than numpy has dims. Further leading dims stay."""
    lead = array.ndim - len(names)
    one = [i for i in range(len(names)) if array.shape[lead + i] == 1]
    return tuple(v for i, v in enumerate(names) if i not in one), array.squeeze(axis=tuple(lead + i for i in one))


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
    shared = problem.blocks[run.block].open
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


def between_copies(problem: Problem, run: Run, weights: Weights) -> Floats:
    """Price of keeping the tensor between two copies for backward, per state of the exit."""
    compiled = problem.blocks[run.block]
    block = problem.coarse.graph.blocks[run.block]
    axes = boundary(problem, run)
    both = chain_states(axes, compiled)
    if not {block.inputs[run.chain_in], block.outputs[run.chain_out]} & compiled.net.saved_ports:
        return np.zeros(len(both))
    return weights[MEMORY] * compiled.net.tensors[axes.entry].local_bytes[both]


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
    return _open(*_once(tuple(axes.top[n] for n in names), table))


def _once(names: tuple[str, ...], table: Floats) -> Table:
    """A table in which each variable stands once: a block may be given one tensor in two places."""
    for j in range(len(names)):
        i = names.index(names[j])
        if i < j:
            table = np.moveaxis(np.diagonal(table, axis1=i, axis2=j), -1, i)
            return _once((*names[:j], *names[j + 1 :]), table)
    return names, table


class Solver:
    """One block under given weights: its tables, and what was solved of it, for every run of the block."""

    def __init__(self, compiled: Compiled, weights: Weights) -> None:
        self.compiled = compiled
        self.tables = scalar(compiled.factors, weights)
        self.steps, self.rest, self.left = reduce(compiled.sizes, self.tables, compiled.sequence, SMALL)
        self.solved: dict[tuple[tuple[str, ...], tuple[int, ...]], Elimination] = {}
        self.powers: dict[tuple[int, int], Power] = {}

    def over(self, keep: tuple[str, ...], at: Mapping[str, int], extra: Sequence[Table] = ()) -> Elimination:
        """The block with some variables given (in the numbering of those alive), as a table over `keep`."""
        key = (keep, tuple(at.values()))
        if extra or key not in self.solved:
            tables = [*self.rest, *extra]
            sequence = self._order(("", *keep), at, self.left, [t[0] for t in tables])
            found = eliminate(self.compiled.sizes, given(tables, at), sequence, keep)
            found.steps = self.steps + found.steps
            if extra:
                return found
            self.solved[key] = found
        return self.solved[key]

    def sequence(self, keep: tuple[str, ...], at: Mapping[str, int]) -> list[str]:
        """An order in which the whole block can be eliminated."""
        c = self.compiled
        return self._order(keep, at, c.sequence, [f.vars for f in c.factors])

    def _order(
        self, key: tuple[str, ...], at: Mapping[str, int], free: Sequence[str], scopes: Sequence[Sequence[str]]
    ) -> list[str]:
        """An order for the variables in `free` and those of the boundary that are neither kept nor given."""
        c = self.compiled
        left = [v for v in (*free, *c.keep) if v not in at and v not in key]
        if len(left) < 2 or len(left) == len(c.sequence):
            return left
        where = (key, tuple(at))
        if where not in c.orders:
            sizes = {v: n for v, n in c.sizes.items() if v in left or v in key}
            c.orders[where] = order(
                sizes, [[v for v in scope if v in sizes] for scope in scopes], [v for v in key if v in sizes]
            )
        return c.orders[where]


class Chain:
    """The copies of one block that follow each other, under given weights: their cost over the top variables that they touch.

    `cost` [shared state, entry, exit] is exact for the shared states in `powers`, a lower bound for the others.
    """

    def __init__(self, problem: Problem, run: Run, weights: Weights, block: Solver) -> None:
        self.problem, self.run, self.block = problem, run, block
        self.axes, self.compiled = boundary(problem, run), block.compiled
        self.count = len(run.calls)
        self.powers: dict[int, Power] = {}
        self.trees: dict[int, BucketTree] = {}
        if self.count == 1:
            return
        self.shape = [len(self.compiled.alive[v]) for v in self.axes.shared]
        self.between = between_copies(problem, run, weights)
        states = int(np.prod(self.shape, dtype=int))
        if states <= EAGER:
            n = len(self.between)
            self.cost = np.zeros((states, n, n))
            for s in range(states):
                self.power(s)
        else:
            self.cost = self._bounds()

    def _bounds(self) -> Floats:
        """No chain is cheaper than its first and last link at their ends plus the cheapest link for every other copy."""
        axes, c, states = self.axes, self.compiled, int(np.prod(self.shape, dtype=int))
        both = chain_states(axes, c)
        leaves: list[Table] = [((axes.exit,), self.between[np.searchsorted(both, c.alive[axes.exit])])]
        first = self.block.over((*axes.shared, axes.entry), {}, leaves).table.reshape(states, -1)
        last = self.block.over((*axes.shared, axes.exit), {}).table.reshape(states, -1)
        least = first.min(axis=1)
        least[np.isfinite(least)] *= self.count - 2
        bound = least[:, None, None] + first[:, :, None] + last[:, None, :]
        return self._alike(as_matrix(bound, axes, c))

    def _alike(self, matrix: Floats) -> Floats:
        """Where all copies must run alike: no link changes the state of the tensor between them."""
        if not self.problem.uniform:
            return matrix
        return np.where(np.eye(matrix.shape[-1], dtype=bool), matrix, np.inf)

    def shared_at(self, s: int) -> dict[str, int]:
        """The states of the shared tensors in their joint state `s`, among those alive."""
        return dict(zip(self.axes.shared, map(int, np.unravel_index(s, self.shape)), strict=True)) if self.shape else {}

    def link(self, s: int) -> Elimination:
        """One copy in shared state `s`; a run of one copy has all its boundary kept."""
        if self.count == 1:
            return self.block.over(self.compiled.open, {})
        return self.block.over((self.axes.entry, self.axes.exit), self.shared_at(s))

    def tree(self, s: int) -> BucketTree:
        """One copy in shared state `s` with all its tables kept, over the boundary that is left. Raises TooLarge."""
        if s not in self.trees:
            c, at = self.compiled, self.shared_at(s) if self.count > 1 else {}
            keep = (self.axes.entry, self.axes.exit) if self.count > 1 else c.open
            free = {v: n for v, n in c.sizes.items() if v not in at}
            self.trees[s] = BucketTree(free, given(self.block.tables, at), self.block.sequence(keep, at), keep)
        return self.trees[s]

    def matrix(self, s: int) -> Floats:
        """Cost of one copy, from entry to exit, in shared state `s`; what is kept between copies is not in it."""
        return self._alike(as_matrix(self.link(s).table, self.axes, self.compiled))

    def power(self, s: int) -> None:
        """Make shared state `s` exact."""
        known = self.block.powers
        if (self.count, s) not in known:
            leaf = Power(self.matrix(s)[None])
            known[self.count, s] = times(power(Power(leaf.cost + self.between), self.count - 1), leaf)
        self.powers[s] = known[self.count, s]
        self.cost[s] = self.powers[s].cost[0]

    def table(self) -> Table:
        """The run's costs so far: exact or a lower bound."""
        return self.over_top(self.link(0).table if self.count == 1 else self.cost)

    def over_top(self, table: Floats) -> Table:
        """A table over the boundary (of a run of one copy), or [shared state, entry, exit], over top variables."""
        axes, c = self.axes, self.compiled
        if self.count == 1:
            return to_top(self.problem, axes, c, table, c.open)
        names = (*axes.shared, axes.entry, axes.exit)
        return to_top(self.problem, axes, c, table.reshape(*self.shape, *table.shape[1:]), names, matrix=True)

    @cached_property
    def places(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """The top variables touched, and for each of their entries (flat) the entry of the run's own table, or -1."""
        shape = self.link(0).table.shape if self.count == 1 else self.cost.shape
        names, there = self.over_top(np.arange(float(np.prod(shape))).reshape(shape))
        return names, np.where(np.isfinite(there), there, -1.0).astype(np.int64).ravel()

    def margins(self, tree: BucketTree) -> Floats:
        """Least weighted cost of all through each entry of the run's own table, in a top network that was weighed."""
        names, entries = self.places
        shape = self.link(0).table.shape if self.count == 1 else self.cost.shape
        found = np.full(int(np.prod(shape)), np.inf)
        np.minimum.at(found, entries[entries >= 0], tree.through(tree.home(names), names).ravel()[entries >= 0])
        return found.reshape(shape)

    def work_out_below(self, tree: BucketTree, value: float) -> None:
        """Make the shared states exact through which something better than `value` may lead, the most promising ones first."""
        if self.count == 1:
            return
        least = self.margins(tree).min(axis=(1, 2))
        for s in map(int, np.argsort(least)[:BATCH]):
            if least[s] < value and s not in self.powers:
                self.power(s)

    def work_out(self, top: Mapping[str, int]) -> bool:
        """Make the shared state that `top` uses exact; False where it was already."""
        if self.count == 1:
            return False
        s, _ = self._at(top)
        if s in self.powers:
            return False
        self.power(s)
        return True

    def _at(self, top: Mapping[str, int]) -> tuple[int, dict[str, int]]:
        """The shared state, and the states of the boundary in the block's own numbering."""
        alive = self.problem.top.alive
        at = {inner: int(alive[outer][top[outer]]) for inner, outer in self.axes.top.items() if outer in top}
        if self.count == 1 or not self.shape:
            return 0, at
        shared = [int(np.searchsorted(self.compiled.alive[v], at[v])) for v in self.axes.shared]
        return int(np.ravel_multi_index(shared, self.shape)), at

    def walk(self, top: Mapping[str, int]) -> list[dict[str, int]]:
        """The assignment of each copy, in the block network's full numbering."""
        s, at = self._at(top)
        if self.count == 1:
            return [self._inside(0, at)]
        both = chain_states(self.axes, self.compiled)
        ends = [int(np.searchsorted(both, at[self.axes.entry])), int(np.searchsorted(both, at[self.axes.exit]))]
        states = [ends[0], *self.powers[s].path(0, *ends), ends[1]]
        known: dict[tuple[int, int], dict[str, int]] = {}  # copies that run alike share one assignment
        for i, j in pairwise(states):
            if (i, j) not in known:
                here = {**at, self.axes.entry: int(both[i]), self.axes.exit: int(both[j])}
                known[i, j] = self._inside(s, here)
        return [known[pair] for pair in pairwise(states)]

    def _inside(self, s: int, at: Mapping[str, int]) -> dict[str, int]:
        c, link = self.compiled, self.link(s)
        kept = {v: int(np.searchsorted(c.alive[v], at[v])) for v in c.keep}
        return {v: int(c.alive[v][i]) for v, i in link.assignment(kept).items()}
