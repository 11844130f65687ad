"""The graph of a batch that is too large to capture, from captures at small batches."""

from __future__ import annotations

from collections.abc import Callable

from planner_core.core import CaptureError, Graph, graph_from_json
from planner_core.models.snapshots.deepened import with_samples
from planner_core.models.snapshots.symbolic import merge_symbolic_batch

SMALL_BATCH = 2
"""Samples of the smallest capture. With one sample, broadcast sizes of 1 would look like the batch."""


def capture_wide_batch(capture: Callable[[int, int | None], Graph], batch: int) -> Graph | None:
    """Make the graph for `batch` samples from captures of 2 and of 4, which show how each size depends on the batch.

    A capture of 3 must agree with them. Of a deep model only the first one has all its layers (`deepened`). None if the graph depends on
    the batch in another way. `capture` gets a number of samples, and of layers, where None stands for the model's own.
    """
    if batch <= 2 * SMALL_BATCH:
        return None
    first = capture(SMALL_BATCH, None)

    def open_few(samples: int, layers: int) -> Graph | None:
        if samples == SMALL_BATCH:
            return capture(samples, layers)
        return capture_wide_batch(lambda n, _: capture(n, layers), samples)

    if (graph := with_samples(first, batch, open_few)) is not None:
        return graph
    wide, proof = capture(2 * SMALL_BATCH, None), capture(2 * SMALL_BATCH - 1, None)
    try:
        return graph_from_json(merge_symbolic_batch(first, wide, proof), batch=batch)
    except CaptureError:
        return None
