"""The links that the groups of a mesh axis cross, and how many groups share each."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from planner_core.core import ONE_RANK, Cluster, DeviceMesh, InputError, Level, PipelineAxis
from planner_core.cost.step_time import Ints

PIPE = "pipe"
"""The name of the axis of the stages' ranks."""
SWITCH_GPUS = 8
"""NCCL lets the switch add the terms of a sum if a node has at least this many GPUs (measured: with 8, but not with 2 and 4;
aiconfigurator's tables)."""


@dataclass(frozen=True, slots=True)
class LinkStage:
    """The part of a group that lies on one level of the cluster: it spans `members` child units of that level.

    `bytes_per_s` is what one GPU gets of the links when all GPUs send at once: its share of the uplinks of every unit that its
    data must leave. `latency_s` is that of one step of a ring, `tree_latency_s` that of one step of a tree. `inside` says that
    the links join GPUs inside a node.
    """

    level: str
    members: int
    bytes_per_s: float
    latency_s: float
    tree_latency_s: float = 0.0
    inside: bool = True


@dataclass(frozen=True, slots=True)
class AxisLink:
    """One mesh axis on one cluster, as its groups see it when all of them run at once.

    `levels` are the names of the levels that the groups cross, innermost first. `bytes_per_s` and `latency_s` hold for one flat
    ring: its slowest share of a link, and its slowest hop. `send_bytes_per_s` is what one GPU gets of the links that the groups cross,
    when all send at once. `exchange_s_per_byte` is the time of an all_to_all per byte of B.
    `stages` has one entry per crossed level if every group lies evenly on the levels. It is empty if some do not.

    Latencies: `launch_s` of any collective; `ring_s`, `sum_s` and `exchange_s` of the hops of one turn of a ring, of an
    all_reduce and of an all_to_all. `curve`, `summing` and `in_switch` are those of `Collectives`. `in_switch` is 1 if the
    switch does not add for these groups.
    """

    size: int
    levels: tuple[str, ...] = ()
    bytes_per_s: float = math.inf
    send_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    exchange_s_per_byte: float = 0.0
    stages: tuple[LinkStage, ...] = ()
    launch_s: float = 0.0
    ring_s: float = 0.0
    sum_s: float = 0.0
    exchange_s: float = 0.0
    curve: float = 0.0
    summing: float = 1.0
    in_switch: float = 1.0

    @property
    def members(self) -> tuple[int, ...]:
        """Child units per crossed level. Their product is `size` if the groups lie evenly."""
        return tuple(stage.members for stage in self.stages)


VOLUME_RATE = 1e9
"""Bytes per second of a `volume_link`, so that seconds read as gigabytes."""


@lru_cache(maxsize=1024)
def volume_link(size: int) -> AxisLink:
    """Return a link on which only volume counts: one byte costs the same on every axis, and latencies are zero.

    A planner that does not know the topology assumes this (TAP).
    """
    stage = LinkStage("volume", size, VOLUME_RATE, 0.0)
    return AxisLink(size, ("volume",), VOLUME_RATE, VOLUME_RATE, 0.0, (size - 1) / size**2 / VOLUME_RATE, (stage,), 0.0)


JointLinks: TypeAlias = tuple[tuple[tuple[int, ...], AxisLink], ...]
"""Pairs: several axes of a mesh, each of several ranks, and the link of the groups that lie along all of them."""


def axis_links(cluster: Cluster, mesh: DeviceMesh) -> tuple[AxisLink, ...]:
    """One link per mesh axis. Ranks are row-major, so the last axis joins adjacent GPUs. Raises InputError on a wrong size."""
    return rank_links(cluster, mesh, ONE_RANK)


def _check_size(cluster: Cluster, mesh: DeviceMesh) -> None:
    if mesh.num_devices != cluster.num_gpus:
        raise InputError(
            f"mesh {mesh} has {mesh.num_devices} devices but {cluster.name} has {cluster.num_gpus} GPUs; "
            f"sizes must multiply to {cluster.num_gpus}"
        )


def whole_mesh(mesh: DeviceMesh, pipe: PipelineAxis) -> DeviceMesh:
    """Return the mesh of a whole pipeline, from that of one rank; its ranks are along the axis `pipe`."""
    if pipe.ranks == 1:
        return mesh
    return DeviceMesh(pipe.insert(mesh.axis_names, PIPE), pipe.insert(mesh.axis_sizes, pipe.ranks))


