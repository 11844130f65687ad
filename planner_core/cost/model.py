"""Everything a price depends on besides the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner_core.core import Cluster, DeviceMesh, Timing, Workload, timing
from planner_core.cost.communication.links import AxisLink, axis_links
from planner_core.cost.step_time import StepTime

Array = NDArray[np.float64]
RUN_STAGES = (0, 3)
"""ZeRO stages that the runtime carries out: those of plans that are searched. A stated layout may have others."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """A cluster, a mesh on it, and what a step does there.

    `contention` is what a second of traffic costs the compute beside it, in seconds. Axes in `joined` are one to the
    operators with the axis before; only weights may lie differently on them. `stages` are the ZeRO stages that weights may
    take, up to the workload's. `timing` are the constants of a step that belong to no GPU.
    """

    cluster: Cluster
    mesh: DeviceMesh
    workload: Workload
    links: tuple[AxisLink, ...]
    contention: float = field(default_factory=lambda: timing().contention)
    joined: tuple[int, ...] = ()
    stages: tuple[int, ...] = RUN_STAGES
    timing: Timing = field(default_factory=timing)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self.mesh.axis_sizes

    @property
    def slowdown(self) -> float:
        """How much longer compute takes since the slowest of all nodes keeps the others waiting."""
        nodes = self.cluster.num_gpus / self.cluster.levels[0].size
        return 1 + self.timing.straggler * math.log2(nodes)

    @property
    def fused(self) -> float:
        """Share of the chains of memory-bound operators that are fused."""
        return 1.0 if self.workload.compiled else self.timing.fused_eager

    @property
    def step_time(self) -> StepTime:
        """The form of the step's time."""
        return StepTime(self.workload.accumulate, self.contention)


def cost_model(cluster: Cluster, mesh: DeviceMesh, workload: Workload) -> CostModel:
    """The prices on one mesh of one cluster."""
    return CostModel(cluster, mesh, workload, axis_links(cluster, mesh))
