"""How long the work of one op takes on one GPU: a roofline on its local shapes.

time = max(FLOPs / reachable FLOP/s, bytes / reachable bytes/s, time to launch a kernel), forward and backward;
see Williams, Waterman & Patterson, "Roofline" (2009).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner_core.core.cluster import Cluster
from planner_core.core.errors import InputError
from planner_core.core.graph import Op, Value
from planner_core.core.mesh import DeviceMesh
from planner_core.cost.communication.collectives import AxisLink, axis_links
from planner_core.ops.catalog.nn import backward_factor, forward_flops, is_view

Array = NDArray[np.float64]

OPTIMIZERS = {"adamw": 2, "adamw-fp32": 0, "sgd": 0, "sgd-momentum": 1}
"""Optimizer states per parameter, each in the parameter's dtype (as torch.optim keeps them)."""
FP32_STATES = {"adamw-fp32": 12}
"""Bytes per parameter of states that are always 32-bit: the master copy and two moments."""
RECOMPUTE = ("none", "full")


@dataclass(frozen=True, slots=True)
class Workload:
    """What a training step does: global batch in samples, tokens per sample, and how it keeps its state."""

    batch: int
    seq: int
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    zero: int = 3
    recompute: str = "none"

    def check(self) -> None:
        """Raises InputError for a value that cannot be."""
        for name, value, least in (("batch", self.batch, 1), ("seq", self.seq, 1)):
            if not least <= value <= 10**9:
                raise InputError(f"--{name} {value} is not a positive number up to 10^9; give e.g. --{name} 16")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise InputError(f"--dtype {self.dtype!r} is not one of bfloat16, float16, float32")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"--optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
        if self.zero not in (0, 3):
            raise InputError(
                f"--zero {self.zero} is not one of 0 (weights kept) or 3 (weights may be sharded and gathered at use); stages 1 and 2, "
                "which keep weights whole and shard optimizer states (and gradients), are not planned"
            )
        if self.recompute not in RECOMPUTE:
            raise InputError(f"--recompute {self.recompute!r} is not one of {', '.join(RECOMPUTE)}")

    def to_json(self) -> dict[str, Any]:
        """Plain data, as plans and reports keep it."""
        return asdict(self)

    def state_bytes(self, item_bytes: int) -> int:
        """Bytes of optimizer state per parameter element."""
        return OPTIMIZERS[self.optimizer] * item_bytes + FP32_STATES.get(self.optimizer, 0)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Everything a price depends on besides the plan.

    `overlap` is the share of compute time behind which weight traffic (gradient sums, ZeRO-3 gathers) can
    hide; an assumption that a user can replace.
    """

    cluster: Cluster
    mesh: DeviceMesh
    workload: Workload
    links: tuple[AxisLink, ...]
    overlap: float = 0.8

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self.mesh.axis_sizes


def cost_model(cluster: Cluster, mesh: DeviceMesh, workload: Workload) -> CostModel:
    """The prices on one mesh of one cluster."""
    return CostModel(cluster, mesh, workload, axis_links(cluster, mesh))


@dataclass(frozen=True, slots=True)
class OpWork:
    """What one op does, whole: FLOPs forward and backward, and its dtype's rate; `free` ops (views) take no time."""

    flops: int
    backward_flops: float
    dtype: str
    free: bool
    has_backward: bool


def op_work(op: Op, values: tuple[Value, ...]) -> OpWork:
    """The work of `op` on its global shapes."""
    ins, outs = [values[i].meta for i in op.inputs], [values[i].meta for i in op.outputs]
    flops = forward_flops(op, [m.shape for m in ins], [m.shape for m in outs])
    dtype = outs[0].dtype if outs else "float32"
    backward = any(values[i].grad for i in op.outputs)
    return OpWork(flops, flops * backward_factor(op) if backward else 0.0, dtype, is_view(op), backward)


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
