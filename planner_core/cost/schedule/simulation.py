"""The seconds of a step whose work is done in the order of its schedule, on two streams.

The compute stream runs operators, and stops while it waits. The other stream sends the collectives of weights one after the other, each
as soon as it is issued, and those of one kind over one axis that are issued together in one message. One second of sending delays
compute by k seconds (`CostModel.contention`), as in the form that the search minimises (`cost.step_time`). That form counts the weight
traffic of a unit beside the unit itself. Here a gather runs beside the unit before, and a reduction beside the unit after, and each
begins where a run issues it.

Example: two units compute 10 ms each, and each gathers its weights in 4 ms; k = 0.1. The first gather delays the first unit by 4 ms.
The second runs beside it: 10 + 0.4 ms. The forward pass takes 4 + 10.4 + 10 = 24.4 ms.
"""

from __future__ import annotations

from planner_core.core import Graph, Plan
from planner_core.cost.communication.collectives import collective_time
from planner_core.cost.model import CostModel, cost_model_of
from planner_core.cost.resolved_ops import block_of
from planner_core.cost.schedule.events import Rank
from planner_core.cost.schedule.units import BucketStage, ScheduledUnit, join_chains, scheduled_units
from planner_core.cost.step import op_and_weight_seconds
from planner_core.cost.step import priced_units as priced_units
from planner_core.cost.step_messages import recomputed_ops, waited_message_seconds

STEADY = 4
"""Number of micro-batches that are simulated: the first, two between, and the last. Each other one takes as long as the second of the
two between."""


def simulated(plan: Plan, graph: Graph) -> float:
    """Return the seconds of one training step of `plan`, by simulation. Raises InputError for a plan of another model."""
    if plan.pipeline:
        return plan.cost.step_time_s  # which is simulated already
    model = cost_model_of(plan)
    units, clock = scheduled_units(plan, graph), _Clock(plan, graph, model)
    count = min(model.workload.accumulate, STEADY)
    ends = []
    for number in range(count):
        clock.micro_batch(units, number == 0, number == count - 1)
        ends.append(clock.now)
    # Example: of 16 micro-batches 4 are simulated, and each of the other 12 takes as long as the third.
    # The second still sees what the first left on its way, so the third is the one that repeats.
    between = ends[2] - ends[1] if count == STEADY else 0.0
    optimizer = sum(u.copies * (u.optimizer_s + u.outside_s) for u in priced_units(plan.blocks, graph, model))
    return clock.now + (model.workload.accumulate - count) * between + optimizer + plan.cost.host_wait_s


class _Clock(Rank):
    """Measures the time after each piece of work."""

    def __init__(self, plan: Plan, graph: Graph, model: CostModel) -> None:
        super().__init__()
        self.plan, self.graph, self.model = plan, graph, model
        self.now = self.free = 0.0
        self.contention = model.contention
        self.ends: dict[BucketStage, list[float]] = {}
        self.sending: list[tuple[float, float]] = []
        self.pending: list[BucketStage] = []
        self.known: dict[tuple[str, str, str], float] = {}

    def record_collective(self, what: str, stage: BucketStage) -> None:
        if what == "issue":
            self.pending.append(stage)
            return
        # What is waited for may have been issued at this very place: then all that was issued here leaves now.
        if not self.ends.get(stage):
            self.launch_issued()
        self.now = max(self.now, self.ends[stage].pop(0))

    def launch_issued(self) -> None:
        """Send what was issued: the stages of one kind over one axis in one message."""
        together: dict[tuple[str, tuple[int, ...]], list[BucketStage]] = {}
        for stage in self.pending:
            together.setdefault((stage.kind, stage.axes), []).append(stage)
        self.pending = []
        for stages in together.values():
            # One stream sends one message after the other, so this one also waits for those before it.
            start = max(self.now, self.free)
            self.free = start + self._collective_seconds(join_chains((stage,) for stage in stages)[0])
            self.sending.append((start, self.free))
            for stage in stages:
                self.ends.setdefault(stage, []).append(self.free)

    def begin_unit(self, what: str, unit: str) -> None:
        """The begin of a unit takes 0 s."""

    def run_unit(self, unit: ScheduledUnit, phase: str) -> None:
        """Run a pass through a unit, which is delayed while the other stream sends."""
        left = self._undisturbed_seconds(unit, phase)
        k = self.contention
        for start, end in self.sending:
            if end <= self.now or left <= 0:
                continue
            # Up to the message's begin compute is undisturbed. Beside it compute runs at the rate 1 - k: with k = 0.1, a message of 2 s
            # lets 1.8 s of compute be done.
            before = min(left, max(0.0, start - self.now))
            self.now, left = self.now + before, left - before
            beside = min(left, (end - self.now) * (1 - k)) if left > 0 else 0.0
            self.now, left = self.now + beside / (1 - k), left - beside
        self.now += left
        self.sending = [(start, end) for start, end in self.sending if end > self.now]

    def _collective_seconds(self, stage: BucketStage) -> float:
        return collective_time(stage.kind, stage.num_bytes, self.model.link(stage.axes))[0]

    def _undisturbed_seconds(self, unit: ScheduledUnit, phase: str) -> float:
        """Return the seconds of a pass through a unit without traffic beside it: operators, and collectives for which they wait."""
        # Copies of one label take equally long. The parts of the top block differ, so their first operator tells them apart.
        key = (unit.label, phase, "" if unit.label else unit.ops[0].name)
        if key not in self.known:
            bp, block, back = self.plan.blocks[unit.label], block_of(self.graph, unit.label), phase == "backward"
            reruns = recomputed_ops(block, bp)
            self.known[key] = sum(op_and_weight_seconds(block, op, bp, reruns, self.model)[back] for op in unit.ops)
            self.known[key] += sum(
                waited_message_seconds(m, self.model) for m in (unit.backward if back else unit.forward)
            )
        return self.known[key]
