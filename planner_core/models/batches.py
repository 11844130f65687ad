"""Open a model for each number of samples that a search asks for.

A step of 16 samples may run in 1, 2, 4, 8 or 16 micro-batches, and each number has a graph of its own. A few of them are captured, and
the others follow from these (`snapshots.by_samples`).
"""

from __future__ import annotations

import copy
from typing import Any

from planner_core.core import Graph
from planner_core.models.loading import brings_inputs, has_snapshot, open_model
from planner_core.models.snapshots.by_samples import GraphsBySamples


class BatchGraphs:
    """Open models as `open_model` does, and remember the graphs of the last one."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], GraphsBySamples] | None = None

    def copy(self) -> BatchGraphs:
        """Return graphs remembered apart: what the copy opens from now on, this one does not know."""
        other = copy.copy(self)
        other._last = self._last and (self._last[0], self._last[1].copy())
        return other

    def open(self, model: str, *, batch: int | None, seq: int | None, dtype: str, layers: int | None) -> Graph:
        """Return the graph of a model at a workload; None stands for a default size."""
        if has_snapshot(model, dtype) or brings_inputs(model):  # a snapshot has every batch, and code brings its own
            return open_model(model, batch=batch, seq=seq, dtype=dtype, layers=layers)

        def capture(samples: int | None, few: int | None) -> Graph:
            return open_model(model, batch=samples, seq=seq, dtype=dtype, layers=few or layers)

        known, graphs = self._last or ((), GraphsBySamples(capture))
        if known and known != (model, seq or known[1], dtype, layers):  # without `seq` it is the model's own
            graphs = GraphsBySamples(capture)
        graph = graphs.add(capture(None, None)) if batch is None else graphs.open(batch)
        self._last = (model, graph.workload["seq"], dtype, layers), graphs
        return graph
