"""What a collective moves and how long it takes on one mesh axis of one cluster.

`bytes` is always B, the full (unsharded along that axis) tensor on one rank; n is the size of the axis.

    wire bytes per rank   all_gather, reduce_scatter (n-1)/n·B    all_reduce 2(n-1)/n·B    all_to_all (n-1)/n²·B
    time                  launches + latency steps + wire bytes / effective bandwidth, of the cheapest algorithm

Every algorithm is a line `fixed_s + B · s_per_byte` (`algorithms`); the cheapest line wins. All groups of an
axis run at once and share the links: a level's bandwidth is divided by the rings that cross one of its
units (TAPS). More bandwidth or less latency never makes a collective slower, since each line only falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner_core.core.cluster import Cluster
from planner_core.core.errors import InputError
from planner_core.core.mesh import DeviceMesh

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Array: TypeAlias = NDArray[np.float64]
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


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Seconds of one collective = fixed_s + B · s_per_byte."""

    name: str
    fixed_s: float
    s_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Time for a tensor of `num_bytes`."""
        return self.fixed_s + num_bytes * self.s_per_byte


def wire_bytes(kind: str, num_bytes: int, n: int) -> int:
    """Bytes that one of n ranks sends for a full tensor of `num_bytes`, by the ring formulas, rounded down.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005):
    all_gather and reduce_scatter send n-1 pieces of B/n, all_reduce both, all_to_all n-1 pieces of B/n².
    """
    _check(kind, n)
    factor = {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1, "all_to_all": n - 1}[kind]
    return factor * num_bytes // (n * n if kind == "all_to_all" else n)


def collective_time(kind: str, num_bytes: float, link: AxisLink) -> tuple[float, str]:
    """Seconds and the name of the cheapest algorithm (`ring`, `tree`, `hierarchical`, `pairwise`; `none` if nothing moves)."""
    if num_bytes <= 0 or link.size == 1:
        _check(kind, link.size)
        return 0.0, "none"
    best = min(algorithms(kind, link), key=lambda algorithm: algorithm.seconds(num_bytes))
    return best.seconds(num_bytes), best.name


def collective_times(kind: str, num_bytes: NDArray[np.generic], link: AxisLink) -> Array:
    """`collective_time` of many sizes at once: seconds, shaped like `num_bytes`."""
    size = np.asarray(num_bytes, dtype=np.float64)
    if link.size == 1:
        _check(kind, link.size)
        return np.zeros_like(size)
    lines = [a.fixed_s + size * a.s_per_byte for a in algorithms(kind, link)]
    return np.where(size > 0, np.minimum.reduce(lines), 0.0)


@lru_cache(maxsize=4096)
def algorithms(kind: str, link: AxisLink) -> tuple[Algorithm, ...]:
    """Every way to run `kind` on an axis of two or more ranks; the simplest first, so that it wins ties."""
    _check(kind, link.size)
    if kind == "all_to_all":
        return (_pairwise(link),)
    found = [_ring(kind, link)]
    if kind == "all_reduce":
        found.append(_tree(link))
    if len(link.stages) > 1:
        found.append(_hierarchical(kind, link))
    return tuple(found)


def _ring(kind: str, link: AxisLink) -> Algorithm:
    """Flat ring: n-1 steps of B/n (all_reduce: 2(n-1)), each as slow as the slowest hop.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009);
    across nodes, 2(mk-1)/(mk)·n / min(B_intra, B_node/r) (TAPS).
    """
    steps = (link.size - 1) * (2 if kind == "all_reduce" else 1)
    return Algorithm("ring", link.launch_s + steps * link.latency_s, steps / link.size / link.bytes_per_s)


def _tree(link: AxisLink) -> Algorithm:
    """Two complementary binary trees, reduce up and broadcast down, pipelined: 2·depth latencies, 2·B sent per rank.

    Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009),
    which NCCL uses since 2.4. The depth is log2 of the members, level by level where the groups lie evenly.
    """
    rise = sum(_depth(stage.members) * stage.latency_s for stage in link.stages)
    return Algorithm("tree", link.launch_s + 2 * (rise or _depth(link.size) * link.latency_s), 2 / link.bytes_per_s)


def _hierarchical(kind: str, link: AxisLink) -> Algorithm:
    """Ring by ring, level by level: reduce_scatter inside, all_reduce across, all_gather inside.

    Source: TAPS, 2(m-1)/m·B/B_intra + 2(k-1)/k·B/B_node, where the m rings of B/m across nodes share the node's
    uplinks. all_gather and reduce_scatter are its halves. Each ring is a kernel of its own, so each pays a launch.
    """
    fixed, per_byte, inside = 0.0, 0.0, 1
    for stage in link.stages:
        fixed += (stage.members - 1) * stage.latency_s
        per_byte += (stage.members - 1) / stage.members / inside / stage.bytes_per_s
        inside *= stage.members
    if kind != "all_reduce":
        return Algorithm("hierarchical", len(link.stages) * link.launch_s + fixed, per_byte)
    return Algorithm("hierarchical", (2 * len(link.stages) - 1) * link.launch_s + 2 * fixed, 2 * per_byte)


def _pairwise(link: AxisLink) -> Algorithm:
    """Every rank sends B/n² to each other rank; every level carries what leaves its units, and the slowest level counts.

    Source: pairwise exchange of Thakur et al. (2005), n-1 steps; on one level this is (n-1)/n²·B / bandwidth.
    """
    fixed = (link.size - 1) * link.latency_s
    if link.stages:  # peers inside a unit are reached at its own latency
        fixed, inside = 0.0, 1
        for stage in link.stages:
            fixed += (stage.members - 1) * inside * stage.latency_s
            inside *= stage.members
    return Algorithm("pairwise", link.launch_s + fixed, link.exchange_s_per_byte)


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


def _depth(members: int) -> int:
    """Height of a binary tree over `members` leaves."""
    return (members - 1).bit_length()


def _check(kind: str, n: int) -> None:
    if kind not in KINDS or n < 1:
        raise ValueError(
            f"{kind!r} over {n} ranks is not a collective; kinds are {', '.join(KINDS)}, over 1 or more ranks"
        )
