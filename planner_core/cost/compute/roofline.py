"""How long the work of one op takes on one GPU: a roofline on its local shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner_core.core import Op, Value
from planner_core.cost.model import Array, CostModel
from planner_core.ops import work_of


@dataclass(frozen=True, slots=True)
class OpWork:
    """What one op does, whole: FLOPs forward and backward, and its dtype's rate; `free` ops (views) take no time."""

    flops: int
    backward_flops: int
    dtype: str
    free: bool
    has_backward: bool


def op_work(op: Op, values: tuple[Value, ...]) -> OpWork:
    """The work of `op` on its global shapes."""
    work = work_of(op, values)
    dtype = values[op.outputs[0]].meta.dtype if op.outputs else "float32"
    backward = any(values[i].grad for i in op.outputs)
    return OpWork(work.flops, work.backward_flops, dtype, work.free, backward)


def op_time(work: OpWork, parts: Array, num_bytes: Array, model: CostModel) -> tuple[Array, Array]:
    """Seconds forward and backward of an op whose work is divided by `parts` and that touches `num_bytes` locally."""
    if work.free:
        return np.zeros_like(num_bytes), np.zeros_like(num_bytes)
    gpu = model.cluster.gpu
    rate = gpu.flops_per_s(work.dtype)
    memory = num_bytes / gpu.bytes_per_s
    forward = np.maximum(np.maximum(work.flops / parts / rate, memory), gpu.launch_s)
    if not work.has_backward:
        return forward, np.zeros_like(forward)
    # backward reads the saved operands and the gradient, and writes the operands' gradients
    backward = np.maximum(np.maximum(work.backward_flops / parts / rate, 2 * memory), gpu.launch_s)
    return forward, backward
