"""Which rank sends how many bytes to which rank, for the collectives of a plan and the algorithms that the plan names.

    ring           each rank sends all it sends to its next neighbour
    hierarchical   a ring on every level: (m-1)/m of B inside, then (k-1)/k of B/m across, ...
    pairwise       the same to every other rank

Every rank sends exactly the plan's wire bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner_core.core import PHASES, Cluster, DeviceMesh, Plan, Traffic
from planner_core.cost.communication.links import AxisLink, link_along, rank_groups
from planner_core.cost.step_time import Floats, Ints


@dataclass(frozen=True, slots=True)
class Hops:
    """The messages inside one group of n ranks. Place `src` of the group sends to place `dst` the `share` of what a rank sends on
    average. The shares add up to n."""

    src: Ints
    dst: Ints
    share: Floats


def bytes_between_gpus(plan: Plan, cluster: Cluster, phases: Iterable[str] = PHASES) -> Floats:
    """[from, to]: bytes that each GPU sends to each GPU in one step, in these phases. With pipeline stages the groups of all ranks send
    among themselves what that of the busiest rank does."""
    matrix = np.zeros((plan.mesh.num_devices, plan.mesh.num_devices))
    for src, dst, num_bytes in traffic_routes(plan, cluster, phases):
        np.add.at(matrix, (src, dst), num_bytes)
    whole, gpus = np.zeros((plan.num_gpus, plan.num_gpus)), gpus_of_ranks(plan)
    for members in gpus:
        whole[np.ix_(members, members)] = matrix
    for rank, other, handed_on in _between_stages(plan, phases):
        whole[gpus[rank], gpus[other]] += handed_on
    return whole


def gpus_of_ranks(plan: Plan) -> Ints:
    """[ranks of the pipeline, GPUs of one rank] numbers of GPUs, in the order of the plan's mesh."""
    pipe, sizes = plan.pipeline_axis, plan.mesh.axis_sizes
    gpus: Ints = np.arange(plan.num_gpus, dtype=np.int64).reshape(pipe.insert(sizes, pipe.ranks))
    return np.moveaxis(gpus, pipe.outer, 0).reshape(pipe.ranks, -1)


def _between_stages(plan: Plan, phases: Iterable[str]) -> Iterator[tuple[int, int, float]]:
    """(from, to, bytes) by rank of the pipeline: results on their way to the next stage, and gradients on their way back."""
    cut, cost = plan.pipeline, plan.cost.pipeline
    if cut is None or cost is None:
        return
    for stage, stage_cost in enumerate(cost.stages[:-1]):
        here, there = cut.rank_of(stage), cut.rank_of(stage + 1)
        sent = float(stage_cost.send_bytes * plan.accumulate)
        # At the turn of a V the next stage is on the same rank, so nothing is sent.
        if here != there:
            yield from (
                (a, b, sent) for p, a, b in (("forward", here, there), ("backward", there, here)) if p in phases
            )


def sent_per_gpu(plan: Plan) -> int:
    """Return the bytes that one GPU sends in a step: in collectives, and of a plan with stages what it hands to others at most."""
    out = Counter[int]()
    for src, _, num_bytes in _between_stages(plan, PHASES):
        out[src] += int(num_bytes)
    return sum(t.wire_bytes for t in plan.cost.traffic) + max(out.values(), default=0)


def traffic_routes(plan: Plan, cluster: Cluster, phases: Iterable[str] = PHASES) -> Iterator[tuple[Ints, Ints, Floats]]:
    """(from, to, bytes) over all groups of an axis, for each row of the plan's traffic."""
    for t in plan.cost.traffic:
        if t.wire_bytes and t.phase in tuple(phases):
            yield traffic_route(t, plan.mesh, link_along(cluster, plan.mesh, t.axes, plan.pipeline_axis))


def traffic_route(t: Traffic, mesh: DeviceMesh, link: AxisLink) -> tuple[Ints, Ints, Floats]:
    """(from, to, bytes) of one row of traffic, all groups of its axes."""
    groups = rank_groups(mesh.axis_sizes, t.axes)
    h = algorithm_hops(t.algorithm, groups.shape[1], link.members)
    num_bytes = np.broadcast_to(h.share * t.wire_bytes, (len(groups), len(h.share)))
    return groups[:, h.src].ravel(), groups[:, h.dst].ravel(), num_bytes.ravel()


def algorithm_hops(algorithm: str, size: int, members: Sequence[int] = ()) -> Hops:
    """Return the messages of one algorithm in a group of `size` ranks. `members` are the units per level, innermost first, if the group
    lies evenly on them. Raises ValueError for an unknown algorithm."""
    here = np.arange(size, dtype=np.int64)
    if algorithm == "ring":
        return Hops(here, (here + 1) % size, np.ones(size))
    if algorithm == "pairwise":
        src, step = np.divmod(np.arange(size * (size - 1), dtype=np.int64), size - 1)
        return Hops(src, (src + step + 1) % size, np.full(len(src), 1 / (size - 1)))
    if algorithm == "hierarchical":
        return _rings_of_rings(size, members)
    raise ValueError(f"{algorithm!r} is not an algorithm; choose ring, hierarchical or pairwise")


def _rings_of_rings(size: int, members: Sequence[int]) -> Hops:
    """One ring per level. The ranks inside a unit divide what the level carries."""
    here = np.arange(size, dtype=np.int64)
    src, dst, share, inside = [], [], [], 1
    for m in members:
        place = here // inside % m
        src.append(here)
        dst.append(here + ((place + 1) % m - place) * inside)
        # B / inside bytes reach this level, of which a ring of m sends (m-1)/m; a rank sends (size-1)/size of B on all levels.
        share.append(np.full(size, (m - 1) / m / inside * size / (size - 1)))
        inside *= m
    return Hops(np.concatenate(src), np.concatenate(dst), np.concatenate(share))
