"""The seconds that one operator takes on one GPU, from its kernels with local shapes, and from the bytes that it reads and writes.

    products, attention, experts      kernels + sums of gradients
    all others                        max(kernels (convolutions, scans), bytes / memory's rate)

An operator takes at least one kernel launch. The slowest node keeps the others waiting: all compute takes longer by a share for
each doubling of the number of nodes (`CostModel.slowdown`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import Op, Value
from planner_core.cost.compute.attention import attention_seconds
from planner_core.cost.compute.products import product_seconds, work_seconds
from planner_core.cost.compute.sdpa import attention_kernel
from planner_core.cost.model import CostModel
from planner_core.cost.step_time import Floats
from planner_core.ops import (
    TIMED_WITH_BYTES,
    Attention,
    Gemm,
    Kernel,
    Kind,
    Merge,
    Row,
    Scan,
    Work,
    operator,
    work_of,
)


@dataclass(frozen=True, slots=True)
class OpWork:
    """The work of one operator on the global shapes: FLOPs forward and backward, and its dtype. `free` operators (views) take 0 s."""

    flops: int
    backward_flops: int
    dtype: str
    free: bool
    has_backward: bool


def op_work(op: Op, values: tuple[Value, ...]) -> OpWork:
    """Return the work of `op` on its global shapes."""
    work = work_of(op, values)
    backward = any(values[i].grad for i in op.outputs)
    return OpWork(work.flops, work.backward_flops, dtype_of(op, values), work.free, backward)


def dtype_of(op: Op, values: Sequence[Value]) -> str:
    """Return the dtype in which an operator computes."""
    return values[op.outputs[0]].meta.dtype if op.outputs else "float32"


def has_kernels(op: Op) -> bool:
    """Return whether an operator has kernels whose time depends on shapes. Else its time follows from its bytes."""
    return operator(op.fn).work is not None


def kernel_seconds(
    op: Op, values: Sequence[Value], axis_rows: Sequence[Row], model: CostModel, chunks: int = 1
) -> tuple[float, float]:
    """Return the seconds forward and backward of the operator's kernels. `axis_rows` has the row that it runs on each mesh axis. `chunks`:
    into how many parts of its result's last dim a product is cut in forward."""
    work: Work = work_of(op, values, axis_rows, model.sizes)
    dtype, whole = dtype_of(op, values), operator(op.fn).kind in TIMED_WITH_BYTES
    fullest = model.fullest_load(axis_rows)
    cut = [replace(k, n=k.n // chunks) if isinstance(k, Gemm) else k for k in work.forward]
    attends = operator(op.fn).kind is Kind.ATTENTION
    name = attention_kernel(op, values, model.software.attention, model.cluster.gpu) if attends else ""
    forward = fullest * chunks * sum(_one_kernel_seconds(k, dtype, whole, name, model) for k in cut)
    return forward, fullest * sum(_one_kernel_seconds(k, dtype, whole, name, model) for k in work.backward)


def op_time(
    op: Op, kernels: tuple[Floats, Floats], moved: tuple[Floats, Floats], model: CostModel
) -> tuple[Floats, Floats]:
    """Return the seconds forward and backward of an operator on one GPU.

    `kernels`: seconds of its kernels forward and backward. `moved`: bytes that it reads and writes, forward and backward. All
    four arrays, and both results, have the same shape.
    """
    return _device_seconds(op, kernels[0], moved[0], model), _device_seconds(op, kernels[1], moved[1], model)


def _device_seconds(op: Op, kernels: Floats, moved: Floats, model: CostModel) -> Floats:
    gpu = model.cluster.gpu
    memory = moved / gpu.bytes_per_s
    # A product's time has the bytes of its operands and result already. What it moves here are sums of gradients, in kernels of their own
    # behind it, so they add. A convolution or a scan reads while it computes, so the longer of the two counts.
    device = kernels + memory if operator(op.fn).kind in TIMED_WITH_BYTES else np.maximum(kernels, memory)
    return np.where(device > 0, np.maximum(device, gpu.launch_s), 0.0) * model.slowdown


def _one_kernel_seconds(kernel: Kernel, dtype: str, whole: bool, attention: str, model: CostModel) -> float:
    """Return the seconds of one kernel. `whole`: with the bytes of its operands and result, if these are not counted elsewhere.
    `attention`: the kernel of an attention."""
    gpu = model.cluster.gpu
    if isinstance(kernel, Attention):
        once = attention_seconds(kernel, attention, dtype, gpu)
        return once if kernel.times == 1 else kernel.times * max(once, gpu.launch_s)
    if isinstance(kernel, Merge):
        return kernel.times * max(kernel.num_bytes / gpu.bytes_per_s, gpu.launch_s)
    if isinstance(kernel, Scan):
        return kernel.flops / gpu.flops_per_s(dtype)
    return product_seconds(kernel, dtype, gpu) if whole else work_seconds(kernel, dtype, gpu)
