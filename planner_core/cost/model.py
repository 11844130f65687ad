"""How long the work of one op takes on one GPU: a roofline on its local shapes.

time = max(FLOPs / reachable FLOP/s, bytes / reachable bytes/s, time to launch a kernel), forward and backward;
see Williams, Waterman & Patterson, "Roofline" (2009).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner_core.core import Cluster, DeviceMesh, Workload
from planner_core.cost.communication.links import AxisLink, axis_links

Array = NDArray[np.float64]


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
