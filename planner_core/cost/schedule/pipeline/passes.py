"""What a rank of a pipeline issues in a step, pass by pass: the collectives inside its stages and the messages between stages.

A run's record is compared with it. Between stages every GPU sends its own part of each tensor that the next stage takes, and gets the
gradient of it back; between two stages of one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import Graph, Plan, largest_local_shape
from planner_core.cost.model import CostModel, cost_model_of
from planner_core.cost.resolved_ops import local_bytes
from planner_core.cost.schedule.events import Event, schedule_pass
from planner_core.cost.schedule.pipeline.orders import Pass, StagePass, rank_orders
from planner_core.cost.schedule.pipeline.stages import StagePlan, boundary_states, stage_plans, tied_weights
from planner_core.cost.schedule.units import ScheduledUnit, schedule_units
from planner_core.cost.step import sum_traffic
from planner_core.cost.step_messages import plan_messages, weight_gradient_item_bytes

Table = Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True, slots=True)
class ScheduledPass:
    """One micro-batch's pass through a stage: its events in order; and the bytes of each tensor that it then sends, to a rank of the
    pipeline (`to` is None if nothing is sent)."""

    work: StagePass
    events: tuple[Event, ...]
    to: int | None
    sends: tuple[int, ...]

    @property
    def key(self) -> tuple[bool, int, int]:
        """Whether it is forward, the stage, the micro-batch."""
        return self.work.what is Pass.FORWARD, self.work.stage, self.work.micro_batch


@dataclass(frozen=True, slots=True)
class RankWork:
    """The step of one rank. `collectives`: phase -> kind -> count, bytes, wire_bytes, inside its stages. `summed`: bytes of each gradient
    that is summed with other ranks' when all micro-batches are done, since stages share the weight."""

    passes: tuple[ScheduledPass, ...]
    collectives: Table
    summed: tuple[int, ...]
    copies: tuple[str, ...]
    """The prefixes of its calls of blocks."""


def schedule_ranks(plan: Plan, graph: Graph) -> list[RankWork]:
    """Return the step of each rank of a plan with stages. Raises InputError if plan and graph do not belong together."""
    cut = plan.pipeline
    assert cut is not None
    stages, model = stage_plans(plan.blocks, graph, cut), cost_model_of(plan)
    units = [schedule_units(replace(plan, blocks=s.blocks, pipeline=None), s.computed_graph) for s in stages]
    sent = [_boundary_bytes(stages, number, model) for number in range(len(stages))]
    tied = tied_bytes(stages, model)
    works = []
    for rank, order in enumerate(rank_orders(cut, model.workload.accumulate)):
        rank_stages = cut.stages_of(rank)
        passes = tuple(
            _scheduled_pass_of(plan, units[w.stage], w, sent, model) for w in order if w.what is not Pass.WEIGHT
        )
        traffic = sum_traffic(
            (m for s in rank_stages for m in plan_messages(stages[s].blocks, stages[s].computed_graph, model)), model
        )
        shared = [size for users, size in tied if set(users) & set(rank_stages)]
        copies = tuple(call.prefix for s in rank_stages for call in stages[s].computed_graph.calls())
        works.append(RankWork(passes, replace(plan.cost, traffic=traffic).collectives(), tuple(shared), copies))
    return works


def _scheduled_pass_of(
    plan: Plan, units: list[ScheduledUnit], work: StagePass, sent: list[tuple[list[int], list[int]]], model: CostModel
) -> ScheduledPass:
    cut, last = plan.pipeline, model.workload.accumulate - 1
    assert cut is not None
    forward = work.what is Pass.FORWARD
    first = work.micro_batch == 0
    events = schedule_pass(units, plan.mesh, forward=forward, first=first, last=work.micro_batch == last)
    to = work.stage + (1 if forward else -1)
    there = 0 <= to < len(cut.copies) and cut.rank_of(to) != cut.rank_of(work.stage)
    if not there:
        return ScheduledPass(work, tuple(events), None, ())
    # A boundary has the number of the stage before it, in both directions.
    ahead, back = sent[min(work.stage, to)]
    return ScheduledPass(work, tuple(events), cut.rank_of(to), tuple(ahead if forward else back))


def _boundary_bytes(stages: tuple[StagePlan, ...], number: int, model: CostModel) -> tuple[list[int], list[int]]:
    """Return the bytes of each tensor that a GPU of a stage sends to the next one, and of the gradients that come back."""
    if number + 1 == len(stages):
        return [], []
    following = stages[number + 1]
    top, states = following.graph.top, boundary_states(following)
    ahead = [local_bytes(top, v, state.forward, model) for v, state in states.items()]
    back = [local_bytes(top, v, state.gradient, model) for v, state in states.items() if top.values[v].grad]
    return ahead, back


def tied_bytes(stages: Sequence[StagePlan], model: CostModel) -> list[tuple[tuple[int, ...], int]]:
    """Return the stages that hold a weight of several ranks, and the bytes of its gradient on one GPU, as the optimizer takes it."""
    tied = []
    for name, users in tied_weights(stages).items():
        top = stages[users[0]].graph.top
        value = next(i for i, v in enumerate(top.values) if v.kind == "parameter" and v.name == name)
        if top.values[value].grad:
            stored = stages[users[0]].blocks[""].params[name].stored
            part = largest_local_shape(top.values[value].meta.shape, stored, model.sizes)
            tied.append((users, int(np.prod(part)) * weight_gradient_item_bytes(top, value, model)))
    return tied
