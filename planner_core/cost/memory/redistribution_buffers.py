"""Memory that a redistribution needs on its way, step by step as `runtime.moves` takes them.

A collective reads one buffer and writes another; gathering or scattering any dim but the outermost also rearranges it
in a copy. A slice of the outermost dim is a view, which keeps the whole tensor alive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner_core.core import Partial, Placements, Replicate, Shard, Step, local_shape


@dataclass(frozen=True, slots=True)
class Transit:
    """Bytes beside the tensor that is moved: of the storage it ends in (0: still its own), and at the highest point."""

    result: int
    peak: int


def transit(
    shape: tuple[int, ...], item_bytes: int, start: Placements, steps: Sequence[Step], sizes: tuple[int, ...],
    segments: Mapping[int, tuple[int, ...]],
) -> Transit:  # fmt: skip
    """What moving a tensor of global `shape` from `start` takes on a mesh of `sizes`."""
    here, held, peak = list(start), 0, 0
    for step in steps:
        before = local_shape(shape, tuple(here), sizes)
        here[step.axis] = step.dst
        if sizes[step.axis] == 1:
            continue
        old = math.prod(before) * item_bytes
        new = math.prod(local_shape(shape, tuple(here), sizes)) * item_bytes
        result, used = _step(step, before, old, new, segments)
        peak = max(peak, held + used)
        held = result if result else held
    return Transit(held, peak)


def _step(
    step: Step, before: tuple[int, ...], old: int, new: int, segments: Mapping[int, tuple[int, ...]]
) -> tuple[int, int]:
    """Bytes of the new storage (0: a view of the old) and bytes used, both beside the old tensor."""
    src, dst = step.src, step.dst
    if isinstance(dst, Shard):
        fused = _fused(segments, dst.dim)
        if isinstance(src, Replicate):
            return (0, 0) if _outermost(before, dst.dim) and not fused else (new, new)
        if isinstance(src, Shard):  # the pieces, what is received, that in order, and with its fused parts apart
            return new, old + (3 if _fused(segments, src.dim) else 2) * new
        return new, new + old * ((dst.dim > 0) + fused)
    if isinstance(src, Shard) and not isinstance(dst, Partial):
        return new, new * (2 if not _outermost(before, src.dim) or _fused(segments, src.dim) else 1)
    return new, new


def _outermost(shape: tuple[int, ...], dim: int) -> bool:
    """Whether shares of `dim` lie one after the other in memory."""
    return math.prod(shape[:dim]) == 1


def _fused(segments: Mapping[int, tuple[int, ...]], dim: int) -> bool:
    return len(segments.get(dim, ())) > 1
