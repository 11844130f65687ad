"""All that the cost of a plan depends on beside the plan: cluster, mesh, workload and the constants of the cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner_core.core import (
    ITEM_BYTES,
    ONE_RANK,
    Cluster,
    DeviceMesh,
    PipelineAxis,
    Plan,
    Software,
    Stack,
    Timing,
    Workload,
    load_timing,
)
from planner_core.cost.communication.links import PIPE as PIPE
from planner_core.cost.communication.links import AxisLink, JointLinks, joint_links, rank_links
from planner_core.cost.communication.links import pipe_link as pipe_link
from planner_core.cost.communication.links import whole_mesh as whole_mesh
from planner_core.cost.step_time import StepTime
from planner_core.ops import Row

LATE = "late"
SMALL_BYTES = 2**17
"""Bytes of the gradients of a unit that are too few for a message of their own."""


def searched_stages(zero: int) -> tuple[int, ...]:
    """Return the ZeRO stages between which a search chooses, weight by weight, where a request names the stage `zero`: that stage and stage
    0."""
    return tuple(sorted({0, zero}))


@dataclass(frozen=True, slots=True)
class CostModel:
    """A cluster, a mesh on it, and the workload of a step.

    `links`: of each axis. `joint_links`: of each set of several axes, over which gradients are summed as over one.
    `contention`: seconds by which one second of weight traffic slows the compute beside it. `joined`: the axes that operators
    treat as one with the axis before; only weights may have another placement on them. `stages`: the ZeRO stages that weights
    may take, up to the workload's. `timing`: constants of a step that do not belong to a GPU. `software`: what runs the step.
    """

    cluster: Cluster
    mesh: DeviceMesh
    workload: Workload
    links: tuple[AxisLink, ...]
    joint_links: JointLinks
    contention: float = field(default_factory=lambda: load_timing().contention)
    joined: tuple[int, ...] = ()
    stages: tuple[int, ...] = (0, 3)
    timing: Timing = field(default_factory=load_timing)
    software: Stack = field(default_factory=lambda: Software().resolved())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self.mesh.axis_sizes

    @property
    def slowdown(self) -> float:
        """The factor by which compute takes longer, since the slowest node keeps the others waiting."""
        nodes = self.cluster.num_gpus / self.cluster.node_gpus
        return 1 + self.timing.straggler * math.log2(nodes)

    def link(self, axes: tuple[int, ...]) -> AxisLink:
        """Return the link of an axis, or of several as one group."""
        return self.links[axes[0]] if len(axes) == 1 else dict(self.joint_links)[axes]

    def load_of(self, row: Row) -> float:
        """Return how many times the mean the fullest GPU computes, and sends or gets in an all_to_all, if an operator runs by this row."""
        return self.workload.expert_imbalance if row.routed else 1.0

    def fullest_load(self, rows: Sequence[Row]) -> float:
        """Return the largest `load_of` an operator's rows, one for each axis, on axes of several ranks."""
        return max((self.load_of(row) for row, n in zip(rows, self.sizes, strict=False) if n > 1), default=1.0)

    @property
    def fused(self) -> float:
        """The share of the chains of memory-bound operators that run as one fused kernel."""
        return 1.0 if self.workload.compiled else self.software.fused

    @property
    def late_sums(self) -> bool:
        """Whether gradients of once a step are summed when backward is over, by an all_reduce in float32."""
        return self.software.sums == LATE

    @property
    def holds_gradients(self) -> bool:
        """Whether the sums of gradients stand all through a step: over several micro-batches, or in a buffer of the stack.

        Example: Megatron-LM with ZeRO-1 sends each rank its part of the sums, and its buffer keeps all of them, 4 bytes a parameter.
        """
        return self.workload.accumulate > 1 or self.software.gradient_buffer

    def summed_item(self, item_bytes: int) -> int:
        """Return the bytes per element of a weight's gradient as it is sent. `item_bytes` is that of the dtype that computes."""
        gradient_bytes = self.workload.gradient_item(item_bytes)
        return max(gradient_bytes, ITEM_BYTES["float32"]) if self.late_sums else gradient_bytes

    @property
    def step_time(self) -> StepTime:
        """The form of the step's time."""
        return StepTime(self.workload.accumulate, self.contention)


def cost_model(cluster: Cluster, mesh: DeviceMesh, workload: Workload, pipe: PipelineAxis = ONE_RANK) -> CostModel:
    """Return the prices on one mesh of one cluster, or on the mesh of one rank of a pipeline while all ranks are at work."""
    links, joint = rank_links(cluster, mesh, pipe), joint_links(cluster, mesh, pipe)
    stages = searched_stages(workload.zero)
    return CostModel(cluster, mesh, workload, links, joint, stages=stages, software=workload.resolved())


def cost_model_of(plan: Plan, cluster: Cluster | None = None) -> CostModel:
    """Return the prices with which a plan was made, or (with `cluster`) those of the same mesh and workload on another cluster."""
    return cost_model(cluster or plan.cluster, plan.mesh, plan.workload, plan.pipeline_axis)
