"""The parts of a cost network: variables that have states, and factors, which are tables over one or two variables.

Example: an operator with 3 strategies reads a tensor with 4 states. Each is a variable. Their factor has `cost`
[component, 3, 4] and `allowed` [3, 4]: what strategy a costs beside state b, and whether the two go together at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner_core.cost import NUM_COMPONENTS
from planner_core.ops import GroupStrategy, Row
from planner_core.search.network.states import Bools, Floats, Ints, TensorStates


@dataclass
class Factor:
    """A table over one variable (a) or two (a, b): `cost` [component, a(, b)], and `allowed` [a(, b)], the possible entries."""

    vars: tuple[str, ...]
    cost: Floats
    allowed: Bools

    @cached_property
    def barrier(self) -> Floats:
        """[a(, b)]: zero where an entry is possible, else infinite."""
        return np.where(self.allowed, 0.0, np.inf)


def costs(*shape: int) -> Floats:
    """[component, *shape]: a cost of zero for every entry."""
    return np.zeros((NUM_COMPONENTS, *shape))


def only(name: str, ok: Bools) -> Factor:
    """A factor that allows a variable only the states in `ok` [state]. It costs nothing."""
    return Factor((name,), costs(len(ok)), np.asarray(ok, dtype=bool))


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
    nodes: dict[str, NodeRows] = field(default_factory=dict)
    saved_ports: set[int] = field(default_factory=set)
    keeps_between: bool = False


@dataclass
class NodeRows:
    """The joint rows of a group of operators: `index` [joint row, axis] is the number of the group's row on each axis."""

    strategy: GroupStrategy
    index: Ints


def tensor_name(value: int) -> str:
    """The name of the variable of a tensor or weight."""
    return f"t{value}"


def rows_of(node: NodeRows, r: int) -> list[tuple[Row, ...]]:
    """The group row on every axis of joint row `r`."""
    return [node.strategy.rows[int(i)] for i in node.index[r]]
