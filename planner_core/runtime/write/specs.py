"""The parts of a generated program: its units, their functions, and what the engine needs of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from planner_core.runtime.plan_reader import Placements, Step
from planner_core.runtime.record import TapeCall
from planner_core.runtime.write.functions import FunctionText


class BlockLine(NamedTuple):
    """One line of a program: the label of the block whose function it is in ("" for a part between blocks), and the operators that it
    holds, by their names in the block."""

    text: str
    label: str = ""
    ops: tuple[str, ...] = ()


@dataclass
class Instance:
    """One unit of the forward pass: a call of a repeated block, or a part of the model between such calls."""

    label: str
    prefix: str
    calls: list[TapeCall]
    name: str = ""
    function: str = ""
    written: FunctionText | None = None

    def lines(self) -> list[BlockLine]:
        """The lines of its function, with the operators that each holds."""
        own = [[site[len(self.prefix) :].removeprefix(".") for site in sites] for sites in self.text.sites]
        lines = self.text.source(self.function).split("\n")
        return [BlockLine(text, self.label, tuple(ops)) for text, ops in zip(lines, own, strict=True)]

    @property
    def text(self) -> FunctionText:
        """Its function."""
        assert self.written is not None
        return self.written


@dataclass(frozen=True)
class UnitUse:
    """How a unit uses a parameter, by full name."""

    argument: str
    parameter: str
    gather: tuple[Step, ...]
    reduce: tuple[Step, ...]
    again: bool
    """Whether backward needs the gathered parameter."""
    trained: bool
    """Whether the planned loss sends a gradient to it."""


@dataclass(frozen=True)
class UnitBuffer:
    """How a unit uses a buffer: its name, and the views (axis, dim) that lead to this rank's part."""

    argument: str
    buffer: str
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnitSpec:
    """What the engine needs of a unit: its name, function and weights, whether it is recomputed, and whether it has dropout."""

    name: str
    function: str
    uses: tuple[UnitUse, ...]
    buffers: tuple[UnitBuffer, ...]
    recompute: str
    seeded: bool


@dataclass
class Program:
    """Generated code and what it needs. `foreign`: objects that it names but cannot write. `groups`: lists of units by name."""

    source: str
    units: list[UnitSpec]
    groups: dict[str, list[int]]
    foreign: dict[str, Any]
    inputs: list[str]
    data_axes: tuple[int, ...]
    sample_inputs: dict[str, int | None]
    outputs: list[int]
    result: Any
    delivered: list[tuple[Placements, int | None]]
    split_buffers: dict[str, Placements] = field(default_factory=dict)
    has_tables: bool = False
    buffers: tuple[str, ...] = ()
    """The buffers that the code reads."""
    lines: tuple[BlockLine, ...] = ()
    """The lines of the source."""
    table_buffers: tuple[str, ...] = ()
    """The buffers on which the tables depend."""
