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
from planner_core.cost.communication.links import AxisLink, axis_links, pipe_link, rank_links, volume_link, whole_mesh
from planner_core.cost.communication.redistribution import (
    Redistributions,
    Segments,
    all_redistributions,
    decode,
    placement_code,
)
from planner_core.cost.communication.routes import (
    Floats,
    bytes_between_gpus,
    bytes_leaving_units,
    gpus_of_ranks,
    links_of,
    route,
    sent_per_gpu,
)

__all__ = [
    "AxisLink",
    "Floats",
    "LayerMatrix",
    "Redistributions",
    "Segments",
    "algorithms",
    "all_redistributions",
    "axis_links",
    "best_mesh",
    "bracket",
    "bytes_between_gpus",
    "bytes_leaving_units",
    "chunk_timeline",
    "collective_time",
    "collective_times",
    "decode",
    "gpus_of_ranks",
    "layer_wire_bytes",
    "links_of",
    "pipe_link",
    "placement_code",
    "rank_links",
    "reductions",
    "ring_time_s",
    "route",
    "sent_per_gpu",
    "volume_link",
    "whole_mesh",
    "wire_bytes",
]
