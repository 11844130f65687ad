"""The memory that a redistribution needs on its way, for the steps that `runtime.program.collectives.moves` takes.

A collective reads one buffer and writes another. If it gathers or scatters a dim that is not the outermost, the data is also
rearranged in a copy. A slice of the outermost dim is a view, which keeps the whole tensor alive.

Example: an all_gather of dim 1 of a tensor of 8 MB on 4 devices reads 2 MB, writes 8 MB, and copies these 8 MB in the right order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner_core.core import Partial, Placements, Replicate, Shard, Step, largest_local_shape
from planner_core.cost.communication.redistribution import step_bytes


@dataclass(frozen=True, slots=True)
class RedistributionMemory:
    """Bytes beside the tensor that is moved: of the storage in which it ends (0: still its own), and at the highest moment."""

    result: int
    peak: int


def redistribution_memory(
    shape: tuple[int, ...],
    item_bytes: int,
    start: Placements,
    steps: Sequence[Step],
    sizes: tuple[int, ...],
    segments: Mapping[int, tuple[int, ...]],
) -> RedistributionMemory:
    """Return the bytes that it takes to move a tensor of global `shape` from the placements `start` by `steps`, on a mesh of `sizes`."""
    here, current, peak = list(start), 0, 0
    for step in steps:
        before = largest_local_shape(shape, tuple(here), sizes)
        here[step.axis] = step.dst
        # Such a step moves nothing, but the tensor has another placement from here on.
        if sizes[step.axis] == 1:
            continue
        old = math.prod(before) * item_bytes
        new = math.prod(largest_local_shape(shape, tuple(here), sizes)) * item_bytes
        result, used = _step_memory(step, before, old, new, segments)
        # `current` is what the step before made. The tensor that came in is its maker's, and is not counted here.
        peak = max(peak, current + used)
        current = result if result else current
    return RedistributionMemory(current, peak)


def _step_memory(
    step: Step, before: tuple[int, ...], old: int, new: int, segments: Mapping[int, tuple[int, ...]]
) -> tuple[int, int]:
    """Return the bytes of the new storage (0: it is a view of the old one), and bytes in use on the way, both beside the old tensor."""
    src, dst = step.src, step.dst
    if isinstance(dst, Shard):
        fused = _has_segments(segments, dst.dim)
        if isinstance(src, Replicate):
            return (0, 0) if _is_outermost(before, dst.dim) and not fused else (new, new)
        if isinstance(src, Shard):  # the pieces, what is received, and that in order
            return new, old + 2 * new
        # reduce_scatter of 8 MB over 4: it writes 2 MB. Dim 0 is sent as it lies; another dim needs a copy in order first. Of fused
        # parts each rank's are joined, and then those of all ranks, before anything is received.
        return new, max(2 * old, old + new) if fused else new + old * (dst.dim > 0)
    if isinstance(src, Shard) and not isinstance(dst, Partial):
        # all_gather of 8 MB over 4: it writes 8 MB rank by rank, and of another dim than the outermost 8 MB more in order.
        return new, new * (2 if not _is_outermost(before, src.dim) or _has_segments(segments, src.dim) else 1)
    return new, new


def _is_outermost(shape: tuple[int, ...], dim: int) -> bool:
    """Return whether the parts of `dim` lie one after the other in memory."""
    return math.prod(shape[:dim]) == 1


def _has_segments(segments: Mapping[int, tuple[int, ...]], dim: int) -> bool:
    return len(segments.get(dim, ())) > 1


def buffer_bytes_by_step(
    shape: tuple[int, ...], item_bytes: int, start: Placements, steps: Sequence[Step], sizes: tuple[int, ...]
) -> list[int]:
    """Return the bytes of a weight at `start`, and after each step. What an all_gather writes, and what a reduce_scatter reads, has all
    parts in the length of the longest."""
    here, sizes_in_bytes = list(start), []
    for before, after in pairwise((None, *steps, None)):
        if before is not None:
            here[before.axis] = before.dst
        if before is not None and before.collective == "all_gather":
            sizes_in_bytes.append(step_bytes(shape, item_bytes, tuple(here), before, sizes))
        elif after is not None and after.collective == "reduce_scatter":
            sizes_in_bytes.append(step_bytes(shape, item_bytes, tuple(here), after, sizes))
        else:
            sizes_in_bytes.append(math.prod(largest_local_shape(shape, tuple(here), sizes)) * item_bytes)
    return sizes_in_bytes
