"""The graph of a batch that is too large to capture, from captures at small batches."""

from __future__ import annotations

from collections.abc import Callable

from planner_core.core import CaptureError, Graph, graph_from_json
from planner_core.models.snapshots.symbolic import merge_symbolic_batch

SMALL_BATCH = 2
"""Samples of the smallest capture. With one sample, broadcast sizes of 1 would look like the batch."""


def capture_wide_batch(capture: Callable[[int], Graph], batch: int) -> Graph | None:
    """Make the graph for `batch` samples from `capture(2)` and `capture(4)`, which show how each size depends on the batch.

    `capture(3)` must agree with them. None if the graph depends on the batch in another way.
    """
    if batch <= 2 * SMALL_BATCH:
        return None
    first, wide, proof = capture(SMALL_BATCH), capture(2 * SMALL_BATCH), capture(2 * SMALL_BATCH - 1)
    try:
        return graph_from_json(merge_symbolic_batch(first, wide, proof), batch=batch)
    except CaptureError:
        return None
