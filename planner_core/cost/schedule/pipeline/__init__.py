"""Pipeline stages: ranges of the model's copies on groups of GPUs, one behind the other.

orders     what each rank runs in which order, by schedule
stages     a stage as a model of its own
received   what a block does not copy where it comes from another stage
passes     what a rank issues, pass by pass
timing     the seconds of a step, event by event, and the closed form below it
memory     what a rank holds, with the micro-batches that are in flight
price      the cost of a plan with stages
"""

from planner_core.cost.schedule.pipeline.memory import stage_memories
from planner_core.cost.schedule.pipeline.orders import (
    Order,
    Pass,
    check_micro_batches,
    in_flight,
    in_flight_at_once,
    rank_orders,
    steady_orders,
)
from planner_core.cost.schedule.pipeline.passes import RankWork, schedule_ranks
from planner_core.cost.schedule.pipeline.price import (
    price_pipeline,
    price_simulated,
    price_stages,
    stage_costs,
    tied_seconds,
)
from planner_core.cost.schedule.pipeline.received import without_copies_of_inputs
from planner_core.cost.schedule.pipeline.stages import (
    StagePlan,
    boundary_states,
    even_copies,
    least_boundary_bytes,
    stage_plans,
    tied_weights,
    with_parts,
)
from planner_core.cost.schedule.pipeline.timing import (
    PipelineTime,
    Span,
    bound_s,
    closed_form_by_rank,
    simulated_pipeline,
)