def rank_links(cluster: Cluster, mesh: DeviceMesh, pipe: PipelineAxis) -> tuple[AxisLink, ...]:
    """One link per axis of a mesh, or of the mesh of one of the ranks of a pipeline."""
    return tuple(link_along(cluster, mesh, (axis,), pipe) for axis in range(len(mesh.axis_sizes)))


def joint_links(cluster: Cluster, mesh: DeviceMesh, pipe: PipelineAxis) -> JointLinks:
    """Return the link of every set of several axes of a mesh, or of the mesh of one of the ranks of a pipeline."""
    several = [axis for axis, size in enumerate(mesh.axis_sizes) if size > 1]
    sets = [axes for count in range(2, len(several) + 1) for axes in itertools.combinations(several, count)]
    return tuple((axes, link_along(cluster, mesh, axes, pipe)) for axes in sets)


def link_along(cluster: Cluster, mesh: DeviceMesh, axes: tuple[int, ...], pipe: PipelineAxis) -> AxisLink:
    """Return the link of the groups along some axes of a mesh, or of the mesh of one of the ranks of a pipeline."""
    whole = whole_mesh(mesh, pipe)
    _check_size(cluster, whole)
    # The pipeline's axis stands among those of the whole mesh, behind `outer` of them.
    inserted = 0 if pipe.ranks == 1 else 1
    return _make_link(cluster, whole.axis_sizes, tuple(a + inserted * (a >= pipe.outer) for a in axes))


def pipe_link(cluster: Cluster, mesh: DeviceMesh, pipe: PipelineAxis) -> AxisLink:
    """Return the links between neighbouring ranks of a pipeline of several; `mesh` is that of one rank."""
    whole = whole_mesh(mesh, pipe)
    return axis_links(cluster, whole)[whole.axis_names.index(PIPE)]


def _make_link(cluster: Cluster, sizes: tuple[int, ...], axes: tuple[int, ...]) -> AxisLink:
    """Return the link of the groups along the axes `axes` of a mesh of `sizes`."""
    # Neighbouring axes that are both in the groups, or both outside, are one: 4 x 2 x 8 along axis 0 is 4 x 16. So meshes share links.
    runs = itertools.groupby(range(len(sizes)), lambda axis: axis in axes)
    merged = [(is_along, math.prod(sizes[axis] for axis in run)) for is_along, run in runs]
    along = tuple(number for number, (is_along, _) in enumerate(merged) if is_along)
    return _group_link(cluster, tuple(size for _, size in merged), along)


@lru_cache(maxsize=1024)
def _group_link(cluster: Cluster, sizes: tuple[int, ...], axes: tuple[int, ...]) -> AxisLink:
    size = math.prod(sizes[axis] for axis in axes)
    if size == 1:
        return AxisLink(1)
    # Example: 2 nodes of 4 GPUs, a mesh of 2 x 4, axis 0. The groups are [[0, 4], [1, 5], [2, 6], [3, 7]], in the nodes [[0, 1], [0, 1],
    # ...]. All four rings leave a node at once, so each of them gets a quarter of the node's rate.
    groups = rank_groups(sizes, axes)
    units = [groups // cluster.unit_gpus(i) for i in range(len(cluster.levels) + 1)]
    crossed = [i for i in range(len(cluster.levels)) if np.any(_units_touched(units[i]) > _units_touched(units[i + 1]))]
    local = int(_list_pieces(units[1])[1].max())
    rates = _level_rates(cluster, local)
    ring, exchange = math.inf, 0.0
    for i, rate in enumerate(rates):
        rings, sent = _busiest_unit_load(units[i])
        if rings:
            ring = min(ring, rate / rings)
            exchange = max(exchange, sent / size**2 / rate)
    stages = _list_stages(cluster, rates, units, crossed)
    slowest = max((cluster.levels[i] for i in crossed), key=lambda level: level.latency_s)
    measured = cluster.gpu.collectives
    summing = measured.summing if measured else 1.0
    switch = measured is not None and local >= SWITCH_GPUS
    return AxisLink(
        size,
        tuple(cluster.levels[i].name for i in crossed),
        ring,
        min(rate / cluster.unit_gpus(i) for i, rate in enumerate(rates) if i <= max(crossed)),
        slowest.latency_s,
        exchange,
        stages,
        cluster.gpu.launch_s if measured is None else measured.base_s,
        ring_s=_ring_hop_seconds(stages) if stages else size * slowest.latency_s,
        sum_s=_reduce_hop_seconds(stages, summing) if stages else 2 * math.log2(size) * _tree_latency(slowest),
        exchange_s=max(_tree_latency(cluster.levels[i]) for i in crossed),
        curve=measured.curve if measured else 0.0,
        summing=summing,
        in_switch=measured.in_switch if measured and switch else 1.0,
    )


def rank_groups(sizes: tuple[int, ...], axes: tuple[int, ...]) -> Ints:
    """[group, rank]: the ranks that talk to each other along axes of a mesh of `sizes`, ascending in each row."""
    ranks = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes)
    last = range(len(sizes) - len(axes), len(sizes))
    return np.moveaxis(ranks, axes, tuple(last)).reshape(-1, math.prod(sizes[axis] for axis in axes))


