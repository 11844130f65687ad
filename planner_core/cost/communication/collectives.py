"""What a collective moves and how long it takes on one mesh axis of one cluster.

`bytes` is always B, the full (unsharded along that axis) tensor on one rank; n is the size of the axis.

    wire bytes per rank   all_gather, reduce_scatter (n-1)/n·B    all_reduce 2(n-1)/n·B    all_to_all (n-1)/n²·B    send_recv B/n
    time                  a + x + curve · sqrt(a · x)

`a` is the latency of the launch and of all hops. `x` is the transfer: the bytes on the slowest link over the link's rate. Links
inside and between nodes are busy at once, so the slower of the two counts. The term with the root stands for NCCL's protocols
for medium sizes (LL and LL128). With it, the median error is 5 to 6 % on nccl-tests of one node from 512 bytes to 512 MiB;
without it, 11 % (`tests/cost/test_measured.py`). All groups of an axis run at once and share the links. The bandwidth of a
level is divided by the number of rings that cross one of its units (TAPS). Time grows with bytes and latency and falls with
bandwidth, since every term does.

Example: an all_gather of B = 64 MB on 8 GPUs with 400 GB/s sends 7/8 · 64 = 56 MB per rank, so x = 140 us. With a = 20 us and
curve = 0.5 the time is 20 + 140 + 0.5 · sqrt(20 · 140) = 186 us.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from planner_core.core import CollectiveKind
from planner_core.cost.communication.links import AxisLink
from planner_core.cost.step_time import Floats

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Seconds of one collective of B bytes: fixed_s + x + curve · sqrt(fixed_s · x), x = B · s_per_byte."""

    name: str
    fixed_s: float
    s_per_byte: float
    curve: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Time for a tensor of `num_bytes`."""
        return float(self.times(np.float64(num_bytes)))

    def times(self, num_bytes: Floats | np.float64) -> Floats:
        """Times for tensors of `num_bytes`, shaped like them."""
        transfer = num_bytes * self.s_per_byte
        return np.asarray(self.fixed_s + transfer + self.curve * np.sqrt(self.fixed_s * transfer))


def wire_bytes(kind: CollectiveKind, num_bytes: int, n: int) -> int:
    """Return the bytes that one of n ranks sends for a full tensor of `num_bytes`, by the ring formulas, rounded down.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005):
    all_gather and reduce_scatter send n-1 pieces of B/n, all_reduce both, all_to_all n-1 pieces of B/n². In a send_recv each rank
    sends its part to the next one.
    """
    _check_collective(kind, n)
    if kind == "send_recv":
        return num_bytes // n if n > 1 else 0
    factor = {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1, "all_to_all": n - 1}[kind]
    return factor * num_bytes // (n * n if kind == "all_to_all" else n)


def collective_time(kind: CollectiveKind, num_bytes: float, link: AxisLink, share: float = 1.0) -> tuple[float, str]:
    """Return the seconds of one collective, and the name of the cheapest algorithm (`ring`, `hierarchical`, `pairwise`; `none` if nothing
    moves). If the tensor is only a `share` of one message, it gets that share of the message's time."""
    if num_bytes <= 0 or link.size == 1:
        _check_collective(kind, link.size)
        return 0.0, "none"
    best = min(algorithms(kind, link), key=lambda algorithm: algorithm.seconds(num_bytes))
    return share * best.seconds(num_bytes / share), best.name


def collective_times(
    kind: CollectiveKind, num_bytes: NDArray[np.generic], link: AxisLink, share: float = 1.0
) -> Floats:
    """`collective_time` of many sizes at once: seconds, with the shape of `num_bytes`."""
    size = np.asarray(num_bytes, dtype=np.float64)
    if link.size == 1 or not share:  # a weight without entries has no share of a message
        _check_collective(kind, link.size)
        return np.zeros_like(size)
    seconds = [share * a.times(np.maximum(size / share, 0.0)) for a in algorithms(kind, link)]
    return np.where(size > 0, np.minimum.reduce(seconds), 0.0)


