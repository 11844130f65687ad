"""The parts of a cost network: variables that have states, and factors, which are tables over one or two variables.

Example: an operator with 3 strategies reads a tensor with 4 states. Each is a variable. Their factor has `cost`
[component, 3, 4] and `allowed` [3, 4]: the cost of strategy a with state b, and whether the pair is possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from planner_core.core import Block, Value
from planner_core.cost import NUM_COMPONENTS, Bools, Floats, Ints
from planner_core.ops import GroupStrategy
from planner_core.search.network.states import TensorStates


class Costs:
    """An array [component, ...] of costs, of which only the components are stored that are not zero in every entry.

    Most tables have one to three of ten: what an operand costs is seconds of forward alone. On 2 x 8 GPUs that saves two thirds of the
    tables of DeepSeek-V4, which are most of what planning holds, and as much of the work to select and to weigh them.
    """

    __slots__ = ("components", "flat", "rows")

    def __init__(self, components: Ints, rows: Floats) -> None:
        self.components, self.rows = components, rows
        # With one dim for all entries. Not -1: of a table that costs nothing no row is stored, and numpy cannot tell its entries.
        self.flat = rows.reshape(len(components), math.prod(rows.shape[1:]))

    @staticmethod
    def of(dense: Floats) -> Costs:
        """Return the costs of an array with every component."""
        used = np.flatnonzero(dense.reshape(NUM_COMPONENTS, -1).any(axis=1))
        return Costs(used, dense[used])

    def dense(self) -> Floats:
        """[component, ...]: a new array with every component."""
        dense = zero_costs(*self.rows.shape[1:])
        dense[self.components] = self.rows
        return dense

    def __add__(self, other: Costs) -> Costs:
        if self.components.tobytes() == other.components.tobytes():
            return Costs(self.components, self.rows + other.rows)
        # What only forbids entries costs nothing.
        if not len(self.components) or not len(other.components):
            return self if len(self.components) else other
        components = np.union1d(self.components, other.components)
        total = np.zeros((len(components), *self.rows.shape[1:]))
        for costs in (self, other):
            total[np.searchsorted(components, costs.components)] += costs.rows
        return Costs(components, total)

    def __getitem__(self, entries: tuple[Any, ...]) -> Costs:
        """Return the costs of some `entries`, an index of the dims after the first."""
        return Costs(self.components, self.rows[(slice(None), *entries)])

    def equals(self, other: Costs) -> bool:
        """Return whether two arrays are equal."""
        same = self.components.tobytes() == other.components.tobytes()
        return same and np.array_equal(self.rows, other.rows)

    def weighted(self, weights: Floats) -> Floats:
        """[...] or [sum, ...]: the components weighted with `weights` [component] or [sum, component]."""
        sums = weights[..., self.components] @ self.flat
        return np.asarray(sums.reshape(*weights.shape[:-1], *self.rows.shape[1:]))

    def component(self, number: int) -> Floats:
        """[...]: one component, which must not be written."""
        where = np.flatnonzero(self.components == number)
        return self.rows[where[0]] if len(where) else np.zeros(self.rows.shape[1:])


class Factor:
    """A table over one variable (a) or two (a, b): `costs` [component, a(, b)], and `allowed` [a(, b)], the possible entries."""

    def __init__(self, variables: tuple[str, ...], costs: Costs | Floats, allowed: Bools) -> None:
        self.vars, self.allowed = variables, allowed
        self.costs = costs if isinstance(costs, Costs) else Costs.of(costs)

    @property
    def cost(self) -> Floats:
        """[component, a(, b)]: a new array with every component."""
        return self.costs.dense()

    @cached_property
    def barrier(self) -> Floats:
        """[a(, b)]: zero where an entry is possible, infinite elsewhere."""
        return np.where(self.allowed, 0.0, np.inf)


class TablePool:
    """The tables of the factors of a model's blocks in all their variants, each once and numbered.

    A model that calls one operator twenty times in a row has its table twenty times, and most tables of a block that is recomputed are
    those of the block that is kept. Kinds of layers that differ in their attention share those of all else.
    """

    def __init__(self) -> None:
        self.tables: list[Factor] = []
        """The first factor that has each table."""
        self._sums: dict[tuple[object, ...], tuple[list[Factor], Factor]] = {}
        self._states: dict[bytes, Ints] = {}
        self._selections: dict[tuple[object, ...], tuple[Factor, Factor]] = {}
        self._numbers_by_id: dict[tuple[int, int], int] = {}
        self._numbers_by_sample: dict[tuple[object, ...], list[int]] = {}
        self._least: dict[tuple[int, tuple[int, ...]], Floats] = {}

    def merge(self, net: Network) -> dict[tuple[str, ...], Factor]:
        """Add up a network's factors over the same variables, so that each set of variables has one factor. Equal sums get one table."""
        by_scope: dict[tuple[str, ...], list[Factor]] = {}
        for f in net.factors:
            by_scope.setdefault(f.vars, []).append(f)
        return {scope: self._sum(factors) for scope, factors in by_scope.items()}

    def _sum(self, factors: list[Factor]) -> Factor:
        """Return the sum of factors over the same variables."""
        first, *others = factors
        if not others:
            return first
        # DeepSeek-V4's networks on the four meshes of 16 GPUs have 5 876 such sums, of which 404 differ.
        key = tuple((id(f.costs), id(f.allowed)) for f in factors)
        if key not in self._sums:
            costs, allowed = first.costs, first.allowed
            for f in others:
                costs, allowed = costs + f.costs, allowed & f.allowed
            # The factors are kept, so that no other table gets the id of one of theirs.
            self._sums[key] = factors, Factor(first.vars, costs, allowed)
        total = self._sums[key][1]
        return Factor(first.vars, total.costs, total.allowed)

    def states(self, is_alive: Bools) -> Ints:
        """Return the numbers of the states that are left, for `select`. Equal ones are one array."""
        key = is_alive.tobytes()
        if key not in self._states:
            self._states[key] = np.flatnonzero(is_alive)
        return self._states[key]

    def select(self, f: Factor, alive: Mapping[str, Ints]) -> Factor:
        """Return a factor without the states that are not `alive` (arrays of `states`). Factors that have one table get one table.

        The result is always a new object: `number` replaces its arrays by equal ones, and other networks may have `f` too.
        """
        if all(len(alive[v]) == n for v, n in zip(f.vars, f.allowed.shape, strict=True)):
            return Factor(f.vars, f.costs, f.allowed)
        key = id(f.costs), id(f.allowed), *(id(alive[v]) for v in f.vars)
        if key not in self._selections:
            first, *second = (alive[v] for v in f.vars)
            pick: tuple[Any, ...] = (first[:, None], *second) if second else (first,)
            # The factor is kept, so that no other table gets its id.
            self._selections[key] = f, Factor(f.vars, f.costs[pick], f.allowed[pick])
        selected = self._selections[key][1]
        return Factor(f.vars, selected.costs, selected.allowed)

    def forget_whole_tables(self) -> None:
        """Free the tables with all states that `merge` and `select` keep, once all blocks are compiled."""
        self._sums.clear()
        self._selections.clear()

    def number(self, f: Factor) -> int:
        """Return the number of a factor's table. The factor then holds the array of the first one that is equal."""
        number = self._numbers_by_id.get((id(f.costs), id(f.allowed)))
        if number is None:
            number = self._number_of_equal(f)
            table = self.tables[number]
            f.costs, f.allowed = table.costs, table.allowed
            # The table stays here, so no other array gets its id.
            self._numbers_by_id[id(f.costs), id(f.allowed)] = number
        return number

    def _number_of_equal(self, f: Factor) -> int:
        # A hash of all bytes takes longer than a comparison, and most tables that differ do so in each sixteenth entry.
        costs = f.costs
        sample = f.allowed.shape, costs.components.tobytes(), costs.flat[:, ::16].tobytes()
        numbers = self._numbers_by_sample.setdefault(sample, [])
        for number in numbers:
            table = self.tables[number]
            if table.costs.equals(costs) and np.array_equal(table.allowed, f.allowed):
                return number
        numbers.append(len(self.tables))
        self.tables.append(f)
        return numbers[-1]

    def weighted(self, numbers: Sequence[int], weights: Floats) -> Floats:
        """[table, entry]: the costs of tables of one shape weighted with `weights` [component]; infinite where an entry is impossible."""
        tables = [self.tables[number] for number in numbers]
        weighted = np.empty((len(tables), tables[0].allowed.size))
        for f, row in zip(tables, weighted, strict=True):
            np.matmul(weights[f.costs.components], f.costs.flat, out=row)
            row += f.barrier.ravel()
        return weighted

    def least(self, number: int, components: tuple[int, ...]) -> Floats:
        """[component]: the least that a possible entry of a table costs, of each of these components by itself."""
        if (key := (number, components)) not in self._least:
            f = self.tables[number]
            each = [f.costs.component(c) for c in components]
            # Most tables hold no memory.
            self._least[key] = np.array([(costs + f.barrier).min() if costs.any() else 0.0 for costs in each])
        return self._least[key]


