"""Meshes of three axes, searched where they can win: many GPUs, of which several work on one sample.

On two axes either the rings that gather weights pass through all rows of GPUs, or weights are kept in more copies than memory
has room for. A third axis cuts a ring of 64 into two of 8, beside tensor or context parallelism inside a node: replicas of shards.
Where every GPU has samples of its own, meshes of two axes hold that too (HSDP). On few nodes rings are short: on 64 GPUs and fewer
no model of the zoo gained by a third axis, and on 128 and more Llama-3-8B did, up to 12 %, with fewer samples than GPUs.

Example: 512 GPUs in nodes of 8 have 8x8x8, 4x16x8 and 8x16x4.
"""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import DeviceMesh, NoPlanFits, Plan, axis_names, divisors
from planner_core.planning.fitting.micro_batches import Choose
from planner_core.planning.methods import EXACT
from planner_core.planning.request import Progress
from planner_core.planning.session import Planner

FEW = 64
"""Number of GPUs up to which two axes are enough."""
UNEVEN = 4
"""The second of the outer axes is at most so many times as long as the first."""


def meshes_of_three(planner: Planner) -> list[DeviceMesh]:
    """The meshes to search beside those of two axes; none where these are enough, or where the user named a mesh, tool or method."""
    request, n, node = planner.request, planner.cluster.num_gpus, planner.cluster.levels[0].size
    free = (
        request.mesh is None and request.tool is None and request.method == EXACT.name and request.objective == "time"
    )
    if not free or n <= FEW or planner.workload.graph_batch >= n:
        return []
    found = []
    for inner in (node, node // 2):
        if inner > 1 and n % inner == 0:
            rest = n // inner
            found += [(a, rest // a, inner) for a in divisors(rest)[1:-1] if a <= rest // a <= UNEVEN * a]
    return [DeviceMesh(axis_names(3), sizes) for sizes in found]


def with_third_axis(planner: Planner, plan: Plan, choose: Choose, say: Progress) -> Plan:
    """The best plan on a mesh of three axes if it is better than `plan`, which is the best on two; else `plan`."""
    options = meshes_of_three(planner)
    if not options:
        return plan
    known = plan.cost.step_time_s if plan.fits else float("inf")
    try:
        found = choose(planner, options, say, below=known)
    except NoPlanFits:
        return plan
    better = (not found.fits, found.cost.step_time_s) < (not plan.fits, plan.cost.step_time_s)
    return replace(found, optimal=found.optimal and plan.optimal) if better else plan
