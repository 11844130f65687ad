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
from planner_core.cost.communication.links import AxisLink, axis_links, volume_link
from planner_core.cost.communication.redistribution import Moves, Segments, decode, digit, moves
from planner_core.cost.communication.routes import Floats, leaving, route, sent

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
    "moves",
    "reductions",
    "ring_time_s",
    "route",
    "sent",
    "volume_link",
    "wire_bytes",
]
