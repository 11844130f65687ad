"""What a collective moves and how long it takes on one mesh axis of one cluster.

`bytes` is always B, the full (unsharded along that axis) tensor on one rank; n is the size of the axis.

    wire bytes per rank   all_gather, reduce_scatter (n-1)/n·B    all_reduce 2(n-1)/n·B    all_to_all (n-1)/n²·B
    time                  launches + latency steps + wire bytes / effective bandwidth, of the cheapest algorithm

Every algorithm is a line `fixed_s + B · s_per_byte` (`algorithms`); the cheapest line wins. All groups of an
axis run at once and share the links: a level's bandwidth is divided by the rings that cross one of its
units (TAPS). More bandwidth or less latency never makes a collective slower, since each line only falls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner_core.cost.communication.links import AxisLink

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Array: TypeAlias = NDArray[np.float64]


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


def _depth(members: int) -> int:
    """Height of a binary tree over `members` leaves."""
    return (members - 1).bit_length()


def _check(kind: str, n: int) -> None:
    if kind not in KINDS or n < 1:
        raise ValueError(
            f"{kind!r} over {n} ranks is not a collective; kinds are {', '.join(KINDS)}, over 1 or more ranks"
        )
