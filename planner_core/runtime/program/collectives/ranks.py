"""This rank's place among the ranks that share a dim, which one or more mesh axes shard."""

from __future__ import annotations

from collections.abc import Sequence

from planner_core.runtime.program.collectives.axis import Axis

Axes = Sequence[Axis]


def shard_index(axes: Axes) -> int:
    """Return the index of this rank's shard of a dim that `axes` shard. The outer axis makes the larger pieces."""
    index = 0
    for axis in axes:
        index = index * axis.size + axis.rank
    return index


def num_shards(axes: Axes) -> int:
    """Return the number of shards of a dim that `axes` shard."""
    count = 1
    for axis in axes:  # not math.prod, which torch.compile does not know
        count *= axis.size
    return count
