"""Who sends how much to whom: the bytes of a plan's collectives from rank to rank, by the algorithm that the plan names.

    ring           each rank sends all it sends to its next neighbour
    hierarchical   a ring on every level: (m-1)/m of B inside, then (k-1)/k of B/m across, ...
    tree           two binary trees, one the mirror of the other; each edge carries half of B up and half of B down
    pairwise       to every other rank alike

Ring, hierarchical and pairwise make every rank send the plan's wire bytes exactly; of a tree that is the mean, since its
inner ranks send more than its leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner_core.core import PHASES, Cluster, DeviceMesh, Plan, Traffic
from planner_core.cost.communication.links import AxisLink, axis_links

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hops:
    """Messages inside one group: `share` of what a rank sends on average goes from place `src` to place `dst` of the group.

    The shares of a group of n add up to n.
    """

    src: Ints
    dst: Ints
    share: Floats


def sent(plan: Plan, cluster: Cluster, phases: Iterable[str] = PHASES) -> Floats:
    """[rank, rank] bytes that row sends to column in one step, in these phases."""
    n = plan.mesh.num_devices
    matrix = np.zeros((n, n))
    for src, dst, num_bytes in routes(plan, cluster, phases):
        np.add.at(matrix, (src, dst), num_bytes)
    return matrix


def routes(plan: Plan, cluster: Cluster, phases: Iterable[str] = PHASES) -> Iterator[tuple[Ints, Ints, Floats]]:
    """(from, to, bytes) over all groups of an axis, for each row of the plan's traffic."""
    links = axis_links(cluster, plan.mesh)
    for t in plan.cost.traffic:
        if t.wire_bytes and t.phase in tuple(phases):
            yield route(t, plan.mesh, links[t.axis])


def route(t: Traffic, mesh: DeviceMesh, link: AxisLink) -> tuple[Ints, Ints, Floats]:
    """(from, to, bytes) of one row of traffic, all groups of its axis."""
    groups = axis_groups(mesh, t.axis)
    h = hops(t.algorithm, mesh.axis_sizes[t.axis], link.members, t.kind == "all_reduce")
    num_bytes = np.broadcast_to(h.share * t.wire_bytes, (len(groups), len(h.share)))
    return groups[:, h.src].ravel(), groups[:, h.dst].ravel(), num_bytes.ravel()


def axis_groups(mesh: DeviceMesh, axis: int) -> Ints:
    """[groups, size] ranks that talk to each other along an axis, ascending."""
    size, stride = mesh.axis_sizes[axis], mesh.stride(axis)
    ranks: Ints = np.arange(mesh.num_devices, dtype=np.int64).reshape(-1, size, stride)
    return ranks.swapaxes(1, 2).reshape(-1, size)


def hops(algorithm: str, size: int, members: Sequence[int] = (), both_ways: bool = True) -> Hops:
    """The messages of one algorithm in a group of `size`; `members` are its units per level, innermost first, where it
    lies evenly on them. Raises ValueError for an algorithm that is not known."""
    here = np.arange(size, dtype=np.int64)
    if algorithm == "ring":
        return Hops(here, (here + 1) % size, np.ones(size))
    if algorithm == "pairwise":
        src, step = np.divmod(np.arange(size * (size - 1), dtype=np.int64), size - 1)
        return Hops(src, (src + step + 1) % size, np.full(len(src), 1 / (size - 1)))
    if algorithm == "hierarchical":
        return _rings_of_rings(size, members)
    if algorithm == "tree":
        edges = [e for order in (here, here[::-1]) for e in _tree_edges(order, tuple(members) or (size,))]
        up = np.array(edges, dtype=np.int64)
        src, dst = np.concatenate([up, up[:, ::-1]]).T
        return Hops(src, dst, np.full(len(src), size / len(src)))
    raise ValueError(f"{algorithm!r} is no algorithm; known are ring, tree, hierarchical, pairwise")


def _rings_of_rings(size: int, members: Sequence[int]) -> Hops:
    """A ring per level; what a level carries is divided among the ranks inside."""
    here = np.arange(size, dtype=np.int64)
    src, dst, share, inside = [], [], [], 1
    for m in members:
        place = here // inside % m
        src.append(here)
        dst.append(here + ((place + 1) % m - place) * inside)
        share.append(np.full(size, (m - 1) / m / inside * size / (size - 1)))
        inside *= m
    return Hops(np.concatenate(src), np.concatenate(dst), np.concatenate(share))


def _tree_edges(order: Ints, members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(child, parent) of a binary tree, level by level; the first of each unit goes on to the next level."""
    leaders = [int(k) for k in order]
    for m in members:
        units = [leaders[i : i + m] for i in range(0, len(leaders), m)]
        for unit in units:
            yield from ((unit[k], unit[(k - 1) // 2]) for k in range(1, len(unit)))
        leaders = [unit[0] for unit in units]


def leaving(src: Ints, dst: Ints, num_bytes: Floats, unit_gpus: int, num_gpus: int) -> Floats:
    """[unit] bytes that leave each unit of `unit_gpus` neighbours."""
    out = src // unit_gpus != dst // unit_gpus
    units = math.ceil(num_gpus / unit_gpus)
    return np.bincount(src[out] // unit_gpus, weights=num_bytes[out], minlength=units).astype(np.float64)
