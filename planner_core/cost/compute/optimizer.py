"""The time of the optimizer. It reads and writes every state of the weights that a GPU keeps, so memory's rate bounds it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner_core.core import OPTIMIZERS, Cluster, InputError, Workload, named
from planner_core.cost.model import CostModel
from planner_core.cost.step_time import Floats

CLIP_PASSES = 3
"""Passes over each gradient to clip by the global norm: one read for the norm, one read and one write to scale."""


@dataclass(frozen=True, slots=True)
class OptimizerPasses:
    """How often an update reads or writes the weight, all moments, the gradient, and tensors that it makes on the way; and how many
    kernels that takes."""

    weight: int
    moments: int
    gradient: int
    between: int
    kernels: int


ONE_BY_ONE = {
    # adamw: w *= 1 - lr d; m.lerp_(g); v *= b; v.addcmul_(g, g); s = v.sqrt(); s /= c; s += e; w.addcdiv_(m, s)
    2: OptimizerPasses(weight=4, moments=9, gradient=2, between=5, kernels=8),
    1: OptimizerPasses(weight=2, moments=5, gradient=1, between=0, kernels=3),  # m *= b; m += g; w -= lr m
    0: OptimizerPasses(weight=2, moments=0, gradient=1, between=0, kernels=1),
}
"""Of an optimizer that runs the operators of its formula one after the other (torch's `_multi_tensor_adamw` and `_single_tensor_adamw`), by
the number of its moments."""


def optimizer_passes(workload: Workload, kernels: str) -> OptimizerPasses:
    """Return the passes of one update by `kernels` (`OPTIMIZER_KERNELS`). A fused kernel reads and writes each state once."""
    moments = OPTIMIZERS[workload.optimizer]
    return OptimizerPasses(2, 2 * moments, 1, 0, 1) if kernels == "fused" else ONE_BY_ONE[moments]


def optimizer_bytes(item: int, workload: Workload, kernels: str) -> dict[str, int]:
    """Return the bytes of memory that the update of one parameter of `item` bytes in compute dtype reads and writes, by what they are.

    Clipping passes over the gradient, and the working copy is written again. Example: fused AdamW in mixed precision moves 28 bytes for a
    parameter. One by one its operators move 80.
    """
    stored, gradient, each = workload.kept_item(item), workload.updated_item(item), optimizer_passes(workload, kernels)
    return {
        "weight": each.weight * stored,
        "averages": each.moments * stored,
        "gradient": each.gradient * gradient,
        "made on the way": each.between * stored,
        "gradient, clipped": CLIP_PASSES * gradient,
        "working copy, made again": stored + item if stored != item else 0,
    }


def optimizer_seconds(elements: Floats, item: int, model: CostModel) -> Floats:
    """Return the seconds to update a weight of `elements` parameters of `item` bytes in compute dtype.

    Moments that the host keeps come to the GPU and go back, one after the other. Example: 500 million parameters have 4 GB of moments in
    float32; over 51.2 GB/s both ways take 156 ms.
    """
    gpu, workload, kernels = model.cluster.gpu, model.workload, model.software.optimizer_kernels
    seconds = sum(optimizer_bytes(item, workload, kernels).values()) / gpu.bytes_per_s
    if workload.offload and gpu.host is not None:
        seconds += 2 * workload.moment_bytes(item) / gpu.host.reached_bytes_per_s
    launches = gpu.launch_s * optimizer_passes(workload, kernels).kernels if kernels == "for-loop" else 0.0
    return elements * seconds + np.where(elements > 0, launches, 0.0)


def check_offload(workload: Workload, cluster: Cluster) -> None:
    """Raise InputError if optimizer states are to be kept in the host's memory, and that is not possible or has no known price."""
    if not workload.offload:
        return
    if not OPTIMIZERS[workload.optimizer]:
        raise InputError(
            named("offload"),
            f": {workload.optimizer} keeps no states that the host could hold; leave ",
            named("offload"),
            " out",
        )
    if cluster.gpu.host is None:
        raise InputError(
            named("offload"),
            f": the file of {cluster.gpu.name} does not say how fast its link to the host's memory is; ",
            'give "host": {"bytes_per_s": 32e9, "efficiency": 0.8} there, or leave ',
            named("offload"),
            " out",
        )


def weight_handout_seconds(ranks: Floats, model: CostModel) -> Floats:
    """Return the seconds to hand out one updated weight that `ranks` ranks hold in parts, if the run does so tensor by tensor and rank by
    rank.

    InternEvo broadcasts each rank's tensors over a ring of all ranks, and nanotron copies each rank's part of each tensor out of what
    was gathered. Both take `Timing.rank_call_s` for each tensor and rank. Buckets cost none of this (`Workload.rank_by_rank`).
    Example: 226 weights of 1 024 ranks at 10 us take 2.3 s.
    """
    each = model.timing.rank_call_s if model.workload.rank_by_rank else 0.0
    return np.where(ranks > 1, each * ranks, 0.0)
