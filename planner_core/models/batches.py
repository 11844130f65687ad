"""Graphs of one model for several numbers of samples, derived from a few captures.

A step of 16 samples may run in 1, 2, 4, 8 or 16 micro-batches, and each number has a graph of its own. Captures of b and 2b samples show
how every size depends on the samples (`snapshots.symbolic`), and a third capture must agree with them. The others follow from these.
A deep model is captured once, and these captures are of the same model with few layers (`snapshots.deepened`).

Example: 16, 8 and 4 samples are captured. A size of 32 768, 16 384 and 8 192 is 2 048 a sample, so it is 2 048 with one sample.
"""

from __future__ import annotations

import copy
from typing import Any

from planner_core.core import CaptureError, Graph, graph_from_json
from planner_core.models.loading import brings_inputs, has_snapshot, open_model
from planner_core.models.snapshots.deepened import with_samples
from planner_core.models.snapshots.symbolic import merge_symbolic_batch


class BatchGraphs:
    """Open models as `open_model` does, and remember the graphs of the last one."""

    def __init__(self) -> None:
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._asked: tuple[Any, ...] = ()
        self._captured: dict[int, Graph] = {}
        self._symbolic: dict[str, Any] | None = None
        self._irregular = False
        self._few_layers: BatchGraphs | None = None
        """The graphs of the same model with few layers."""
        self._few_are_like_all = True

    def copy(self) -> BatchGraphs:
        """Return graphs remembered apart: what the copy opens from now on, this one does not know."""
        other = copy.copy(self)
        other._captured = dict(self._captured)
        other._few_layers = self._few_layers and self._few_layers.copy()
        return other

    def open(self, model: str, *, batch: int | None, seq: int | None, dtype: str, layers: int | None) -> Graph:
        """Return the graph of a model at a workload; None stands for a default size."""
        if has_snapshot(model, dtype) or brings_inputs(model):  # a snapshot has every batch, and code brings its own
            return open_model(model, batch=batch, seq=seq, dtype=dtype, layers=layers)
        if not self._is_same_model(model, seq, dtype, layers):
            self._forget_graphs()
        if batch in self._captured:
            return self._captured[batch]
        if (
            batch is not None
            and (graph := self._derive_from_few_layers(batch) or self._derive_from_captures(batch)) is not None
        ):
            return graph
        graph = open_model(model, batch=batch, seq=seq, dtype=dtype, layers=layers)
        self._asked = model, graph.workload["seq"], dtype, layers
        self._captured[graph.workload["batch"]] = graph
        return graph

    def _is_same_model(self, model: str, seq: int | None, dtype: str, layers: int | None) -> bool:
        """Return whether the remembered graphs are of this model and workload. Without `seq` it is the model's own."""
        if not self._asked:
            return False
        return self._asked == (model, seq or self._asked[1], dtype, layers)

    def _derive_from_few_layers(self, batch: int) -> Graph | None:
        """Derive the graph for `batch` samples from the first capture, and from the model with few layers; None if these do not show it."""
        if not self._captured or not self._few_are_like_all:
            return None
        few_layers = self._few_layers = self._few_layers or BatchGraphs()
        model, seq, dtype, _ = self._asked

        def open_few(samples: int, layers: int) -> Graph:
            return few_layers.open(model, batch=samples, seq=seq, dtype=dtype, layers=layers)

        graph = with_samples(next(iter(self._captured.values())), batch, open_few)
        self._few_are_like_all = graph is not None
        return graph

    def _derive_from_captures(self, batch: int) -> Graph | None:
        """Derive the graph for `batch` samples if three captures show how it depends on them; otherwise None."""
        if self._symbolic is None and not self._irregular:
            pair = next(((b, 2 * b) for b in self._captured if 2 * b in self._captured), None)
            proofs = [g for b, g in self._captured.items() if pair and b not in pair]
            if pair and proofs:
                try:
                    self._symbolic = merge_symbolic_batch(*(self._captured[b] for b in pair), *proofs)
                except CaptureError:  # a size is no linear function of the number of samples
                    self._irregular = True
        return None if self._symbolic is None else graph_from_json(self._symbolic, batch=batch)
