"""Times of the standard cluster's collectives, written anew from the constants in the H100's data file."""

from __future__ import annotations

import json
import math

from planner_core.core import ASSETS

H100 = json.loads((ASSETS / "hardware/h100-sxm.json").read_text(encoding="utf-8"))
FITTED = H100["collectives"]
NVLINK = 450e9 * FITTED["efficiency"]
NETWORK = 50e9 * FITTED["outer_efficiency"]
"""Bytes per second of one H100 of the standard cluster, inside its node and to other nodes."""


def took_s(fixed_s: float, transfer_s: float) -> float:
    """Return a collective of the standard cluster's H100: latency, transfer, and the protocols between."""
    return fixed_s + transfer_s + FITTED["curve"] * math.sqrt(fixed_s * transfer_s)


def inside_s(size: float, n: int, sums: bool = True) -> float:
    """Return an all_reduce (else one half of it) of `size` bytes on n neighbours of a node."""
    rate = NVLINK * (1 - FITTED["few"] / n)
    once = FITTED["base_s"] + (n - 1) * FITTED["hop_s"]
    if not sums:
        return took_s(once, (n - 1) / n * size / rate)
    switch = FITTED["in_switch"] if n >= 8 else 1
    return took_s(FITTED["summing"] * once, switch * 2 * (n - 1) / n * size / rate)


def across_s(size: float, nodes: int) -> float:
    """Return an all_reduce of `size` bytes of one GPU of each node with its likes, all groups at once: up a tree and down."""
    fixed = FITTED["summing"] * FITTED["base_s"] + 2 * math.log2(nodes) * FITTED["tree_hop_s"]
    return took_s(fixed, 2 * (nodes - 1) / nodes * size / NETWORK)


def turn_s(size: float, nodes: int, per_node: int = 8) -> float:
    """Return an all_gather or reduce_scatter of `size` bytes over all GPUs of several nodes: one ring through all of them."""
    n = nodes * per_node
    inside, out = NVLINK * (1 - FITTED["few"] / per_node), per_node * NETWORK
    hops = (n - nodes) * FITTED["hop_s"] + nodes * FITTED["ring_hop_s"]
    return took_s(FITTED["base_s"] + hops, (n - 1) / n * size / min(inside, out))
