"""Meshes of three axes, searched where they can win: many GPUs, of which several work on one sample.

On two axes either the rings that gather weights pass through all rows of GPUs, or weights are kept in more copies than memory
has room for. A third axis cuts a ring of 64 into two of 8, beside tensor or context parallelism inside a node: replicas of shards.
Where every GPU has samples of its own, meshes of two axes hold that too (HSDP). On few nodes rings are short: on 64 GPUs and fewer
no model of the zoo gained by a third axis, and on 128 and more Llama-3-8B did, up to 12 %, with fewer samples than GPUs.

Example: 512 GPUs in nodes of 8 have 8x8x8, 4x16x8 and 8x16x4.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from planner_core.core import (
    Cluster,
    DeviceMesh,
    NoPlanFits,
    Plan,
    PlannerError,
    Sentence,
    axis_names,
    divisors,
    time_amount,
)
from planner_core.planning.fitting.host_waits import choose_shortest_step
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.fitting.micro_batch_size import choose_for_micro_batch_size
from planner_core.planning.fitting.micro_batches import choose_micro_batches
from planner_core.planning.fitting.shortage import replicated_gpus, states_can_fit
from planner_core.planning.methods import EXACT
from planner_core.planning.planner import Planner
from planner_core.planning.request import Progress, Request

MAX_GPUS_OF_TWO_AXES = 64
"""Number of GPUs up to which two axes are enough."""
MIN_STEP_GAIN = 0.01
"""A note names a part of the cluster if it saves more than this share of the step."""
REPEATED_WORK_GAIN = -1e-6
"""The share for a plan in which GPUs do the same work: a part that is as fast costs less."""
PART_FACTORS = (1, 8, 32)
"""Parts of so many times the GPUs that do different work are looked at."""
MAX_AXIS_RATIO = 4
"""The second of the outer axes is at most so many times as long as the first."""


def meshes_of_three(planner: Planner, *, short: bool = False) -> list[DeviceMesh]:
    """Return the meshes to search beside those of two axes; none where these are enough, or where the user named a mesh, tool or method.

    `short`: no plan on two axes fits, so three are tried on few GPUs as well."""
    request, n, node = planner.request, planner.cluster.num_gpus, planner.cluster.near_gpus
    is_open = (
        request.mesh is None and request.tool is None and request.method == EXACT.name and request.objective == "time"
    )
    if not is_open or (not short and (n <= MAX_GPUS_OF_TWO_AXES or planner.workload.graph_batch >= n)):
        return []
    shapes = []
    for inner in (node, node // 2, *((node // 4,) if short else ())):
        if inner > 1 and n % inner == 0:
            # Example: 512 GPUs, inner 8, rest 64: 4 x 16 and 8 x 8. In 2 x 32 the second is 16 times as long, and 16 x 4 has it shorter.
            rest = n // inner
            shapes += [(a, rest // a, inner) for a in divisors(rest)[1:-1] if a <= rest // a <= MAX_AXIS_RATIO * a]
    return [DeviceMesh(axis_names(3), sizes) for sizes in shapes]


def with_third_axis(planner: Planner, plan: Plan, report_progress: Progress) -> Plan:
    """Return the best plan on a mesh of three axes if it is better than `plan`, which is the best on two; else `plan`."""
    options = meshes_of_three(planner, short=not plan.fits)
    # No mesh shares weights and states better than evenly, so none is built if that is too much.
    if not options or (not plan.fits and not states_can_fit(planner)):
        return plan
    incumbent = plan.cost.gpu_time_s if plan.fits else float("inf")
    try:
        on_three = choose_mesh(planner, options, report_progress, below=incumbent)
    except NoPlanFits:
        return plan
    if on_three.preference >= plan.preference:
        return plan
    # The space is that of both searches, so the lower of the two bounds holds.
    bound = None if plan.bound is None or on_three.bound is None else min(plan.bound, on_three.bound)
    return replace(on_three, optimal=on_three.optimal and plan.optimal, bound=bound)


def note_fewer_gpus(
    planner: Planner, plan: Plan, stated: Request, source: GraphSource, report_progress: Progress
) -> tuple[str, ...]:
    """Return a note if a part of the cluster would do. It must be as fast as a plan in which GPUs repeat work, or faster than a plan in
    which more GPUs than a node has share a sample.

    Where an outer axis has copies, operators see the rest of the mesh as one axis; that part has two of its own. `stated` and `source`:
    the request as it was given and where its graphs come from, since `planner` has the number of micro-batches that suits all GPUs.

    Example: 32 samples on 512 GPUs. Llama-3-8B takes 313 ms on 32 data x 16 context ranks, and 269 ms on half of the GPUs.
    """
    sizes = _parts_to_search(planner, plan)
    if planner.request.mesh or not plan.fits or not sizes:
        return ()
    plan_by_part: dict[str, Plan] = {}
    timed = planner.request.method == EXACT.name and plan.objective == "time"
    repeats = replicated_gpus(plan) > 1
    longest_s = plan.cost.step_time_s * (1 - (REPEATED_WORK_GAIN if repeats else MIN_STEP_GAIN))
    most = longest_s if timed else math.inf
    for gpus in sizes:
        part = _first_gpus(planner.cluster, gpus)
        if part:
            report_progress(f"search on {gpus} GPUs")
            with contextlib.suppress(PlannerError):
                name = (
                    f"{gpus:,} of these GPUs alone ({' x '.join(str(level.size) for level in reversed(part.levels))})"
                )
                # Without accumulate: 16 samples go one at a time where 13 GPUs do the same work, and two at a time to 8.
                request = replace(stated, batch=planner.request.batch, cluster=part)
                plan_by_part[name] = _plan_part(request, source, report_progress, planner, most)
                if timed and plan_by_part[name].fits:
                    most = min(most, plan_by_part[name].cost.step_time_s)  # the note names the best part
    if not plan_by_part:
        return ()
    name, best = min(plan_by_part.items(), key=lambda item: item[1].preference)
    best_s, step_s = best.cost.step_time_s, plan.cost.step_time_s
    if not best.fits or best_s > longest_s:
        return ()
    alone, whole = time_amount(best_s), time_amount(step_s)
    # Where GPUs repeat the same work, times differ by rounding, or by less than what is worth a word.
    times = (alone, " instead of ", whole) if best_s < step_s * (1 - MIN_STEP_GAIN) else (alone, ", as all do")
    # Stages, which are searched on several nodes, may use all GPUs: Llama-3-70B takes 5.7 s on 8 nodes of slow links, and not 13.9 on 4.
    of_one_stage = "" if planner.cluster.is_one_node else " by plans of one pipeline stage"
    why = "the others repeat the same work" if repeats else "this batch is too small for the others"
    return (Sentence(f"{name} would take ", *times, of_one_stage, f": {why}"),)


def _parts_to_search(planner: Planner, plan: Plan) -> list[int]:
    """Return the numbers of GPUs that may be faster alone than all of them."""
    gpus = plan.mesh.num_devices
    used = gpus // replicated_gpus(plan)
    if used < gpus:
        return [used * more for more in PART_FACTORS if used * more < gpus]
    # Where a sample is shared inside a node, its messages take that node's links, and fewer GPUs only compute longer.
    shared = gpus > planner.cluster.near_gpus * planner.workload.batch
    return [gpus // 2] if shared and plan.pipeline is None and gpus % 2 == 0 else []


def _plan_part(
    request: Request, source: GraphSource, report_progress: Progress, earlier_planner: Planner, most: float
) -> Plan:
    """Return the best plan of a request on a part of a cluster, as it is for a request of that cluster alone: of the micro-batch that was
    asked for, if one was, and with waits for the host. Raises PlannerError."""
    if request.micro_batch is not None:
        best = choose_for_micro_batch_size(request, source, report_progress)
    else:
        best = choose_micro_batches(
            request, source, report_progress, search=partial(_best_below, most), earlier_planner=earlier_planner
        )
    return choose_shortest_step(request, source, *best, report_progress)[1]


def _best_below(
    most: float,
    planner: Planner,
    options: Sequence[DeviceMesh],
    report_progress: Progress,
    *,
    below: float = math.inf,
    prove: bool = True,
) -> Plan:
    """Return what `choose_mesh` gives if it looks for no plan above `most`."""
    return choose_mesh(planner, options, report_progress, below=min(below, most), prove=prove)


def _first_gpus(cluster: Cluster, gpus: int) -> Cluster | None:
    """Return the cluster of the first `gpus` GPUs, if they fill whole units of each level."""
    sizes, rest = [], gpus
    for level in cluster.levels:
        size = max(d for d in divisors(rest) if d <= level.size)
        rest //= size
        sizes.append(size)
    return cluster.part(*sizes) if rest == 1 else None
