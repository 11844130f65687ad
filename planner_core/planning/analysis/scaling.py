"""How the best mesh changes with the number of GPUs, and at which degree tensor parallelism stops paying.

For each number of GPUs:
1. A cluster of that size with the same nodes and links is made (`resize_cluster`).
2. Every factorisation into at most two axes is searched (`best_plans_at`).
3. The best plan of every tensor-parallel degree is found (`TensorAxis`). Then the last axis shards the weights and not the batch.
   The first axis shards the batch, and may shard weights that are gathered at use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from planner_core.core import (
    Cluster,
    DeviceMesh,
    Graph,
    InputError,
    Plan,
    PlannerError,
    Shard,
    Value,
    axis_names,
    join_name,
)
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.methods import (
    EXACT,
    AxisRules,
    Method,
    is_batch_split,
    is_sequence_split,
    is_unsplit,
    is_used_in_parts,
    pass_any,
)
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import Planner, candidate_meshes, prepare_planner
from planner_core.search.algebra import TooWide
from planner_core.search.network import AxisState, Restriction

COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LEAST_GAIN = 0.05
"""A larger degree pays if the step gets shorter by more than this share; the cost model is not more exact."""


@dataclass(frozen=True, slots=True)
class ScalingOption:
    """The best plan over meshes, or at one tensor-parallel degree. `degree` is the number of GPUs over which the plan shards the use
    of most weights. `step_time_s` is infinite if no plan can run."""

    mesh: DeviceMesh
    degree: int
    step_time_s: float
    exposed_s: float
    memory_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Size:
    """One number of GPUs: the best plan of each mesh that comes near the best of all, and the best plan of each tensor-parallel
    degree."""

    num_gpus: int
    batch: int
    meshes: tuple[ScalingOption, ...]
    degrees: tuple[ScalingOption, ...]

    @property
    def best(self) -> ScalingOption | None:
        """The mesh of the shortest step that fits, or None."""
        return min((o for o in self.meshes if o.fits), key=lambda o: o.step_time_s, default=None)

    @property
    def by_degree(self) -> dict[int, ScalingOption]:
        """The fastest plan known of each tensor-parallel degree that fits, ascending."""
        found: dict[int, ScalingOption] = {}
        for o in (*self.degrees, *self.meshes):
            if o.fits and (o.degree not in found or o.step_time_s < found[o.degree].step_time_s):
                found[o.degree] = o
        return dict(sorted(found.items()))

    @property
    def last_paying(self) -> ScalingOption | None:
        """The degree at which tensor parallelism should stop: go up from the smallest degree that fits, as long as a larger one
        shortens the step by more than PAYS. None if nothing fits."""
        kept: ScalingOption | None = None
        for o in self.by_degree.values():
            if kept is None or o.step_time_s < kept.step_time_s * (1 - LEAST_GAIN):
                kept = o
        return kept


def resize_cluster(cluster: Cluster, num_gpus: int) -> Cluster:
    """A cluster of `num_gpus` GPUs with the same nodes and links. The outermost level grows or shrinks; inner levels only shrink.

    Raises InputError if that many GPUs do not fill whole units.
    """
    left, levels = num_gpus, []
    for level in cluster.levels[:-1]:
        size = min(level.size, left)
        if left % size:
            raise InputError(
                f"{num_gpus} GPUs do not fill units of {level.size} on {level.name} of {cluster.name}; give a multiple of {level.size}"
            )
        levels.append(replace(level, size=size))
        left //= size
    levels.append(replace(cluster.levels[-1], size=left))
    kept = [level for i, level in enumerate(levels) if level.size > 1 or i == 0]
    return replace(cluster, name=f"{cluster.name} at {num_gpus} GPUs", levels=tuple(kept))


def best_plans_at(
    request: Request,
    cluster: Cluster,
    num_gpus: int,
    batch: int | None = None,
    graph: Graph | None = None,
    say: Progress = lambda text: None,
) -> Size:
    """The best plans for one number of GPUs.

    `graph`: the request's model; None loads it from the zoo for `batch` samples. `say` gets a sentence about what is being done, and
    may raise to stop. Raises InputError.
    """
    there = resize_cluster(cluster, num_gpus)
    asked = replace(request, cluster=there.to_json(), mesh=None, batch=batch, method="exact", objective="time")
    planner = prepare_planner(asked, graph)
    degrees = []
    for t in range(1, num_gpus + 1):
        if num_gpus % t == 0:
            say(f"{num_gpus} GPUs, tensor-parallel degree {t}")
            mesh = (
                DeviceMesh(axis_names(2), (num_gpus // t, t))
                if 1 < t < num_gpus
                else DeviceMesh(axis_names(1), (num_gpus,))
            )
            one = _best_on_mesh(planner, mesh, replace(EXACT, objective="time", restrict=TensorAxis(t)))
            degrees.append(replace(one, degree=t))
    # the likely best mesh first, so that the search can abandon the others early
    known = {o.mesh: o.step_time_s for o in sorted(degrees, key=lambda o: -o.step_time_s)}
    samples = planner.workload.batch
    order = sorted(
        candidate_meshes(asked, planner.cluster),
        key=lambda m: (known.get(m, math.inf), abs(math.log2(m.axis_sizes[0] / samples))),
    )
    near = tuple(_promising_meshes(planner, order, say))
    return Size(num_gpus, samples, near, tuple(degrees))


def _promising_meshes(planner: Planner, options: Iterable[DeviceMesh], say: Progress) -> Iterator[ScalingOption]:
    """The best plan of each mesh that may come within twice PAYS of the best so far."""
    least = math.inf
    for mesh in options:
        say(f"{mesh.num_devices} GPUs, mesh {mesh}")
        try:
            problem = planner.problem(mesh)
        except TooWide:
            continue
        answer = planner.solve(problem, "time", least * (1 + 2 * LEAST_GAIN))
        if answer.assignment is not None:
            found = _scaling_option(planner.plan(problem, answer, "best", "exact", "time"), planner.graph)
            least = min(least, found.step_time_s if found.fits else math.inf)
            yield found


def _best_on_mesh(planner: Planner, mesh: DeviceMesh, method: Method) -> ScalingOption:
    try:
        return _scaling_option(choose_mesh(planner, [mesh], method=method), planner.graph)
    except PlannerError:
        return ScalingOption(mesh, 0, math.inf, math.inf, 0, False)


def _scaling_option(plan: Plan, graph: Graph) -> ScalingOption:
    c = plan.cost
    return ScalingOption(
        plan.mesh, tensor_degree(plan, graph), c.step_time_s, c.exposed_comm_time_s, c.memory_bytes["peak"], plan.fits
    )


def tensor_degree(plan: Plan, graph: Graph) -> int:
    """The number of GPUs over which the plan shards the use of most weights: the product of the axes on which most elements are
    sharded and not gathered."""
    sizes = {name: math.prod(meta.shape) for name, meta in graph.parameters().items()}
    degree = 1
    for axis, n in enumerate(plan.mesh.axis_sizes):
        split = sum(
            sizes.get(join_name(prefix, weight), 0)
            for block in plan.blocks.values()
            for weight, p in block.params.items()
            if isinstance(p.working[axis], Shard) and axis not in p.gathered
            for prefix in block.prefixes
        )
        degree *= n if split > sum(sizes.values()) / 2 else 1
    return degree


# --- tensor parallelism of one degree -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """The restriction that makes the last axis a tensor-parallel axis of `degree` GPUs, and the first axis a data axis."""

    degree: int

    def __call__(self, graph: Graph, mesh: DeviceMesh) -> Restriction | None:
        """The rules on this mesh."""
        if self.degree == 1:
            return AxisRules(graph, (is_batch_split,), (pass_any,))
        if self.degree == mesh.num_devices:
            return AxisRules(graph, (stream,), (is_used_in_parts,))
        return AxisRules(graph, (is_batch_split, stream), (pass_any, is_used_in_parts))


def stream(v: Value, pair: AxisState) -> bool:
    """The residual stream is Replicate, or sharded by tokens, but not by batch."""
    return is_unsplit(v, pair) or is_sequence_split(v, pair)
