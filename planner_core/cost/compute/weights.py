"""What the compute stream spends on weights: copies around gathers and scatters, and sums over micro-batches."""

from __future__ import annotations

from typing import TypeVar

from planner_core.cost.model import Array, CostModel

IN_PRODUCT = "product"
Bytes = TypeVar("Bytes", float, Array)


def copied_seconds(moved: Bytes, model: CostModel) -> Bytes:
    """Seconds to copy a weight of `moved` bytes out of the buffer of a gather, or a gradient into the buffer of a scatter.

    The constant is fitted to runs of FSDP (`Timing.sharded_copy`). Example: a parameter in bfloat16 is gathered twice, and its gradient
    scattered in float32: 1.82 · (2 + 2 + 4) = 14.6 bytes per micro-batch.
    """
    return model.timing.sharded_copy * moved / model.cluster.gpu.bytes_per_s


def divided_seconds(gradient: Bytes, model: CostModel) -> Bytes:
    """Seconds to divide a gradient that is equal on all ranks of an axis, so that it is summed over them: one kernel reads and writes it.

    It pays for a large weight only, whose sum over one more axis sends less between nodes.
    """
    return 2 * gradient / model.cluster.gpu.bytes_per_s + model.cluster.gpu.launch_s


def accumulated_seconds(gradient: Bytes, model: CostModel) -> Bytes:
    """Seconds to add a gradient to the accumulated gradient of `gradient` bytes, if it is not scattered.

    The constant is fitted to runs of data parallelism and ZeRO-1 (`Timing.accumulate`): 3.71 bytes per byte, so a parameter takes 14.8 in
    float32 and 7.4 in bfloat16, where both are read and the sum is written: 10 and 6. A product that adds its result to the gradient itself
    takes no longer: its time is that of its FLOPs.
    """
    if model.software.summed_in == IN_PRODUCT:
        return 0.0 * gradient
    return model.timing.accumulate * gradient / model.cluster.gpu.bytes_per_s
