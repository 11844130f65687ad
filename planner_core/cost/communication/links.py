"""The links that the groups of a mesh axis cross, and how many groups share each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner_core.core import Cluster, DeviceMesh, InputError

_Ranks: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a group that lies on one level: `members` child units, and what one rank gets when all send at once.

    `bytes_per_s` is the share of one GPU of the uplinks of every unit it must leave to get there.
    """

    level: str
    members: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class AxisLink:
    """One mesh axis on one cluster, as its groups see it when all of them run at once.

    `levels` are the names of the levels that the groups cross, innermost first. `bytes_per_s` and
    `latency_s` hold for one flat ring: the slowest link share on its way, and its slowest hop.
    `exchange_s_per_byte` is the time of an all_to_all per byte of B. `stages` has one entry per crossed
    level where every group lies evenly on the levels, and is empty where groups straddle units unevenly.
    `launch_s` is the floor of any kernel, from the GPU's file.
    """

    size: int
    levels: tuple[str, ...] = ()
    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    exchange_s_per_byte: float = 0.0
    stages: tuple[Stage, ...] = ()
    launch_s: float = 0.0

    @property
    def members(self) -> tuple[int, ...]:
        """Child units per crossed level; their product is `size` where the groups lie evenly."""
        return tuple(stage.members for stage in self.stages)


@lru_cache(maxsize=1024)
def volume_link(size: int) -> AxisLink:
    """A link on which only volume counts: one byte costs the same on every axis, and no message waits.

    What a planner that knows no topology believes (TAP); one GB/s, so that seconds read as gigabytes.
    """
    stage = Stage("volume", size, 1e9, 0.0)
    return AxisLink(size, ("volume",), 1e9, 0.0, (size - 1) / size**2 / 1e9, (stage,), 0.0)


def axis_links(cluster: Cluster, mesh: DeviceMesh) -> tuple[AxisLink, ...]:
    """One link per mesh axis; ranks are row-major, so the last axis is adjacent GPUs. Raises InputError on a wrong size."""
    if mesh.num_devices != cluster.num_gpus:
        raise InputError(
            f"mesh {mesh} has {mesh.num_devices} devices but {cluster.name} has {cluster.num_gpus} GPUs; "
            f"sizes must multiply to {cluster.num_gpus}"
        )
    return tuple(_axis_link(cluster, mesh.axis_sizes[axis], mesh.stride(axis)) for axis in range(len(mesh.axis_sizes)))


def _axis_link(cluster: Cluster, size: int, stride: int) -> AxisLink:
    if size == 1:
        return AxisLink(1)
    ranks = np.arange(cluster.num_gpus, dtype=np.int64).reshape(-1, size, stride)
    groups = ranks.swapaxes(1, 2).reshape(-1, size)  # [number of groups, size], ascending in each row
    units = [groups // cluster.unit_gpus(i) for i in range(len(cluster.levels) + 1)]
    crossed = [i for i in range(len(cluster.levels)) if np.any(_spread(units[i]) > _spread(units[i + 1]))]
    ring, exchange = math.inf, 0.0
    for i, level in enumerate(cluster.levels):
        rings, sent = _load(units[i])
        if rings:
            ring = min(ring, level.bytes_per_s / rings)
            exchange = max(exchange, sent / size**2 / level.bytes_per_s)
    return AxisLink(
        size, tuple(cluster.levels[i].name for i in crossed), ring, max(cluster.levels[i].latency_s for i in crossed),
        exchange, _stages(cluster, units, crossed), cluster.gpu.launch_s,
    )  # fmt: skip


def _stages(cluster: Cluster, units: list[_Ranks], crossed: list[int]) -> tuple[Stage, ...]:
    """One stage per crossed level, or none where some group lies unevenly."""
    if not all(_even(unit) for unit in units):
        return ()
    share = [level.bytes_per_s / cluster.unit_gpus(i) for i, level in enumerate(cluster.levels)]
    spread = [int(_spread(unit)[0]) for unit in units]
    return tuple(
        Stage(cluster.levels[i].name, spread[i] // spread[i + 1], min(share[: i + 1]), cluster.levels[i].latency_s)
        for i in crossed
    )


def _spread(unit: _Ranks) -> _Ranks:
    """How many units each group touches; `unit` [groups, size] ascends along each row."""
    changes: _Ranks = (np.diff(unit, axis=1) != 0).sum(axis=1, dtype=np.int64)
    return changes + 1


def _even(unit: _Ranks) -> bool:
    """Whether every group touches equally many units, each with equally many of its ranks."""
    spread = _spread(unit)
    pieces = int(spread[0])
    if np.any(spread != pieces) or unit.shape[1] % pieces:
        return False
    runs = unit.reshape(len(unit), pieces, -1)
    return bool(np.all(runs == runs[:, :, :1]))


def _load(unit: _Ranks) -> tuple[int, int]:
    """What leaves the busiest unit: rings (one for each group with ranks inside and outside), and all_to_all pieces.

    A group of n with g ranks inside sends g·(n-g) pieces of B/n² out of the unit.
    """
    number, size = unit.shape
    keys = np.arange(number)[:, None] * (int(unit.max()) + 1) + unit
    pairs, inside = np.unique(keys, return_counts=True)
    leaving = inside < size
    if not leaving.any():
        return 0, 0
    at = pairs[leaving] % (int(unit.max()) + 1)
    sent = np.bincount(at, weights=inside[leaving] * (size - inside[leaving]))
    return int(np.bincount(at).max()), int(sent.max())
