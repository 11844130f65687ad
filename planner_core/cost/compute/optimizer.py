"""The time of the optimizer. It reads and writes every state of the weights that a GPU keeps, so memory's rate bounds it."""

from __future__ import annotations

from planner_core.core import OPTIMIZERS, Workload
from planner_core.cost.model import Array, CostModel

CLIP_PASSES = 3
"""Passes over each gradient to clip by the global norm: one read for the norm, one read and one write to scale."""


def optimizer_bytes(item: int, workload: Workload) -> dict[str, int]:
    """Bytes of memory that the update of one parameter of `item` bytes in compute dtype reads and writes, by what they are.

    The parameter and every moment are read and written. The gradient is read. Clipping passes over the gradient, and the working
    copy is written again.
    """
    kept = workload.kept_item(item)
    return {
        "weight, read and written": 2 * kept,
        "averages, read and written": 2 * OPTIMIZERS[workload.optimizer] * kept,
        "gradient, read": kept,
        "gradient, clipped": CLIP_PASSES * kept,
        "working copy, made again": kept + item if kept != item else 0,
    }


def optimizer_seconds(elements: Array, item: int, model: CostModel) -> Array:
    """Seconds to update `elements` parameters of `item` bytes in compute dtype.

    The unfused optimizer makes more passes than it must (`Timing.optimizer`).
    """
    moved = sum(optimizer_bytes(item, model.workload).values())
    return elements * model.timing.optimizer * moved / model.cluster.gpu.bytes_per_s
