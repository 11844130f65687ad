"""A run of equal blocks as one table: the (min, +) power of the block's table over its boundary.

    one copy:   cost [entry, exit], the states of the residual stream before and after the copy
    two copies: min over k of  cost[entry, k] + kept[k] + cost[k, exit]
    L copies:   at most 2 log2 L such products

`kept[k]` is the price of the tensor between two copies, if one of them keeps it for backward.

The copies of a run may share tensors other than the residual stream, for example an encoder's output. Then the run has one such
table for each *shared state*, which is a joint state of the shared tensors. If there are many, `Chain.compute_power` computes only those
that an optimum uses. Every other shared state has a lower bound: first from two smaller eliminations (`_initial_bounds`), later from
chains in which one shared tensor is fixed at a time (`tighten_bounds`). If the optimum of the top network uses computed states only,
it is the optimum of all. A run of one copy has a table over its whole boundary; if that is large, it is treated likewise, with the two
widest variables as its entry and exit.

Example: T5's decoder layers share the encoder's output and its mask, with 25 states each on two axes. 50 chains bound all 625
joint states within 1 %. After that only 16 of the 625 are computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner_core.cost import Component, Floats, Ints
from planner_core.search.algebra.bucket_tree import BucketTree
from planner_core.search.algebra.distinct import sorted_distinct
from planner_core.search.algebra.elimination import Table
from planner_core.search.algebra.minplus import MinPlusPower, min_plus_power, min_plus_product
from planner_core.search.network.factors import tensor_name
from planner_core.search.network.folded import CompiledNetwork, Problem
from planner_core.search.network.runs import Run
from planner_core.search.network.search_cache import Copy
from planner_core.search.units.tables import drop_fixed_variables
from planner_core.search.units.unit import UnitCost, View

MAX_EAGER_STATES = 4
"""A run with at most this many shared states has all of them computed at once."""
BATCH = 16
"""Shared states of a run that `compute_promising_states` computes together."""
MAX_WHOLE_ENTRIES = 100_000
"""Entries of the table over the whole boundary that a run of one copy has at most."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The variables of a block's boundary.

    `shared`: the inputs that all copies share and that have more than one state. `entry` and `exit`: the tensor of the chain
    before and after a copy; of a run of one copy the two variables of most states, or "" if its whole table is small. `top_names`: the
    top network's variable for each variable of the boundary.
    """

    shared: tuple[str, ...]
    entry: str
    exit: str
    top_names: dict[str, str]


def boundary_of_run(problem: Problem, run: Run) -> Boundary:
    """Return the boundary of a run's block."""
    block = problem.coarse.graph.blocks[run.block]
    first, last = run.calls[0], run.calls[-1]
    if run.chain_in >= 0:
        entry, exit_ = tensor_name(block.inputs[run.chain_in]), tensor_name(block.outputs[run.chain_out])
    else:
        entry, exit_ = _widest_pair(problem.first_variant(run.block))
    inner = [*block.inputs, *block.outputs]
    outer = [*first.inputs, *last.outputs]
    top = {tensor_name(i): tensor_name(o) for i, o in zip(inner, outer, strict=True)}
    shared = problem.first_variant(run.block).open_boundary
    return Boundary(tuple(k for k in shared if k not in (entry, exit_)), entry, exit_, top)


def _widest_pair(compiled: CompiledNetwork) -> tuple[str, str]:
    """Return the two variables of most states of a boundary, in its order; two empty names if its whole table is small."""
    names, sizes = compiled.open_boundary, compiled.sizes
    if math.prod(sizes[v] for v in names) <= MAX_WHOLE_ENTRIES:
        return "", ""
    widest = sorted(names, key=sizes.__getitem__)[-2:]
    first, second = (v for v in names if v in widest)
    return first, second


