"""What the compute stream spends on weights: copies around gathers and scatters, and sums over micro-batches."""

from __future__ import annotations

from typing import TypeVar

from planner_core.cost.model import CostModel
from planner_core.cost.step_time import Floats

IN_PRODUCT = "product"
Bytes = TypeVar("Bytes", float, Floats)


def copied_seconds(moved: Bytes, model: CostModel) -> Bytes:
    """Return the seconds to copy a weight of `moved` bytes out of the buffer of a gather, or a gradient into the buffer of a scatter.

    The constant is fitted to runs of FSDP (`Timing.sharded_copy`). Example: a parameter in bfloat16 is gathered twice, and its gradient
    scattered in float32: 1.82 · (2 + 2 + 4) = 14.6 bytes per micro-batch.
    """
    return model.timing.sharded_copy * moved / model.cluster.gpu.bytes_per_s


def divided_seconds(gradient: Bytes, model: CostModel) -> Bytes:
    """Return the seconds to divide a gradient that is equal on all ranks of an axis, so that it is summed over them: one kernel reads and
    writes it.

    It pays for a large weight only, whose sum over one more axis sends less between nodes.
    """
    return 2 * gradient / model.cluster.gpu.bytes_per_s + model.cluster.gpu.launch_s


def kept_gradient_seconds(gradient: Bytes, copied: Bytes, model: CostModel) -> Bytes:
    """Return the seconds to keep a gradient of `gradient` bytes that no micro-batch sends: of one micro-batch, in the mean over those of a
    step.

    The first one's gradient is the sum so far. Of it, `copied` bytes are written again: into what is sent later, or into another dtype.
    Each later one is added to it. A stack with a buffer of all gradients (`Stack.gradient_buffer`) adds the first one too, to zeros; one
    whose products add their results to the gradient takes no longer, as their time is that of their FLOPs.

    The constant of a sum is fitted to runs of data parallelism and ZeRO-1 (`Timing.accumulate`): 3.71 bytes per byte, so a parameter takes
    14.8 in float32 and 7.4 in bfloat16, where both are read and the sum is written: 10 and 6. Example: of 4 micro-batches with float32
    sums, 7.3 bytes are for the copy and 3 · 14.8 for the sums, so one takes 12.9 bytes a parameter; a single one takes 7.3, as in ZeRO-2.
    """
    software, count = model.software, model.workload.accumulate
    if software.summed_in == IN_PRODUCT:
        return 0.0 * gradient
    added = model.timing.accumulate * gradient / model.cluster.gpu.bytes_per_s
    if software.gradient_buffer:
        return added
    return (copied_seconds(copied, model) + (count - 1) * added) / count
