"""The parts of a cost network: variables that have states, and factors, which are tables over one or two variables.

Example: an operator with 3 strategies reads a tensor with 4 states. Each is a variable. Their factor has `cost`
[component, 3, 4] and `allowed` [3, 4]: the cost of strategy a with state b, and whether the pair is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from planner_core.cost import NUM_COMPONENTS
from planner_core.ops import GroupStrategy
from planner_core.search.network.states import Bools, Floats, Ints, TensorStates


@dataclass
class Factor:
    """A table over one variable (a) or two (a, b): `cost` [component, a(, b)], and `allowed` [a(, b)], the possible entries."""

    vars: tuple[str, ...]
    cost: Floats
    allowed: Bools

    @cached_property
    def barrier(self) -> Floats:
        """[a(, b)]: zero where an entry is possible, infinite elsewhere."""
        return np.where(self.allowed, 0.0, np.inf)

    @cached_property
    def possible_states(self) -> tuple[Bools, ...]:
        """For each variable [state]: whether some entry of the state is possible."""
        if len(self.vars) == 1:
            return (self.allowed,)
        return np.asarray(self.allowed.any(axis=1)), np.asarray(self.allowed.any(axis=0))


@dataclass(frozen=True, slots=True)
class DistinctTables:
    """The tables of some factors, each once. A model that calls one operator twenty times in a row has its table twenty times.

    `kinds` [factor] is the number of its table. `costs` [component, entry] and `barrier` [entry] hold all tables side by side, each
    from the entry `starts` [kind] on.
    """

    kinds: tuple[int, ...]
    costs: Floats
    barrier: Floats
    starts: tuple[int, ...]


def distinct_tables(factors: Sequence[Factor]) -> DistinctTables:
    """Return the tables of the factors without repetition. The factors become views of them, so that each is held once."""
    table_numbers: dict[tuple[tuple[int, ...], bytes, bytes], int] = {}
    kinds = tuple(
        table_numbers.setdefault((f.allowed.shape, f.cost.tobytes(), f.allowed.tobytes()), len(table_numbers))
        for f in factors
    )
    # Reversed, so that of equal factors the first is written last and stays.
    first_of_kind = dict(zip(reversed(kinds), reversed(factors), strict=True))  # the first factor of each kind
    flat_costs = [first_of_kind[k].cost.reshape(NUM_COMPONENTS, -1) for k in range(len(table_numbers))]
    starts = tuple(accumulate((table.shape[1] for table in flat_costs[:-1]), initial=0))
    costs_of_tables = np.concatenate(flat_costs, axis=1)
    barrier = np.concatenate([first_of_kind[k].barrier.ravel() for k in range(len(table_numbers))])
    for f, k in zip(factors, kinds, strict=True):
        f.cost = costs_of_tables[:, starts[k] : starts[k] + f.allowed.size].reshape(f.cost.shape)
    return DistinctTables(kinds, costs_of_tables, barrier, starts)


def zero_costs(*shape: int) -> Floats:
    """[component, *shape]: a cost of zero for every entry."""
    return np.zeros((NUM_COMPONENTS, *shape))


def allow_only(name: str, allowed: Bools) -> Factor:
    """Return a factor that allows a variable only the states in `allowed` [state]. It costs nothing."""
    return Factor((name,), zero_costs(len(allowed)), np.asarray(allowed, dtype=bool))


@dataclass
class Network:
    """The cost network of one block: its variables (name -> number of states) and its factors.

    `tensors` and `nodes` say what the states mean: the joint states of a tensor or weight, the joint rows of a group. A *port*
    is a tensor that is an input or an output of the block. `saved_ports` are the ports whose delivered tensor an operator of
    this block keeps for backward. `keeps_between` says whether the tensor between two copies of the block is kept.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    factors: list[Factor] = field(default_factory=list)
    tensors: dict[str, TensorStates] = field(default_factory=dict)
    nodes: dict[str, GroupRows] = field(default_factory=dict)
    saved_ports: set[int] = field(default_factory=set)
    keeps_between: bool = False


@dataclass
class GroupRows:
    """The joint rows of a group of operators: `index` [joint row, axis] is the number of the group's row on each axis."""

    strategy: GroupStrategy
    index: Ints


def tensor_name(value: int) -> str:
    """Return the name of the variable of a tensor or weight."""
    return f"t{value}"