def _level_rates(cluster: Cluster, local: int) -> list[float]:
    """[level]: bytes per second that one child unit of each level sends, if groups have `local` ranks in a node. Few ranks do not
    fill the links inside a node."""
    measured = cluster.gpu.collectives
    lost = measured.few / max(2, local) if measured else 0.0
    return [level.bytes_per_s * (1 - lost if i == 0 else 1.0) for i, level in enumerate(cluster.levels)]


def _list_stages(cluster: Cluster, rates: list[float], units: list[Ints], crossed: list[int]) -> tuple[LinkStage, ...]:
    """One stage per crossed level; empty if some group lies unevenly."""
    if not all(_lies_evenly(unit) for unit in units):
        return ()
    share = [rate / cluster.unit_gpus(i) for i, rate in enumerate(rates)]
    spread = [int(_units_touched(unit)[0]) for unit in units]
    return tuple(
        LinkStage(
            level.name,
            spread[i] // spread[i + 1],
            min(share[: i + 1]),
            level.latency_s,
            _tree_latency(level),
            cluster.is_inside(i),
        )
        for i, level in enumerate(cluster.levels)
        if i in crossed
    )


def _ring_hop_seconds(stages: tuple[LinkStage, ...]) -> float:
    """Return the seconds of the hops of one turn of a ring through all units.

    With n ranks on N nodes, n - N hops stay inside a node and N hops lead to another node.
    """
    total, ranks = 0.0, math.prod(stage.members for stage in stages)
    for stage in stages:
        outside = ranks // stage.members
        hops = ranks - outside if outside > 1 or stage.inside else ranks
        total, ranks = total + hops * stage.latency_s, outside
    return total


def _reduce_hop_seconds(stages: tuple[LinkStage, ...], summing: float) -> float:
    """Return the seconds of the hops of an all_reduce: a ring inside a node, a tree up and down between nodes."""
    return sum(
        summing * (s.members - 1) * s.latency_s if s.inside else 2 * math.log2(s.members) * s.tree_latency_s
        for s in stages
    )


def _tree_latency(level: Level) -> float:
    return level.tree_latency_s or level.latency_s


def _units_touched(unit: Ints) -> Ints:
    """[group]: the number of units that each group touches; `unit` [group, rank] ascends along each row."""
    changes: Ints = (np.diff(unit, axis=1) != 0).sum(axis=1, dtype=np.int64)
    return changes + 1


def _lies_evenly(unit: Ints) -> bool:
    """Return whether every group touches equally many units, each with equally many of its ranks."""
    spread = _units_touched(unit)
    pieces = int(spread[0])
    if np.any(spread != pieces) or unit.shape[1] % pieces:
        return False
    runs = unit.reshape(len(unit), pieces, -1)
    return bool(np.all(runs == runs[:, :, :1]))


def _busiest_unit_load(unit: Ints) -> tuple[int, int]:
    """Return what leaves the busiest unit: the number of rings (one for each group with ranks inside and outside), and of pieces of an
    all_to_all. A group of n with g ranks inside the unit sends g·(n-g) pieces of B/n² out of it.
    """
    size = unit.shape[1]
    at, inside = _list_pieces(unit)
    leaving = inside < size
    if not leaving.any():
        return 0, 0
    at, inside = at[leaving], inside[leaving]
    sent = np.bincount(at, weights=inside * (size - inside))
    return int(np.bincount(at).max()), int(sent.max())


def _list_pieces(unit: Ints) -> tuple[Ints, Ints]:
    """Return the unit of each piece, and how many ranks it has. A piece is what one group has in one unit; `unit` [group, rank] ascends
    along each row."""
    begins = np.ones(unit.shape, dtype=bool)
    begins[:, 1:] = np.diff(unit, axis=1) != 0
    starts = np.flatnonzero(begins)
    return unit.ravel()[starts], np.diff(starts, append=unit.size)
