"""Collectives on the links of a cluster: routes, times, redistributions."""

from planner_core.cost.communication.atp import (
    LayerMatrix,
    best_mesh,
    bracket,
    chunk_timeline,
    layer_wire_bytes,
    reductions,
    ring_time_s,
)
from planner_core.cost.communication.collectives import algorithms, collective_time, collective_times, wire_bytes
from planner_core.cost.communication.links import AxisLink, axis_links, rank_links, volume_link, whole_mesh
from planner_core.cost.communication.redistribution import Moves, Segments, decode, digit, moves
from planner_core.cost.communication.routes import Floats, leaving, links_of, route, sent, sent_per_gpu

__all__ = [
    "AxisLink",
    "Floats",
    "LayerMatrix",
    "Moves",
    "Segments",
    "algorithms",
    "axis_links",
    "best_mesh",
    "bracket",
    "chunk_timeline",
    "collective_time",
    "collective_times",
    "decode",
    "digit",
    "layer_wire_bytes",
    "leaving",
    "links_of",
    "moves",
    "rank_links",
    "reductions",
    "ring_time_s",
    "route",
    "sent",
    "sent_per_gpu",
    "volume_link",
    "whole_mesh",
    "wire_bytes",
]
