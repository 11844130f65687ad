"""The cost of a plan with stages: each stage by itself, then how they fit together.

A stage's forward and backward take what `cost.step_time` says of its units, with the traffic that runs beside them in every micro-batch;
the traffic of once a step runs beside its first forward and its last backward. Between stages every GPU sends its own part of what the next
stage takes to the GPU of the same place there. A tensor that lies whole on several GPUs is sent by each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner_core.core import (
    Block,
    BlockPlan,
    Cost,
    Graph,
    Op,
    Pipeline,
    PipelineCost,
    R,
    SitePlan,
    StageCost,
)
from planner_core.cost.communication.collectives import collective_time
from planner_core.cost.communication.links import AxisLink, pipe_link
from planner_core.cost.compute import has_kernels, kernel_seconds
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import block_of, local_bytes, rows_at
from planner_core.cost.schedule.host import host_seconds
from planner_core.cost.schedule.pipeline.memory import fullest_rank, stage_memories
from planner_core.cost.schedule.pipeline.passes import tied_bytes
from planner_core.cost.schedule.pipeline.stages import (
    StagePlan,
    boundary_states,
    stage_plans,
)
from planner_core.cost.schedule.pipeline.timing import SPLIT, bound_s, schedule_seconds
from planner_core.cost.step import PricedUnit, price_units, sum_traffic, unit_totals
from planner_core.cost.step_messages import plan_messages
from planner_core.cost.step_time import Component, Floats
from planner_core.cost.units import Ends

SENT_IN_PARTS = "parts"
"""`Stack.boundary`: each tensor rank sends a part of what lies whole on all of them."""


def price_pipeline(
    blocks: Mapping[str, BlockPlan], graph: Graph, pipeline: Pipeline, model: CostModel, ends: Ends
) -> Cost:
    """Return the cost of one step of a plan with stages.

    Args:
        blocks: The plan of every block of the whole model, by label.
        graph: The whole model, with the global shapes of one micro-batch.
        pipeline: Where it is cut, and the order of work.
        model: The mesh of one rank of the pipeline, with the links as they are when all ranks are at work.
        ends: The operators before and behind all units of the whole model.

    Raises:
        InputError: The schedule cannot run this number of micro-batches, or plan and graph do not belong together.
    """
    stages = stage_plans(blocks, graph, pipeline)
    costs, memory_bytes = price_stages(stages, pipeline, model, ends)
    known_s = bound_s(pipeline, costs, model.workload.accumulate)
    return price_simulated(stages, costs, memory_bytes, pipeline, model, ends, known_s)


def price_simulated(
    stages: Sequence[StagePlan],
    costs: tuple[StageCost, ...],
    memory_bytes: dict[str, int],
    pipeline: Pipeline,
    model: CostModel,
    ends: Ends,
    known_s: float,
) -> Cost:
    """Return the cost of one step whose stages have been priced (`price_stages`), and which takes `known_s` at least (`bound_s`)."""
    m = model.workload.accumulate
    step_s, bubbles_s, waits = schedule_seconds(pipeline, costs, m)
    # A step has the parts of one rank: that with the most work, which has the least bubble.
    busiest = max(range(pipeline.ranks), key=lambda r: _busy_seconds(pipeline, costs, r, m))
    # Where bound and step are equal, or a rank is never idle, their sums are rounded in other orders.
    pipeline_cost = PipelineCost(costs, max(0.0, bubbles_s[busiest]), min(known_s, step_s))
    rank_stages = pipeline.stages_of(busiest)
    traffic = sum_traffic(
        (x for s in rank_stages for x in plan_messages(stages[s].blocks, stages[s].computed_graph, model)), model
    )
    units = [price_units(stages[s].blocks, stages[s].computed_graph, model, ends=ends) for s in rank_stages]
    compute = m * sum(u.copies * (u.forward_s + u.backward_s) for of_stage in units for u in of_stage)
    optimizer = sum(u.copies * u.optimizer_s for of_stage in units for u in of_stage)
    return Cost(
        step_time_s=step_s,
        compute_time_s=compute + waits,
        comm_time_s=sum(t.time_s for t in traffic),
        exposed_comm_time_s=max(0.0, step_s - compute - waits - optimizer - model.software.outside_s),
        optimizer_time_s=optimizer,
        outside_time_s=model.software.outside_s,
        host_wait_s=waits,
        traffic=traffic,
        memory_bytes=memory_bytes,
        pipeline=pipeline_cost,
    )


def price_stages(
    stages: Sequence[StagePlan], pipeline: Pipeline, model: CostModel, ends: Ends
) -> tuple[tuple[StageCost, ...], dict[str, int]]:
    """Return the seconds of each stage, and the memory of the fullest rank by kind: all of a price but the simulated step."""
    link = pipe_link(model.cluster, model.mesh, pipeline.axis)
    whole, peaks = fullest_rank(pipeline, stage_memories(stages, model), model)
    tied = tied_seconds(stages, model, link)
    plain = stage_costs(stages, model, ends, link, split=pipeline.schedule in SPLIT)
    costs = (
        replace(cost, step_s=cost.step_s + tied[k], peak_bytes=peaks[pipeline.rank_of(k)])
        for k, cost in enumerate(plain)
    )
    return tuple(costs), whole


def _busy_seconds(pipeline: Pipeline, costs: Sequence[StageCost], rank: int, micro_batches: int) -> float:
    return sum(micro_batches * (costs[s].forward_s + costs[s].backward_s) for s in pipeline.stages_of(rank))


def stage_costs(
    stages: Sequence[StagePlan], model: CostModel, ends: Ends, link: AxisLink, *, split: bool = False
) -> tuple[StageCost, ...]:
    """Return the seconds of each stage by itself. Stages that are alike are priced once. `split`: the gradients of weights are apart."""
    known: dict[object, StageCost] = {}
    units: dict[str, PricedUnit] = {}
    for number, stage in enumerate(stages):
        if stage.key not in known:
            known[stage.key] = _stage_cost(stages, number, model, ends, link, split, units)
    return tuple(known[stage.key] for stage in stages)


def _stage_cost(
    stages: Sequence[StagePlan],
    number: int,
    model: CostModel,
    ends: Ends,
    link: AxisLink,
    split: bool,
    known: dict[str, PricedUnit],
) -> StageCost:
    stage, num_bytes, gather_s = stages[number], *_sent_to_next_stage(stages, number, model)
    totals = [(u.copies, unit_totals(u, model)) for u in _units_of_stage(stage, model, ends, known)]
    forward, first = _phase_seconds(totals, model, Component.FORWARD, Component.FORWARD_TRAFFIC, Component.FORWARD_ONCE)
    backward, last = _phase_seconds(
        totals, model, Component.BACKWARD, Component.BACKWARD_TRAFFIC, Component.BACKWARD_ONCE
    )
    host = host_seconds(stage.blocks, stage.computed_graph, model)
    return StageCost(
        forward_s=forward,
        backward_s=backward,
        weight_s=_weight_seconds(stage, model) if split else 0.0,
        first_s=first,
        last_s=last,
        step_s=sum(n * float(t[Component.STEP]) for n, t in totals),
        # A `send_recv` of B bytes moves B / n per rank (cost.communication.collectives), so B is n times what one GPU sends.
        send_s=collective_time("send_recv", link.size * num_bytes, link)[0] + gather_s,
        send_bytes=num_bytes,
        peak_bytes=0,
        host_forward_s=host.forward,
        host_backward_s=host.backward,
        host_step_s=host.step,
    )


def _units_of_stage(stage: StagePlan, model: CostModel, ends: Ends, known: dict[str, PricedUnit]) -> list[PricedUnit]:
    """Return the priced units of a stage. `known`: those of repeated blocks from stages before, by label; it is added to."""
    # A label is the same block under the same plan in every stage, and stages differ in how many copies they have. Pricing a copy is most
    # of the work of pricing a stage. The top block has other operators in each stage.
    graph = stage.computed_graph
    new = {label: block for label, block in stage.blocks.items() if label not in known}
    priced = {unit.label: unit for unit in price_units(new, graph, model, ends=ends)}
    known.update((label, unit) for label, unit in priced.items() if label)
    return [
        replace(known[label], copies=len(block.prefixes), repeats=graph.num_repeats.get(block_of(graph, label).name, 1))
        if label
        else priced[label]
        for label, block in stage.blocks.items()
    ]


def _phase_seconds(
    totals: Sequence[tuple[int, Floats]], model: CostModel, compute: Component, traffic: Component, once: Component
) -> tuple[float, float]:
    """Return the seconds of a pass of every micro-batch, and what the one with the traffic of once a step takes more."""
    k, steady, edge = model.contention, 0.0, 0.0
    for copies, total in totals:
        a, b, c = (float(total[part]) for part in (compute, traffic, once))
        steady += copies * max(a + k * b, b)
        edge += copies * max(a + k * (b + c), b + c)
    return steady, edge - steady


def _sent_to_next_stage(stages: Sequence[StagePlan], number: int, model: CostModel) -> tuple[int, float]:
    """Return the bytes that one GPU sends to the next stage in one micro-batch, and the seconds in which parts of tensors are gathered
    there."""
    if number + 1 == len(stages):
        return 0, 0.0
    following = stages[number + 1]
    top, total, seconds = following.graph.top, 0, 0.0
    for v, state in boundary_states(following).items():
        whole = local_bytes(top, v, state.forward, model)
        parts = 1
        for axis, placement in enumerate(state.forward if model.software.boundary == SENT_IN_PARTS else ()):
            if placement == R and model.sizes[axis] > 1:
                # Each tensor rank sends its part of what lies whole on all of them; the receivers gather it over their own links.
                parts *= model.sizes[axis]
                seconds += collective_time("all_gather", whole, model.links[axis])[0]
        total += whole // parts
    return total, seconds


def tied_seconds(stages: Sequence[StagePlan], model: CostModel, link: AxisLink) -> dict[int, float]:
    """Return the seconds once a step to sum the gradients of weights that stages on different ranks share, by stage."""
    seconds_by_stage = dict.fromkeys(range(len(stages)), 0.0)
    for users, num_bytes in tied_bytes(stages, model):
        seconds = collective_time("all_reduce", num_bytes, replace(link, size=len(users), stages=()))[0]
        for stage in users:
            seconds_by_stage[stage] += seconds
    return seconds_by_stage


# --- backward in two parts -------------------------------------------------------------------------------


def _weight_seconds(stage: StagePlan, model: CostModel) -> float:
    """Return the seconds of a micro-batch's backward that make the gradients of weights: the kernels that are not needed for the operands'
    own."""
    total = 0.0
    for label, plan in stage.blocks.items():
        block = block_of(stage.computed_graph, label)
        one = sum(
            _weight_gradient_seconds(block, op, plan.sites[op.name], model) for op in block.ops if has_kernels(op)
        )
        total += len(plan.prefixes) * one
    return total * model.slowdown


def _weight_gradient_seconds(block: Block, op: Op, site: SitePlan, model: CostModel) -> float:
    weights = {v for v in op.inputs if block.values[v].kind == "parameter" and block.values[v].grad}
    if not weights:
        return 0.0
    # With frozen weights the operator makes the gradients of its operands alone, so the difference is what its weights' take.
    frozen = [replace(v, grad=False) if i in weights else v for i, v in enumerate(block.values)]
    rows = rows_at(block, op, site)
    return kernel_seconds(op, block.values, rows, model)[1] - kernel_seconds(op, frozen, rows, model)[1]
