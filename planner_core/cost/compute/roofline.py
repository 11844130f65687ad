"""How long one op takes on one GPU: its kernels by their local shapes, and the bytes that it passes over.

    products, attention, experts      kernels + sums of gradients
    all others                        the larger of kernels (convolutions, scans) and bytes over memory's rate

and at least one launch. Whoever is slowest keeps the others waiting: all compute takes longer by a share for each
doubling of the nodes (`CostModel.slowdown`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner_core.core import Op, Value
from planner_core.cost.compute.attention import attention_seconds
from planner_core.cost.compute.products import product_seconds, work_seconds
from planner_core.cost.model import Array, CostModel
from planner_core.ops import OWN_KERNEL, Attention, Kernel, Row, Scan, Work, operator, work_of


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
    backward = any(values[i].grad for i in op.outputs)
    return OpWork(work.flops, work.backward_flops, dtype_of(op, values), work.free, backward)


def dtype_of(op: Op, values: Sequence[Value]) -> str:
    """The dtype that an op computes in."""
    return values[op.outputs[0]].meta.dtype if op.outputs else "float32"


def has_kernels(op: Op) -> bool:
    """Whether an op has kernels whose shapes matter; else its time is that of its bytes."""
    return operator(op.fn).work is not None


def kernel_seconds(op: Op, values: Sequence[Value], chosen: Sequence[Row], model: CostModel) -> tuple[float, float]:
    """Seconds forward and backward of the op's kernels, run by the rows `chosen` on each mesh axis."""
    work: Work = work_of(op, values, chosen, model.sizes)
    dtype, whole = dtype_of(op, values), operator(op.fn).kind in OWN_KERNEL
    forward = sum(_seconds(k, dtype, whole, model) for k in work.forward)
    return forward, sum(_seconds(k, dtype, whole, model) for k in work.backward)


def op_time(
    op: Op, kernels: tuple[Array, Array], moved: tuple[Array, Array], model: CostModel
) -> tuple[Array, Array]:  # fmt: skip
    """Seconds forward and backward of an op with these seconds of kernels and bytes passed over on one GPU, each shaped alike."""
    return _time(op, kernels[0], moved[0], model), _time(op, kernels[1], moved[1], model)


def _time(op: Op, kernels: Array, moved: Array, model: CostModel) -> Array:
    gpu = model.cluster.gpu
    memory = moved / gpu.bytes_per_s
    device = kernels + memory if operator(op.fn).kind in OWN_KERNEL else np.maximum(kernels, memory)
    return np.where(device > 0, np.maximum(device, gpu.launch_s), 0.0) * model.slowdown


def _seconds(kernel: Kernel, dtype: str, whole: bool, model: CostModel) -> float:
    """Seconds of one kernel; with its operands' and result's bytes where they are counted there."""
    gpu = model.cluster.gpu
    if isinstance(kernel, Attention):
        return attention_seconds(kernel, model.workload.attention, dtype, gpu)
    if isinstance(kernel, Scan):
        return kernel.flops / gpu.flops_per_s(dtype)
    return product_seconds(kernel, dtype, gpu) if whole else work_seconds(kernel, dtype, gpu)
