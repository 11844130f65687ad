"""Collectives along a mesh axis (`axis`), what they carry of a tensor (`dim_parts`), which of them leave together (`launches`), and the
redistributions that are made of them (`moves`)."""

from planner_core.runtime.program.collectives.axis import Axis, Finish, Trace
from planner_core.runtime.program.collectives.dim_parts import (
    NO_SEGMENTS,
    Segments,
    describe_uneven_split,
    join_shards,
    local_shard,
    longest_part,
    pad_dim,
    shard_length,
    split_by_rank,
    split_segments,
    split_unevenly,
    uneven_length,
)
from planner_core.runtime.program.collectives.launches import coalesced_launch
from planner_core.runtime.program.collectives.moves import AxisMove, MoveKind, apply_moves, move, require_dim, step_kind
from planner_core.runtime.program.collectives.torch_names import check_torch