def zero_costs(*shape: int) -> Floats:
    """[component, *shape]: a cost of zero for every entry."""
    return np.zeros((NUM_COMPONENTS, *shape))


def allow_only(name: str, allowed: Bools) -> Factor:
    """Return a factor that allows a variable only the states in `allowed` [state]. It costs nothing."""
    nothing = Costs(np.zeros(0, dtype=np.int64), np.zeros((0, len(allowed))))
    return Factor((name,), nothing, np.asarray(allowed, dtype=bool))


@dataclass(frozen=True, slots=True)
class SampleDims:
    """The dims, by value of a block, on which values are sharded where samples are.

    `produced` are the dims on which operators make the values. `delivered` lacks the values that some operator reads whole, for example
    a statistic of all samples.
    """

    produced: Mapping[int, int]
    delivered: Mapping[int, int]


@dataclass
class RuleCache:
    """What restrictions work out on one network of a block, for all networks of the block on one mesh: these differ in their weights'
    states and in costs.

    `factors`: what a restriction adds whatever states the weights have, by what the factors depend on, then by variable. `samples` are
    None until a restriction asks for them.
    """

    factors: dict[tuple[object, ...], dict[str, Factor]] = field(default_factory=dict)
    samples: SampleDims | None = None


@dataclass
class Network:
    """The cost network of one block: its variables (name -> number of states) and its factors.

    `tensors` and `nodes` say what the states mean: the joint states of a tensor or weight, the joint rows of a group. `saved_values` are
    the values whose delivered tensor an operator of this block, or a block that it calls, keeps for backward. `saves_between` says whether
    the tensor between two copies of the block is kept. All networks of the block on one mesh share the `rules`.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    factors: list[Factor] = field(default_factory=list)
    tensors: dict[str, TensorStates] = field(default_factory=dict)
    nodes: dict[str, GroupRows] = field(default_factory=dict)
    saved_values: set[int] = field(default_factory=set)
    saves_between: bool = False
    rules: RuleCache = field(default_factory=RuleCache)

    def placed_values(self, block: Block) -> Iterator[tuple[int, Value, TensorStates]]:
        """Yield the tensors and weights of `block` that have a variable: the number of each, its value and its states."""
        for number, value in enumerate(block.values):
            states = self.tensors.get(tensor_name(number))
            if states is not None:
                yield number, value, states


@dataclass
class GroupRows:
    """The joint rows of a group of operators: `index` [joint row, axis] is the number of the group's row on each axis."""

    strategy: GroupStrategy
    index: Ints


def tensor_name(value: int) -> str:
    """Return the name of the variable of a tensor or weight."""
    return f"t{value}"
