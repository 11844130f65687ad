"""The schedule: the order of one rank's work in a step, and what follows from it.

units           the parts of a forward pass, and the buckets of their weights and gradients
events          what a rank issues and waits for, in order
pass_work       what one pass through a unit computes and waits for, in order
simulation      the seconds of that order, on two streams
timed           the same step piece by piece, each with its time
host            how long the GPU waits for the host that issues its kernels
exposed         the parts of a step's exposed communication, by the form that the search minimises
chunks          products in parts, each summed over GPUs beside the next (ATP)
pipeline/       stages on groups of GPUs, one behind the other
"""

from planner_core.cost.schedule.chunks import can_run_in_chunks, in_chunks, seconds_in_chunks
from planner_core.cost.schedule.events import Event, schedule_events
from planner_core.cost.schedule.exposed import (
    Cause,
    exposed_parts,
)
from planner_core.cost.schedule.host import (
    bound_host_seconds,
    host_seconds,
    least_host_seconds,
    price_with_host,
    seconds_waited_for_host,
)
from planner_core.cost.schedule.pass_work import WorkKind
from planner_core.cost.schedule.pipeline import (
    Pass,
    PipelineTime,
    RankWork,
    Span,
    bound_s,
    boundary_states,
    check_micro_batches,
    closed_form_by_rank,
    even_copies,
    in_flight,
    in_flight_at_once,
    least_boundary_bytes,
    price_pipeline,
    price_simulated,
    price_stages,
    rank_orders,
    schedule_ranks,
    simulated_pipeline,
    stage_costs,
    stage_memories,
    stage_plans,
    tied_seconds,
    with_parts,
    without_copies_of_inputs,
)
from planner_core.cost.schedule.simulation import simulate_step
from planner_core.cost.schedule.timed import TimedWork, list_timed_work
from planner_core.cost.schedule.units import BucketStage, Moved, ScheduledUnit, schedule_units
