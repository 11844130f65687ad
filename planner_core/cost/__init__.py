"""What a plan takes: time, traffic and memory of one training step."""

from planner_core.cost.chunk_overlap import overlap
from planner_core.cost.model import CostModel, cost_model
from planner_core.cost.resolved_ops import local_bytes, split_parts
from planner_core.cost.step import (
    WAIT,
    Message,
    WeightTraffic,
    block_of,
    exposed,
    message_time,
    messages,
    op_seconds,
    price,
    recomputed,
    touch_time,
    weight_traffic,
)

__all__ = [
    "WAIT",
    "CostModel",
    "Message",
    "WeightTraffic",
    "block_of",
    "cost_model",
    "exposed",
    "local_bytes",
    "message_time",
    "messages",
    "op_seconds",
    "overlap",
    "price",
    "recomputed",
    "split_parts",
    "touch_time",
    "weight_traffic",
]
