"""Everything a price depends on besides the plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner_core.core import Cluster, DeviceMesh, Workload
from planner_core.cost.communication.links import AxisLink, axis_links
from planner_core.cost.step_time import StepTime

Array = NDArray[np.float64]
CONTENTION = 0.13
"""Seconds that compute loses per second of traffic beside it: a slowdown of 15 %, between Galvatron's 10 and the published
average of 18.9 % (arXiv 2507.03114)."""
RUN_STAGES = (0, 3)
"""ZeRO stages that the runtime carries out: those of plans that are searched. A stated layout may have others."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """A cluster, a mesh on it, and what a step does there.

    `contention` is what a second of traffic costs the compute beside it, in seconds. Axes in `joined` are one to the
    operators with the axis before; only weights may lie differently on them. `stages` are the ZeRO stages that weights may
    take, up to the workload's.
    """

    cluster: Cluster
    mesh: DeviceMesh
    workload: Workload
    links: tuple[AxisLink, ...]
    contention: float = CONTENTION
    joined: tuple[int, ...] = ()
    stages: tuple[int, ...] = RUN_STAGES

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self.mesh.axis_sizes

    @property
    def step_time(self) -> StepTime:
        """The form of the step's time."""
        return StepTime(self.workload.accumulate, self.contention)


def cost_model(cluster: Cluster, mesh: DeviceMesh, workload: Workload) -> CostModel:
    """The prices on one mesh of one cluster."""
    return CostModel(cluster, mesh, workload, axis_links(cluster, mesh))
