"""The optimizer's step: it reads and writes every state of the weights that a GPU keeps, and is bound by memory."""

from __future__ import annotations

from planner_core.core import OPTIMIZERS
from planner_core.cost.model import Array, CostModel

CLIP_PASSES = 3
"""Clipping by the global norm reads each gradient for the norm, then reads and writes it to scale it."""


def optimizer_seconds(elements: Array, item: int, model: CostModel) -> Array:
    """Seconds to update `elements` parameters of `item` bytes in compute dtype.

    The parameter and every moment are read and written, the gradient is read; clipping goes over the gradient, and the
    working copy is written anew. The unfused optimizer passes over its states in more kernels than it must
    (`Timing.optimizer`).
    """
    w = model.workload
    passes = 2 + 1 + 2 * OPTIMIZERS[w.optimizer] + CLIP_PASSES
    kept = w.kept_item(item)
    cast = kept + item if kept != item else 0
    return elements * model.timing.optimizer * (passes * kept + cast) / model.cluster.gpu.bytes_per_s