def in_chain_states(table: Floats, axes: Boundary, compiled: CompiledNetwork) -> Floats:
    """[..., state, state]: a table [..., entry, exit] in one numbering of states for both, that of `chain_states`."""
    states = chain_states(axes, compiled)
    entry, exit_ = (np.searchsorted(states, compiled.alive[v]) for v in (axes.entry, axes.exit))
    if len(entry) == len(exit_) == len(states):
        return table
    matrix = np.full((*table.shape[:-2], len(states), len(states)), np.inf)
    matrix[..., entry[:, None], exit_[None, :]] = table
    return matrix


def chain_states(axes: Boundary, compiled: CompiledNetwork) -> Ints:
    """Return the states that are alive at the entry or at the exit, in the network's numbering: of the tensor that links copies, or, of a
    run of one copy, of two tensors whose numbers need not mean the same."""
    entry_states, exit_states = compiled.alive[axes.entry], compiled.alive[axes.exit]
    if np.array_equal(entry_states, exit_states):  # mostly they are
        return entry_states
    return sorted_distinct(np.concatenate([entry_states, exit_states]))


def over_top_variables(
    problem: Problem,
    axes: Boundary,
    compiled: CompiledNetwork,
    table: Floats,
    names: Sequence[str],
    in_chain_numbering: bool = False,
) -> Table:
    """Return a table over the boundary variables `names` as a table over top variables, in the numbering of their alive states.

    `in_chain_numbering`: entry and exit are in the numbering of `chain_states`.
    """
    for axis, name in enumerate(names):
        run_states = (
            chain_states(axes, compiled)
            if in_chain_numbering and name in (axes.entry, axes.exit)
            else compiled.alive[name]
        )
        top_states = problem.top.alive[axes.top_names[name]]
        if np.array_equal(run_states, top_states):
            continue
        # A state that `run_states` lacks is found at a neighbour's place, or past the end. Its entries are made infinite below.
        positions = np.minimum(np.searchsorted(run_states, top_states), len(run_states) - 1)
        table = table.take(positions, axis)
        # This run cannot take these states.
        table[(slice(None),) * axis + (run_states[positions] != top_states,)] = np.inf
    return drop_fixed_variables(*_merge_equal_names(tuple(axes.top_names[n] for n in names), table))


def _merge_equal_names(names: tuple[str, ...], table: Floats) -> Table:
    """Return the table with each variable once: a variable stands twice if a block gets one tensor as two inputs."""
    for j in range(len(names)):
        i = names.index(names[j])
        if i < j:
            table = np.moveaxis(np.diagonal(table, axis1=i, axis2=j), -1, i)
            return _merge_equal_names((*names[:j], *names[j + 1 :]), table)
    return names, table


@dataclass
class RunBounds:
    """Lower bounds on the cost of all copies of a run. Runs with equally many copies of one block share them.

    `cost` [shared state, entry, exit] is a lower bound. For the shared states in `powers` it is the (min, +) power of the
    unit's bounds; it is exact where the way from entry to exit uses settled entries only.
    """

    cost: Floats
    powers: dict[int, MinPlusPower] = field(default_factory=dict)
    is_tight: bool = False


