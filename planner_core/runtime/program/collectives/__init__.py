"""Collectives along a mesh axis (`axis`), what they carry of a tensor (`dim_parts`), which of them leave together (`launches`), and the
redistributions that are made of them (`moves`)."""

from planner_core.runtime.program.collectives.axis import Axis, Finish, Trace
from planner_core.runtime.program.collectives.dim_parts import (
    NO_SEGMENTS,
    Segments,
    cut,
    in_zeros,
    joined,
    neighbours,
    not_even,
    own_length,
    own_share,
    padded,
    part_of,
    parts,
    shares,
    uneven,
)
from planner_core.runtime.program.collectives.launches import one_launch
from planner_core.runtime.program.collectives.moves import AxisMove, move, sharded, take
from planner_core.runtime.program.collectives.torch_names import check_torch, takes_meta

__all__ = [
    "NO_SEGMENTS",
    "Axis",
    "AxisMove",
    "Finish",
    "Segments",
    "Trace",
    "check_torch",
    "cut",
    "in_zeros",
    "joined",
    "move",
    "neighbours",
    "not_even",
    "one_launch",
    "own_length",
    "own_share",
    "padded",
    "part_of",
    "parts",
    "sharded",
    "shares",
    "take",
    "takes_meta",
    "uneven",
]
