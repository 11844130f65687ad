"""The parts of a generated program: its units, their functions, and what the engine needs of each."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from planner_core.core import Placements, Step
from planner_core.runtime.record import TapeCall
from planner_core.runtime.write.syntax import function, literal

PlacedConstant = tuple[int, Placements]
"""A constant, and the placements in which a unit needs it."""


@dataclass(frozen=True)
class UnitUse:
    """How a unit uses a parameter, by its full name, and the steps that are taken outside of its function.

    A gathered parameter has one such use for each operator; any other has one for all.
    """

    argument: str
    parameter: str
    gather: tuple[Step, ...]
    reduce: tuple[Step, ...]
    regather: bool
    """Whether the parameter is gathered again for backward."""
    saved_by_autograd: bool
    """Whether autograd keeps the gathered parameter, or a view of it, for backward."""
    trained: bool
    """Whether the planned loss sends a gradient to it through this use."""


@dataclass(frozen=True)
class UnitBuffer:
    """A buffer that a unit reads or writes (running statistics), as a view of this rank's part: its argument, its name, and the
    cuts (axis, dim) that the placements ask for."""

    argument: str
    buffer: str
    placements: Placements
    cuts: tuple[tuple[int, int], ...]


@dataclass
class FunctionSource:
    """A function, with its arguments and results by their numbers on the tape."""

    parameters: list[str]
    body: list[ast.stmt]
    returned: list[ast.expr]
    inputs: list[int]
    input_names: list[str]
    """The names of the inputs among the parameters."""
    cuts: list[PlacedConstant]
    uses: list[UnitUse]
    buffers: list[UnitBuffer]
    outputs: list[int]
    seeds: int
    """Number of calls that draw random numbers."""

    def tree(self, name: str) -> ast.FunctionDef:
        """Return the function under a name."""
        results = self.returned[0] if len(self.returned) == 1 else literal(tuple(self.returned))
        return function(name, self.parameters, [*self.body, ast.Return(results if self.returned else None)])


@dataclass
class UnitInstance:
    """One unit of the forward pass: a call of a repeated block, or a part of the model between such calls."""

    label: str
    prefix: str
    calls: list[TapeCall]
    name: str = ""
    function: str = ""
    written: FunctionSource | None = None

    @property
    def source(self) -> FunctionSource:
        """The source of its function."""
        assert self.written is not None
        return self.written


@dataclass(frozen=True)
class UnitSpec:
    """A unit as the engine needs it: its name, function and weights, how it is recomputed, whether it draws random numbers, and
    whether the planned loss sends a gradient through it."""

    name: str
    function: str
    uses: tuple[UnitUse, ...]
    buffers: tuple[UnitBuffer, ...]
    recompute: str
    seeded: bool
    returns: bool


@dataclass
class Program:
    """Generated code and what it needs. `foreign`: objects that it names but cannot write. `groups`: lists of units by name."""

    source: str
    units: list[UnitSpec]
    groups: dict[str, list[int]]
    foreign: dict[str, Any]
    inputs: list[str]
    data_axes: tuple[int, ...]
    outputs: list[int]
    result: Any
    split_buffers: dict[str, Placements] = field(default_factory=dict)
    has_tables: bool = False
    buffers: tuple[str, ...] = ()
    """The buffers that the code reads."""
    table_buffers: tuple[str, ...] = ()
    """The buffers on which the tables depend."""
    draws: bool = False
    """Whether it draws random numbers other than masks of dropout."""
