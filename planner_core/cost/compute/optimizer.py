"""The time of the optimizer. It reads and writes every state of the weights that a GPU keeps, so memory's rate bounds it."""

from __future__ import annotations

from planner_core.core import OPTIMIZERS
from planner_core.cost.model import Array, CostModel

CLIP_PASSES = 3
"""Passes over each gradient to clip by the global norm: one read for the norm, one read and one write to scale."""


def optimizer_seconds(elements: Array, item: int, model: CostModel) -> Array:
    """Seconds to update `elements` parameters of `item` bytes in compute dtype.

    The parameter and every moment are read and written. The gradient is read. Clipping passes over the gradient, and the working
    copy is written again. The unfused optimizer makes more passes than it must (`Timing.optimizer`).
    """
    w = model.workload
    passes = 2 + 1 + 2 * OPTIMIZERS[w.optimizer] + CLIP_PASSES
    kept = w.kept_item(item)
    cast = kept + item if kept != item else 0
    return elements * model.timing.optimizer * (passes * kept + cast) / model.cluster.gpu.bytes_per_s
