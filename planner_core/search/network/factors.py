"""The values a cost network is made of: variables with states, and tables over one or two of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner_core.cost import NUM_COMPONENTS
from planner_core.ops import GroupStrategy, Row
from planner_core.search.network.states import Bools, Floats, Ints, TensorStates


@dataclass
class Factor:
    """A table over one or two variables: `cost` [component, a(, b)], and which entries are possible, `allowed` [a(, b)]."""

    vars: tuple[str, ...]
    cost: Floats
    allowed: Bools

    @cached_property
    def barrier(self) -> Floats:
        """Zero where allowed, else infinite: [a(, b)]."""
        return np.where(self.allowed, 0.0, np.inf)


def costs(*shape: int) -> Floats:
    """A cost of zero for every entry: [component, *shape]."""
    return np.zeros((NUM_COMPONENTS, *shape))


def only(name: str, ok: Bools) -> Factor:
    """Allows a variable the states in `ok` [state] alone, at no cost."""
    return Factor((name,), costs(len(ok)), np.asarray(ok, dtype=bool))


@dataclass
class Network:
    """Variables (name -> number of states) and factors of one block; `ports` are the block's inputs and outputs.

    `tensors` and `nodes` tell what the states mean: a tensor's or parameter's joint states, a group's joint rows.
    `saved_ports` are ports whose delivered tensor is kept for backward by an op of this block; `keeps_between` says that the
    tensor between two copies is.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    factors: list[Factor] = field(default_factory=list)
    tensors: dict[str, TensorStates] = field(default_factory=dict)
    nodes: dict[str, NodeRows] = field(default_factory=dict)
    saved_ports: set[int] = field(default_factory=set)
    keeps_between: bool = False


@dataclass
class NodeRows:
    """Joint rows of a group: `index[r, a]` is the group row on axis a."""

    strategy: GroupStrategy
    index: Ints


def tensor_name(value: int) -> str:
    """Variable of a tensor or parameter."""
    return f"t{value}"


def rows_of(node: NodeRows, r: int) -> list[tuple[Row, ...]]:
    """The group row on every axis of joint row `r`."""
    return [node.strategy.rows[int(i)] for i in node.index[r]]
