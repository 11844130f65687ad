"""What a plan takes: seconds, traffic and memory of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from planner_core.core.placement import CollectiveKind

Phase: TypeAlias = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)
PASSES: tuple[Phase, ...] = ("forward", "backward")
"""The phases of every micro-batch."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one rank in one phase, of one kind, over one mesh axis or over several as one group. `num_bytes`: bytes of the
    tensors that are whole along the axes. `wire_bytes`: bytes that the rank sends."""

    phase: Phase
    kind: CollectiveKind
    axes: tuple[int, ...]
    count: int
    num_bytes: int
    wire_bytes: int
    time_s: float
    algorithm: str = "ring"


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds and bytes of one stage on one of its GPUs.

    `forward_s` and `backward_s`: of one micro-batch; `weight_s`: the part of backward that makes the gradients of weights. `first_s` and
    `last_s`: what the first forward and the last backward of a step take more, since working copies are gathered and gradients summed
    beside them. `step_s`: once a step, when all micro-batches are done. `send_s`: from the end of a forward until its results are with
    the next stage, which gradients take as long to come back; `send_bytes` are those that one GPU sends. `peak_bytes`: of the fullest
    moment of a GPU of the stage's rank, with the rank's other stages. `host_*_s`: in which the host issues the kernels of these passes.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    first_s: float
    last_s: float
    step_s: float
    send_s: float
    send_bytes: int
    peak_bytes: int
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0
    host_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """What the stages of a plan take, and how they fit together: `bubble_s` is the time of a step in which the rank that works longest
    waits for other stages because of the schedule, without what hosts add (`Cost.host_wait_s`). `bound_s`: seconds that the step of this
    schedule is not below (`cost.schedule.pipeline.timing`)."""

    stages: tuple[StageCost, ...]
    bubble_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The predicted cost of a plan, per step and GPU. `memory_bytes` has params, grads, optimizer, activations, buffers and peak.
    `optimizer_time_s` is the update of the weights. In `outside_time_s` the GPU has no work (`Stack.outside_s`). `host_wait_s`: seconds of
    `compute_time_s` in which the GPU waits for the host to issue its kernels (`cost.schedule.host`). `pipeline`: of a plan with stages;
    the other figures are then those of a GPU of the rank that works longest, and memory that of the fullest rank."""

    step_time_s: float
    compute_time_s: float
    comm_time_s: float
    exposed_comm_time_s: float
    traffic: tuple[Traffic, ...]
    memory_bytes: Mapping[str, int]
    optimizer_time_s: float = 0.0
    outside_time_s: float = 0.0
    host_wait_s: float = 0.0
    pipeline: PipelineCost | None = None

    @property
    def gpu_time_s(self) -> float:
        """Seconds of the step without waits for the host: the form that the search minimises."""
        return self.step_time_s - self.host_wait_s

    @property
    def gpu_compute_s(self) -> float:
        """Seconds in which the GPU computes: those of `compute_time_s` in which it does not wait for the host."""
        return self.compute_time_s - self.host_wait_s

    def seconds(self, objective: str) -> float:
        """Return the seconds that a search for an objective minimises: the GPU's part of the step, or the communication alone."""
        return self.comm_time_s if objective == "communication" else self.gpu_time_s

    def collectives(self) -> dict[str, dict[str, dict[str, int]]]:
        """phase -> kind -> count, bytes, wire_bytes (the form of docs/CONTRACT.md)."""
        table: dict[str, dict[str, dict[str, int]]] = {phase: {} for phase in PHASES}
        for t in self.traffic:
            row = table[t.phase].setdefault(t.kind, {"count": 0, "bytes": 0, "wire_bytes": 0})
            row["count"] += t.count
            row["bytes"] += t.num_bytes
            row["wire_bytes"] += t.wire_bytes
        return table
