"""What a written program is: its units, their functions, and what the engine needs of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from planner_core.runtime.plan_reader import Placements, Step
from planner_core.runtime.record import Call
from planner_core.runtime.write.functions import Written


@dataclass
class Instance:
    """One unit of the forward pass: the call of a repeated block, or a part of the rest."""

    label: str
    prefix: str
    calls: list[Call]
    name: str = ""
    function: str = ""
    written: Written | None = None

    @property
    def text(self) -> Written:
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
    """Whether backward needs what was gathered."""


@dataclass(frozen=True)
class UnitBuffer:
    """How a unit sees a buffer: by which name, and which views (axis, dim) lead to this rank's share."""

    argument: str
    buffer: str
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnitSpec:
    """What the engine needs of a unit: its name, its function, its weights, whether it is recomputed and draws chances."""

    name: str
    function: str
    uses: tuple[UnitUse, ...]
    buffers: tuple[UnitBuffer, ...]
    recompute: str
    seeded: bool


@dataclass
class Program:
    """Generated code and what it needs: `foreign` are objects that it calls by name, `groups` lists of units by name."""

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
    """Buffers that the code reads."""
    table_buffers: tuple[str, ...] = ()
    """Those on which the tables depend."""
