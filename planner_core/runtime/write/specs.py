"""The parts of a generated program: its units, their functions, and what the engine needs of each."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from planner_core.core import Placements
from planner_core.runtime.program.units import UnitBuffer, UnitSpec, UnitUse
from planner_core.runtime.record import TapeCall
from planner_core.runtime.write.syntax import function, literal

PlacedConstant = tuple[int, Placements]
"""A constant, and the placements in which a unit needs it."""


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
