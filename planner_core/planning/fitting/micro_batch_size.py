"""The best plan whose data-parallel ranks compute a given number of samples at once.

The number of micro-batches follows from it: with d data-parallel ranks, a step of B samples has B / (d · size) of them. So each d
is a search of its own, in which the samples are sharded over exactly d ranks.

Example: 64 samples on 16 GPUs, 2 at once. With 16 data-parallel ranks a step has 2 micro-batches, with 8 ranks 4, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from planner_core.core import (
    OPTIONS,
    DeviceMesh,
    Graph,
    InputError,
    NoPlanFits,
    Plan,
    Shard,
    divisors,
    load_cluster,
    named,
)
from planner_core.cost import block_of, micro_batch
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.methods import METHODS, Method
from planner_core.planning.planner import Planner, candidate_meshes, prepare_planner
from planner_core.planning.request import MOMENT, THOROUGH, Progress, Request
from planner_core.search.network import Network, Restriction, allow_only, boundary_variables, tensor_name


@dataclass
class SamplesOver(Restriction):
    """Every tensor with a batch dim that enters or leaves a repeated block is sharded by it over these axes, and over no others; and what
    `inner` forbids. Inside a block and in the loss samples may be gathered for products that are sharded otherwise. If a model has no
    repeated blocks, all its tensors count."""

    graph: Graph
    axes: tuple[int, ...]
    inner: Restriction

    def apply(self, block: str, net: Network) -> None:
        """Add factors that forbid the other states."""
        self.inner.apply(block, net)
        if not block and self.graph.blocks:
            return
        where = block_of(self.graph, block)
        counted = boundary_variables(where) if block else tuple(net.tensors)
        batch, seq = self.graph.workload["batch"], self.graph.workload["seq"]
        for number, value, states in net.placed_values(where):
            name = tensor_name(number)
            # Samples lie in the first dim, alone or joined with the tokens.
            if name in counted and value.kind != "parameter" and value.meta.shape[:1] in ((batch,), (batch * seq,)):
                over = np.array([pair[0] == Shard(0) for pair in states.axis_states])[states.index]  # [state, axis]
                wanted = np.isin(np.arange(over.shape[1]), self.axes)
                net.factors.append(allow_only(name, (over == wanted).all(axis=1)))


def choose_for_micro_batch_size(
    request: Request, graph: GraphSource, report_progress: Progress
) -> tuple[Planner, Plan]:
    """Return the planner and the best plan of `request.micro_batch`; if nothing fits, the plan of least memory.

    Raises InputError if no number of ranks gives such micro-batches, and NoPlanFits if the user gave a budget that no plan fits.
    """
    if request.tool is not None:
        raise InputError(
            named("micro_batch"), " does not go with ", named("tool", request.tool), "; give ", named("accumulate")
        )
    best: tuple[Planner, Plan] | None = None
    refused: NoPlanFits | None = None
    for ranks, planner in _planners_by_data_ranks(request, graph, report_progress):
        for method, options in _restrict_samples(planner, ranks):
            # A plan that fits bounds the searches that follow. Steps of all these numbers have the same samples, so their times compare.
            incumbent = best[0].value(best[1]) if best and best[1].fits else math.inf
            try:
                plan = choose_mesh(planner, options, report_progress, method=method, below=incumbent)
            except NoPlanFits as error:
                refused = min(refused or error, error, key=lambda e: e.needed_bytes)
                continue
            if best is None or _plan_rank(planner, plan) < _plan_rank(*best):
                best = planner, plan
    if best is None:
        raise refused or NoPlanFits(
            f"no plan computes {request.micro_batch} samples at once; try another ", named("micro_batch")
        )
    return best


def keep_micro_batch_size(request: Request, plans: Iterable[Plan]) -> list[Plan]:
    """Return those plans that compute as many samples at once as the request says; all if it says nothing."""
    return [p for p in plans if request.micro_batch in (None, micro_batch(p))]


def _plan_rank(planner: Planner, plan: Plan) -> tuple[bool, float]:
    return not plan.fits, planner.value(plan) if plan.fits else plan.cost.memory_bytes["peak"]


def _planners_by_data_ranks(
    request: Request, graph: GraphSource, report_progress: Progress
) -> Iterator[tuple[int, Planner]]:
    """Yield a planner for each number of data-parallel ranks, the most first."""
    size, gpus = request.micro_batch, load_cluster(request.cluster).num_gpus
    assert size is not None
    OPTIONS["micro_batch"].check(size)
    fixed = (request.accumulate or 1) if isinstance(graph, Graph) else request.accumulate

    def prepare(number: int, batch: int | None) -> Planner:
        of_number = replace(request, batch=batch, accumulate=number)
        return prepare_planner(
            of_number,
            graph(of_number) if callable(graph) else graph,
            report_progress,
            THOROUGH if request.prove else MOMENT,
        )

    batch = request.batch or prepare(fixed or 1, None).workload.batch
    is_possible = False
    for ranks in reversed(divisors(gpus)):
        number, rest = divmod(batch, ranks * size)
        if not rest and number and fixed in (None, number):
            is_possible = True
            yield ranks, prepare(number, batch)
    if not is_possible:
        steps = "" if fixed is None else f" in {fixed} micro-batch{'es' * (fixed > 1)}"
        raise InputError(
            f"{batch} samples a step{steps} cannot be computed {size} at once by any number of ranks that divides {gpus} GPUs; ",
            "give another ",
            named("micro_batch"),
            ", or a ",
            named("batch"),
            f" that is a multiple of {size * gpus}",
        )


def _restrict_samples(planner: Planner, ranks: int) -> Iterator[tuple[Method, list[DeviceMesh]]]:
    """Yield the request's method with samples over `ranks` ranks; and the meshes that it suits, for each place of these axes."""
    method = METHODS[planner.request.method]
    places: dict[tuple[int, ...], list[DeviceMesh]] = {}
    for mesh in candidate_meshes(planner.request, planner.cluster):
        axes = [a for a, n in enumerate(mesh.axis_sizes) if n > 1]
        # The axes that hold the samples are a choice of their own: on 4 x 4 either axis gives 4 ranks, both give 16.
        for count in range(len(axes) + 1):
            for chosen in combinations(axes, count):
                if math.prod(mesh.axis_sizes[a] for a in chosen) == ranks:
                    places.setdefault(chosen, []).append(mesh)
    for chosen, options in places.items():

        def restrict(graph: Graph, mesh: DeviceMesh, axes: tuple[int, ...] = chosen) -> Restriction | None:
            inner = method.restrict(graph, mesh)
            return inner and SamplesOver(graph, axes, inner)

        yield replace(method, restrict=restrict), options