class Chain:
    """The copies of one block that follow each other, and their cost over the top variables that they touch.

    Example: layers with a sliding window alternate with full attention, three to one. 64 layers are 16 runs of three copies and 16 of
    one. The runs of three differ only in the top variables that they touch. So their powers are computed once, and an entry that one of
    them settles is settled for all.
    """

    def __init__(self, problem: Problem, run: Run, unit: UnitCost, first_chain: Chain | None = None) -> None:
        """`first_chain` is a chain of the same block with as many copies, if one exists."""
        self.problem, self.run, self.unit = problem, run, unit
        self.boundary, self.compiled = boundary_of_run(problem, run), unit.first_variant
        self.count = len(run.calls)
        self._views: dict[int, View] = {}
        self.bounds: RunBounds = RunBounds(np.zeros(0)) if first_chain is None else first_chain.bounds
        if self.is_whole:
            return
        # Bytes that are kept between two copies cost their price. Without a price of memory this is 0.
        self.between = unit.objective.weights()[Component.AFTER_FORWARD] * self.between_bytes  # [state]
        self.shape = [len(self.compiled.alive[v]) for v in self.boundary.shared]
        if first_chain is not None:
            return
        states = int(np.prod(self.shape, dtype=int))
        if states <= MAX_EAGER_STATES:
            n = len(self.states)
            self.bounds.cost = np.zeros((states, n, n))
            for s in range(states):
                self.compute_power(s)
        else:
            self.bounds.cost = self._initial_bounds()

    @property
    def is_whole(self) -> bool:
        """Whether the run is one copy with a table over its whole boundary."""
        return not self.boundary.entry

    @cached_property
    def states(self) -> Ints:
        """The states of the tensor that links the copies: see `chain_states`."""
        return chain_states(self.boundary, self.compiled)

    @cached_property
    def between_bytes(self) -> Floats:
        """[state of the chain]: bytes of the tensor between two copies if one of them keeps it for backward, else 0."""
        if self.count == 1:
            return np.zeros(len(self.states))
        net = self.compiled.net
        return net.tensors[self.boundary.entry].local_bytes[self.states] * float(net.saves_between)

    @property
    def cost(self) -> Floats:
        """[shared state, entry, exit]: the lower bounds of `RunBounds`."""
        return self.bounds.cost

    @property
    def powers(self) -> dict[int, MinPlusPower]:
        """The powers of the computed shared states."""
        return self.bounds.powers

    def _initial_bounds(self) -> Floats:
        """[shared state, entry, exit]: a lower bound. It is the least cost of the first copy from `entry`, plus that of the last copy
        to `exit`, plus the least cost of a copy for each copy between them. One copy costs at least either of the first two."""
        axes, c, states = self.boundary, self.compiled, int(np.prod(self.shape, dtype=int))
        first = self.unit.bound(View((*axes.shared, axes.entry))).reshape(states, -1)
        last = self.unit.bound(View((*axes.shared, axes.exit))).reshape(states, -1)
        if self.count == 1:
            return in_chain_states(np.maximum(first[:, :, None], last[:, None, :]), axes, c)
        least = first.min(axis=1)
        # A run of two copies has none between them, and 0 · inf is not a number: so what is impossible stays as it is.
        least[np.isfinite(least)] *= self.count - 2
        # With copies [[3, 3], [4, 2]] and L = 4, entry (0, 1) costs at least 3 + 2 · 2 + 2 = 9, and entry (0, 0) 3 + 2 · 2 + 3 = 10. They
        # really cost 9 and 11 (docs/SEARCH.md, section 4).
        bound = least[:, None, None] + first[:, :, None] + last[:, None, :]
        return self._diagonal_if_uniform(in_chain_states(bound, axes, c))

    def _diagonal_if_uniform(self, matrix: Floats) -> Floats:
        """Forbid the entries off the diagonal if all copies must be equal: then no copy changes the state of the residual stream."""
        if not self.problem.uniform or self.count == 1:
            return matrix
        return np.where(np.eye(matrix.shape[-1], dtype=bool), matrix, np.inf)

    def shared_states(self, s: int) -> dict[str, int]:
        """Return the state of each shared tensor in shared state `s`, numbered as in `alive`."""
        return (
            dict(zip(self.boundary.shared, map(int, np.unravel_index(s, self.shape)), strict=True))
            if self.shape
            else {}
        )

    def view(self, s: int) -> View:
        """Return the view of one copy in shared state `s`, or of its whole boundary."""
        if s not in self._views:
            ends = self.boundary.entry, self.boundary.exit
            whole = View(self.compiled.open_boundary)
            self._views[s] = whole if self.is_whole else View(ends, tuple(self.shared_states(s).items()))
        return self._views[s]

    def copy_matrix(self, s: int) -> Floats:
        """[entry, exit]: cost of one copy in shared state `s`, without the tensor that is kept between copies."""
        return self._view_matrix(self.view(s))

    def _view_matrix(self, view: View) -> Floats:
        return self._diagonal_if_uniform(in_chain_states(self.unit.bound(view), self.boundary, self.compiled))

    def compute_power(self, s: int) -> None:
        """Compute the table of all copies in shared state `s` from the unit's bounds."""
        self.powers[s] = self._power_of_copies(self.copy_matrix(s))
        self.cost[s] = self.powers[s].cost[0]

    def _power_of_copies(self, matrix: Floats) -> MinPlusPower:
        """Return the product of all copies, if one costs `copy_matrix` [entry, exit]."""
        copy = MinPlusPower(matrix[None])
        if self.count == 1:
            return copy
        # L copies have L - 1 tensors between them: (one + between)^(L - 1) ⊗ one.
        return min_plus_product(min_plus_power(MinPlusPower(copy.cost + self.between), self.count - 1), copy)

    def tighten_bounds(self) -> None:
        """Raise the bounds of the shared states.

        The bound fixes one shared tensor at its state and lets each copy choose the states of the others. It is taken for each
        shared tensor, and the largest counts. If several tensors are shared, that is nearly exact.
        """
        if self.is_whole or len(self.shape) < 2 or self.bounds.is_tight:
            return
        self.bounds.is_tight = True
        bound = self.cost.reshape(*self.shape, *self.cost.shape[1:])
        for axis, name in enumerate(self.boundary.shared):
            views = [View((self.boundary.entry, self.boundary.exit), ((name, s),)) for s in range(self.shape[axis])]
            # [state, entry, exit]
            fixed_bound = np.stack([self._power_of_copies(self._view_matrix(view)).cost[0] for view in views])
            others = [i for i in range(len(self.shape)) if i != axis]
            # Each is a valid bound, so the largest of them is one too.
            np.maximum(bound, np.expand_dims(fixed_bound, others), out=bound)
        self.bounds.cost = bound.reshape(self.cost.shape)

    @property
    def lower_bounds(self) -> Floats:
        """The run's lower bounds: [shared state, entry, exit], or over the whole boundary."""
        return self.unit.bound(self.view(0)) if self.is_whole else self.cost

    def top_table(self) -> Table:
        """Return the run's lower bounds as a table over top variables."""
        return self.over_top(self.lower_bounds)

    def over_top(self, table: Floats) -> Table:
        """Return a table with the shape of `lower_bounds`, as a table over top variables."""
        names = self._table_names
        if self.is_whole:
            return over_top_variables(self.problem, self.boundary, self.compiled, table, names)
        shaped = table.reshape(*self.shape, *table.shape[1:])
        return over_top_variables(self.problem, self.boundary, self.compiled, shaped, names, in_chain_numbering=True)

    @property
    def _table_names(self) -> tuple[str, ...]:
        """The boundary variables over which `lower_bounds` is, after it was reshaped."""
        axes = self.boundary
        return self.compiled.open_boundary if self.is_whole else (*axes.shared, axes.entry, axes.exit)

    @cached_property
    def table_key(self) -> tuple[object, ...]:
        """Chains with the same key have the same array as `top_table`, over variables of their own (`top_scope`)."""
        top = [self.boundary.top_names[name] for name in self._table_names]
        return id(self.bounds), *(self.problem.top.alive[v].tobytes() for v in top), *(top.index(v) for v in top)

    @cached_property
    def top_scope(self) -> tuple[str, ...]:
        """The variables of `top_table`: each once, and only those with several states."""
        top = dict.fromkeys(self.boundary.top_names[name] for name in self._table_names)
        return tuple(v for v in top if len(self.problem.top.alive[v]) > 1)

    @cached_property
    def top_entries(self) -> tuple[tuple[str, ...], Ints]:
        """The top variables that the run touches, and for each entry of a table over them (flat) the entry of `lower_bounds` (flat).
        It is -1 where the run cannot take a state."""
        shape = self.lower_bounds.shape
        # The number of each entry goes the way that its cost would go. Where it arrives as infinite, the run cannot be.
        names, entry_numbers = self.over_top(np.arange(float(np.prod(shape))).reshape(shape))
        return names, np.where(np.isfinite(entry_numbers), entry_numbers, -1.0).astype(np.int64).ravel()

    def margins(self, tree: BucketTree) -> Floats:
        """Return the least weighted cost of the whole model through each entry of `lower_bounds`. `tree` is the weighed top network."""
        names, entries = self.top_entries
        shape = self.lower_bounds.shape
        margins = np.full(int(np.prod(shape)), np.inf)
        # Several joint states of the top may lead to one entry of the run: the least of them counts.
        np.minimum.at(
            margins, entries[entries >= 0], tree.margin_through(tree.bucket_of(names), names).ravel()[entries >= 0]
        )
        return margins.reshape(shape)

    def compute_promising_states(self, tree: BucketTree, value: float) -> None:
        """Compute the BATCH most promising shared states, as far as a cost below `value` may lead through them."""
        if self.is_whole:
            return
        least = self.margins(tree).min(axis=(1, 2))
        for s in map(int, np.argsort(least)[:BATCH]):
            if least[s] < value and s not in self.powers:
                self.compute_power(s)

    def compute_used_state(self, top_states: Mapping[str, int]) -> bool:
        """Compute the shared state that the states `top_states` use. Returns False if it was computed already."""
        if self.is_whole:
            return False
        s, _ = self._boundary_states(top_states)
        if s in self.powers:
            return False
        self.compute_power(s)
        return True

    def settle_used_entries(self, top_states: Mapping[str, int], room: float) -> float:
        """Settle the entries that the copies use, for the states `top_states`, the most used one first, until their cost rose by `room`.
        Returns by how much it rose."""
        s, entries = self.used_entries(top_states)
        view, raised = self.view(s), 0.0
        for entry, uses in Counter(entries).most_common():
            if raised < room:
                # An entry that 30 copies use raises the whole cost 30 times as much as its own bound rises.
                raised += uses * self.unit.settle(view, entry, (room - raised) / uses)
        if raised and not self.is_whole:
            self.compute_power(s)
        return raised

    def copies(self, top_states: Mapping[str, int]) -> list[Copy]:
        """Return the best known copies for the states `top_states`."""
        s, entries = self.used_entries(top_states)
        view = self.view(s)
        for entry in dict.fromkeys(entries):
            self.unit.settle(view, entry, 0.0)
        return [self.unit.settled[view, entry].copy for entry in entries]

    def used_entries(self, top_states: Mapping[str, int]) -> tuple[int, list[tuple[int, ...]]]:
        """Return the shared state that the states `top_states` use, and the entry of the unit's view that each copy uses."""
        s, boundary_states = self._boundary_states(top_states)
        c = self.compiled
        if self.is_whole:
            return 0, [tuple(int(np.searchsorted(c.alive[v], boundary_states[v])) for v in c.open_boundary)]
        both = self.states
        ends = [int(np.searchsorted(both, boundary_states[v])) for v in (self.boundary.entry, self.boundary.exit)]
        # L copies have L + 1 states on their way: the entry, L - 1 between, the exit. Each two in a row are an entry of the view.
        path_states = both[[ends[0], *self.powers[s].cheapest_path(0, ends[0], ends[1]), ends[1]]]
        entries = np.searchsorted(c.alive[self.boundary.entry], path_states[:-1])
        exits = np.searchsorted(c.alive[self.boundary.exit], path_states[1:])
        return s, list(zip(entries.tolist(), exits.tolist(), strict=True))

    def _boundary_states(self, top_states: Mapping[str, int]) -> tuple[int, dict[str, int]]:
        """Return the shared state, and the state of each boundary variable in the numbering of the block's network."""
        alive = self.problem.top.alive
        states = {
            inner: int(alive[outer][top_states[outer]])
            for inner, outer in self.boundary.top_names.items()
            if outer in top_states
        }
        if self.is_whole or not self.shape:
            return 0, states
        shared = [int(np.searchsorted(self.compiled.alive[v], states[v])) for v in self.boundary.shared]
        return int(np.ravel_multi_index(shared, self.shape)), states
