"""Graphs of one model for several numbers of samples, derived from a few captures.

Captures of b and 2b samples show how every size depends on the samples (`symbolic`), and a third capture must agree with them. The
others follow from these. A deep model is captured once, and these captures are of the same model with few layers (`deepened`).

Example: 16, 8 and 4 samples are captured. A size of 32 768, 16 384 and 8 192 is 2 048 a sample, so it is 2 048 with one sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from planner_core.core import CaptureError, Graph, graph_from_json
from planner_core.models.snapshots.deepened import with_samples
from planner_core.models.snapshots.symbolic import merge_symbolic_batch

Capture = Callable[[int, int | None], Graph]
"""Captures a model with a number of samples, and of layers, where None stands for the model's own."""
SMALL_BATCH = 2
"""Samples of the smallest capture for a batch that is too large. With one sample, broadcast sizes of 1 would look like the batch."""


class GraphsBySamples:
    """The graphs of one model, by their number of samples. Each is captured when those before do not show it."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._captured: dict[int, Graph] = {}
        self._symbolic: dict[str, Any] | None = None
        self._irregular = False
        self._few_layers: GraphsBySamples | None = None
        """The graphs of the same model with few layers."""
        self._few_are_like_all = True

    def copy(self) -> GraphsBySamples:
        """Return graphs remembered apart: what the copy captures from now on, this one does not know."""
        other = copy.copy(self)
        other._captured = dict(self._captured)
        other._few_layers = self._few_layers and self._few_layers.copy()
        return other

    def open(self, batch: int) -> Graph:
        """Return the graph for `batch` samples."""
        graph = self.derive(batch)
        return self.add(self._capture(batch, None)) if graph is None else graph

    def add(self, graph: Graph) -> Graph:
        """Remember a capture, and return it."""
        self._captured[graph.workload["batch"]] = graph
        return graph

    def derive(self, batch: int) -> Graph | None:
        """Return the graph for `batch` samples; None if the captures do not show it."""
        if batch in self._captured:
            return self._captured[batch]
        return self._derive_from_few_layers(batch) or self._derive_from_captures(batch)

    def _derive_from_few_layers(self, batch: int) -> Graph | None:
        """Derive the graph for `batch` samples from the first capture, and from the model with few layers; None if these do not show it."""
        if not self._captured or not self._few_are_like_all:
            return None

        def open_few(samples: int, layers: int) -> Graph:
            if self._few_layers is None:
                self._few_layers = GraphsBySamples(lambda samples, few: self._capture(samples, few or layers))
            return self._few_layers.open(samples)

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


def capture_wide_batch(capture: Capture, batch: int) -> Graph | None:
    """Return the graph of a batch that is too large to capture, from captures of 2, 4 and 3 samples; None if they do not show it."""
    if batch <= 2 * SMALL_BATCH:
        return None
    graphs = GraphsBySamples(capture)
    for samples in (SMALL_BATCH, 2 * SMALL_BATCH, 2 * SMALL_BATCH - 1):
        graphs.open(samples)
    return graphs.derive(batch)
