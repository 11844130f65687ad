"""Collectives on the links of a cluster: routes, times, redistributions."""

from planner_core.cost.communication.atp import (
    LayerMatrix,
    chunk_timeline,
    reductions,
)
from planner_core.cost.communication.collectives import algorithms, collective_time, collective_times, wire_bytes
from planner_core.cost.communication.links import (
    VOLUME_RATE,
    AxisLink,
    axis_links,
    pipe_link,
    rank_links,
    volume_link,
)
from planner_core.cost.communication.redistribution import (
    Redistributions,
    Segments,
    all_redistributions,
    decode,
    placement_code,
)
from planner_core.cost.communication.routes import bytes_between_gpus, gpus_of_ranks, sent_per_gpu
