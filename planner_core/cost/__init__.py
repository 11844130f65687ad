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
from planner_core.cost.compute.as_run import attentions_by_kernel, graph_as_run, keeps_other_tensors
from planner_core.cost.compute.sdpa import MATH, why_math
from planner_core.cost.model import (
    SMALL_BYTES,
    CostModel,
    cost_model,
    cost_model_of,
    pipe_link,
    whole_mesh,
)
from planner_core.cost.resolved_ops import block_of, split_parts
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
    BucketStage,
    Cause,
    Event,
    Moved,
    Pass,
    PipelineTime,
    RankWork,
    ScheduledUnit,
    Span,
    TimedWork,
    WorkKind,
    bound_host_seconds,
    bound_s,
    boundary_states,
    can_run_in_chunks,
    check_micro_batches,
    closed_form_by_rank,
    even_copies,
    exposed_parts,
    host_seconds,
    in_chunks,
    in_flight,
    in_flight_at_once,
    least_boundary_bytes,
    least_host_seconds,
    list_timed_work,
    price_pipeline,
    price_simulated,
    price_stages,
    price_with_host,
    rank_orders,
    schedule_events,
    schedule_ranks,
    schedule_units,
    seconds_in_chunks,
    seconds_waited_for_host,
    simulate_step,
    simulated_pipeline,
    stage_costs,
    stage_memories,
    stage_plans,
    tied_seconds,
    with_parts,
    without_copies_of_inputs,
)
from planner_core.cost.step import (
    PricedUnit,
    conversion_seconds,
    op_seconds,
    price,
    price_units,
    step_seconds,
    unit_totals,
    weight_seconds,
)
from planner_core.cost.step_messages import (
    Message,
    MessageSource,
    message_time,
    plan_messages,
    recomputed_ops,
    waited_message_seconds,
)
from planner_core.cost.step_time import (
    NUM_COMPONENTS,
    Bools,
    Component,
    CostVector,
    Floats,
    Ints,
    Shares,
    StepTime,
    chunk_waits,
    waited_seconds,
)
from planner_core.cost.units import Buckets, Ends, is_small, ops_at_the_ends, unit_starts, weights_at_the_ends
