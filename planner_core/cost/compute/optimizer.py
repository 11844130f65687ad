"""The time of the optimizer. It reads and writes every state of the weights that a GPU keeps, so memory's rate bounds it."""

from __future__ import annotations

import numpy as np

from planner_core.core import OPTIMIZERS, Cluster, InputError, Workload
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

    The unfused optimizer makes more passes than it must (`Timing.optimizer`). Moments that the host keeps come to the GPU and go back,
    one after the other. Example: 500 million parameters have 4 GB of moments in float32; over 51.2 GB/s both ways take 156 ms.
    """
    gpu, workload = model.cluster.gpu, model.workload
    seconds = model.timing.optimizer * sum(optimizer_bytes(item, workload).values()) / gpu.bytes_per_s
    if workload.offload and gpu.host is not None:
        seconds += 2 * workload.moment_bytes(item) / gpu.host.reached_bytes_per_s
    return elements * seconds


def check_offload(workload: Workload, cluster: Cluster) -> None:
    """Raise InputError if optimizer states are to be kept in the host's memory, and that is not possible or has no known price."""
    if not workload.offload:
        return
    if not OPTIMIZERS[workload.optimizer]:
        raise InputError(
            f"--offload: {workload.optimizer} keeps no states that the host could hold; leave --offload out"
        )
    if cluster.gpu.host is None:
        raise InputError(
            f"--offload: the file of {cluster.gpu.name} does not say how fast its link to the host's memory is; "
            'give "host": {"bytes_per_s": 32e9, "efficiency": 0.8} there, or leave --offload out'
        )


def handed_out_seconds(ranks: Array, model: CostModel) -> Array:
    """Seconds to hand out one updated weight that `ranks` ranks hold in parts, if the run does so tensor by tensor and rank by rank.

    InternEvo broadcasts each rank's tensors over a ring of all ranks, and nanotron copies each rank's part of each tensor out of what
    was gathered. Both take `Timing.rank_call_s` for each tensor and rank. Buckets cost none of this (`Workload.rank_by_rank`).
    Example: 226 weights of 1 024 ranks at 10 us take 2.3 s.
    """
    each = model.timing.rank_call_s if model.workload.rank_by_rank else 0.0
    return np.where(ranks > 1, each * ranks, 0.0)