@lru_cache(maxsize=4096)
def algorithms(kind: CollectiveKind, link: AxisLink) -> tuple[Algorithm, ...]:
    """Return every way to run `kind` on an axis of two or more ranks, as NCCL does."""
    _check_collective(kind, link.size)
    if kind == "all_to_all":
        return (_pairwise(link),)
    if kind == "all_reduce":
        return (_all_reduce(link),)
    if kind == "send_recv":
        return (_send_recv(link),)
    return (_ring(link),)


def _ring(link: AxisLink) -> Algorithm:
    """all_gather, reduce_scatter: a flat ring through all nodes, n-1 pieces of B/n over its slowest link.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009);
    across nodes, (n-1)/n·B / min(B_intra, B_node/r) (TAPS). The hops of each level have that level's latency. So a further
    level whose hops are not faster never makes the ring faster.
    """
    transfer = (link.size - 1) / link.size / link.bytes_per_s
    return Algorithm("ring", link.launch_s + link.ring_s, transfer, link.curve)


def _all_reduce(link: AxisLink) -> Algorithm:
    """all_reduce: a ring inside the node, and 1/m of the tensor per rank between the nodes, all levels at once.

    Source: TAPS, 2(m-1)/m·B/B_intra and 2(k-1)/k·B/m over B_node/m. NCCL pipelines the two, so the slower one counts and not
    their sum. Between nodes the data goes up and down a tree (Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth
    broadcast, reduction and scan", 2009). If the switch adds the terms, the transfer inside is multiplied by `in_switch`. Groups
    that lie unevenly on nodes run one flat ring.
    """
    fixed = link.summing * link.launch_s
    if not link.stages:
        return Algorithm("ring", fixed + link.sum_s, 2 * (link.size - 1) / link.size / link.bytes_per_s, link.curve)
    # Example: 4 nodes of 8, B bytes. Inside a node each rank sends 2 · 7/8 B. It is left with the sum of B/8, of which 2 · 3/4 · B/8 leave
    # its node; `stage.bytes_per_s` is the rate of one GPU there, so the node's own rate is not divided once more.
    transfer, inside = 0.0, 1
    for stage in link.stages:
        members = stage.members if stage.inside else link.size // inside  # what leaves a node goes to all other nodes
        share = 2 * (members - 1) / members / inside * (link.in_switch if stage.inside else 1.0)
        transfer, inside = max(transfer, share / stage.bytes_per_s), inside * stage.members
    name = "ring" if len(link.stages) == 1 else "hierarchical"
    return Algorithm(name, fixed + link.sum_s, transfer, link.curve)


def _pairwise(link: AxisLink) -> Algorithm:
    """Return the pairwise exchange: every rank sends B/n² to each other rank, all at once. The slowest level of links counts, by the bytes
    that leave its units.

    Source: pairwise exchange of Thakur et al. (2005). On one level this is (n-1)/n²·B / bandwidth. The exchanges are started
    together, so there is one latency and not n-1.
    """
    return Algorithm("pairwise", link.launch_s + link.exchange_s, link.exchange_s_per_byte, link.curve)


def _send_recv(link: AxisLink) -> Algorithm:
    """send_recv: every rank sends B/n to the next rank around the axis. The slowest hop counts, at the rate that one GPU gets of it: a
    GPU sends through its own network card, and not, like a ring of NCCL, through all cards of its node."""
    return Algorithm("ring", link.launch_s + link.latency_s, 1 / link.size / link.send_bytes_per_s, link.curve)


def _check_collective(kind: CollectiveKind, n: int) -> None:
    if kind not in COLLECTIVE_KINDS or n < 1:
        raise ValueError(
            f"{kind!r} over {n} ranks is not a collective; kinds are {', '.join(COLLECTIVE_KINDS)}, over 1 or more ranks"
        )
