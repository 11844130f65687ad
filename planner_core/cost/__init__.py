"""The cost of a plan: time, traffic and memory of one training step (docs/COST_MODEL.md has every formula).

compute/        seconds of one operator on one GPU, and of the optimizer
communication/  links, collectives, redistributions
memory/         the memory of one GPU, simulated along forward and backward
roles           what the mesh axes of a plan are for
step_time       the form of the step's time, which the search minimises
step            the cost of a finished plan
schedule/       the order of one rank's work: its events, its simulation, what of its traffic is exposed
"""

from planner_core.cost.compute import check_offload, optimizer_bytes
from planner_core.cost.model import SMALL_BYTES, CostModel, cost_model, cost_model_of, searched_stages
from planner_core.cost.resolved_ops import block_of, local_bytes, split_parts
from planner_core.cost.roles import (
    CONTEXT,
    DATA,
    EXPERT,
    IDLE,
    SHARD,
    TENSOR,
    axis_roles,
    micro_batch,
    named_mesh,
    weight_roles,
    zero_stage,
)
from planner_core.cost.schedule import (
    CONTENTION,
    ENDS,
    NOT_HIDDEN,
    WAITED,
    Event,
    Exposed,
    beyond_compute,
    cuttable,
    exposed_parts,
    in_chunks,
    scheduled,
    seconds_in_chunks,
    simulated,
    weight_traffic,
)
from planner_core.cost.step import (
    Unit,
    all_seconds,
    op_seconds,
    price,
    step_seconds,
    touch_time,
    unit_totals,
    units_of,
    weight_seconds,
)
from planner_core.cost.step_messages import (
    BESIDE,
    ONCE,
    WAIT,
    Message,
    message_time,
    message_waits,
    messages,
    recomputed,
)
from planner_core.cost.step_time import (
    NUM_COMPONENTS,
    Component,
    CostVector,
    Shares,
    StepTime,
    chunk_waits,
    waited_seconds,
)
from planner_core.cost.units import Buckets, Ends, is_small, ops_at_the_ends, weights_at_the_ends

__all__ = [
    "BESIDE",
    "CONTENTION",
    "CONTEXT",
    "DATA",
    "ENDS",
    "EXPERT",
    "IDLE",
    "NOT_HIDDEN",
    "NUM_COMPONENTS",
    "ONCE",
    "SHARD",
    "SMALL_BYTES",
    "TENSOR",
    "WAIT",
    "WAITED",
    "Buckets",
    "Component",
    "CostModel",
    "CostVector",
    "Ends",
    "Event",
    "Exposed",
    "Message",
    "Shares",
    "StepTime",
    "Unit",
    "all_seconds",
    "axis_roles",
    "beyond_compute",
    "block_of",
    "check_offload",
    "chunk_waits",
    "cost_model",
    "cost_model_of",
    "cuttable",
    "exposed_parts",
    "in_chunks",
    "is_small",
    "local_bytes",
    "message_time",
    "message_waits",
    "messages",
    "micro_batch",
    "named_mesh",
    "op_seconds",
    "ops_at_the_ends",
    "optimizer_bytes",
    "price",
    "recomputed",
    "scheduled",
    "searched_stages",
    "seconds_in_chunks",
    "simulated",
    "split_parts",
    "step_seconds",
    "touch_time",
    "unit_totals",
    "units_of",
    "waited_seconds",
    "weight_roles",
    "weight_seconds",
    "weight_traffic",
    "weights_at_the_ends",
    "zero_stage",
]  # fmt: skip
