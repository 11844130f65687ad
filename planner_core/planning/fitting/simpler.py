"""A plan that needs one mesh axis, where the fastest plan needs two and the prediction cannot tell which of them is faster.

The search minimises a form of the step's time. The simulation of the step differs from this form by up to 2 % for most plans
(docs/SIMULATION.md). So if the best plan on one axis takes at most 2 % longer by the form, and its simulated step is not longer,
the two tie. Then the plan on one axis leads, since it is simpler, and the fastest plan stands behind it with its proof.

Example: on mesh 2x8 the fastest plan takes 116.0 ms, simulated 114.0 ms. The best plan on mesh 16 takes 117.3 ms, simulated
113.2 ms. So the plan on mesh 16 leads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planner_core.core import DeviceMesh, NoPlanFits, Note, Plan, PlanRole, axis_names
from planner_core.cost import simulate_step
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.methods import EXACT
from planner_core.planning.planner import Planner
from planner_core.planning.request import Progress

FASTEST = "fastest"
"""The name of the fastest plan where a simpler one leads."""
SLOWER = 0.02
"""The plan on one axis takes at most this share longer."""


def prefer_simpler(planner: Planner, fastest: Plan, others: Iterable[Plan], report_progress: Progress) -> list[Plan]:
    """Return the plan that leads, and behind it the `fastest` if another leads. The plan on one axis does not lead if one of the `others`
    fits and is faster, nor if the user set the mesh, the memory, a tool or the micro-batch, or asks for another
    objective."""
    request = planner.request
    bound = (request.mesh, request.tool, request.memory_gb, request.micro_batch)
    # Where the GPU waits for its host, the shortest step was chosen among all meshes already (`host_waits`).
    is_open = bound == (None, None, None, None) and request.method == EXACT.name and not fastest.cost.host_wait_s
    if not (is_open and fastest.fits and fastest.objective == "time" and len(fastest.mesh.axis_sizes) > 1):
        return [fastest]
    # By the GPU's part of the step, which the search minimises and bounds.
    most = fastest.cost.gpu_time_s * (1 + SLOWER)
    line = DeviceMesh(axis_names(1), (planner.cluster.num_gpus,))
    try:
        plan = choose_mesh(planner, [line], report_progress, below=most, prove=False)
    except NoPlanFits:
        return [fastest]
    if not plan.fits or plan.cost.gpu_time_s > most or any(_fits_and_is_faster(p, plan) for p in others):
        return [fastest]
    # Within 2 % the form cannot tell, so the simulation decides: it follows the order in which a run issues its messages.
    longer = simulate_step(fastest, planner.graph) / simulate_step(plan, planner.graph) - 1
    if longer < 0:
        return [fastest]
    sentence = (
        f"a tie: the fastest plan, on mesh {fastest.mesh}, takes {100 * (1 - fastest.cost.gpu_time_s / plan.cost.gpu_time_s):.1f} % less "
        f"by the form that the search minimises{', which is proven' if fastest.optimal else ''}, and {100 * longer:.1f} % more by the "
        "simulation; this plan needs one mesh axis"
    )
    tie = Note(sentence)
    return [
        replace(plan, optimal=False, bound=fastest.bound, notes=(tie,), role=PlanRole.SIMPLER),
        replace(fastest, name=FASTEST, role=PlanRole.FASTEST),
    ]


def _fits_and_is_faster(other: Plan, plan: Plan) -> bool:
    return other.fits and other.cost.step_time_s < plan.cost.step_time_s


def without_simpler(plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Return the same plans with the fastest one in front, as the search named it, and without a simpler one."""
    return (
        (replace(plans[1], name=plans[0].name, role=PlanRole.BEST), *plans[2:])
        if plans[0].role is PlanRole.SIMPLER
        else plans
    )
