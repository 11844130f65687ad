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

from collections.abc import Sequence

from planner_core.core import Graph, Phase, Plan
from planner_core.cost.communication.collectives import collective_time
from planner_core.cost.model import cost_model_of
from planner_core.cost.resolved_ops import block_of
from planner_core.cost.schedule.events import Rank
from planner_core.cost.schedule.pass_work import PassWork, WorkKind, list_backward, list_forward
from planner_core.cost.schedule.units import BucketStage, ScheduledUnit, join_chains, schedule_units
from planner_core.cost.step import price_units


def simulate_step(plan: Plan, graph: Graph) -> float:
    """Return the seconds of one training step of `plan`, by simulation. Raises InputError for a plan of another model."""
    if plan.pipeline:
        return plan.cost.step_time_s  # which is simulated already
    clock = SimulatedRank(plan, graph)
    clock.run(schedule_units(plan, graph))
    return clock.now


class SimulatedRank(Rank):
    """Measures the time after each piece of work."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        super().__init__()
        self.plan, self.graph, self.model = plan, graph, cost_model_of(plan)
        self.now = self.free = 0.0
        self.contention = self.model.contention
        self.ends: dict[BucketStage, list[float]] = {}
        self.sending: list[tuple[float, float]] = []
        self.pending: list[BucketStage] = []
        self.known: dict[tuple[str, str, str], tuple[PassWork, ...]] = {}

    def run(self, units: Sequence[ScheduledUnit]) -> None:
        """One training step with its optimizer."""
        self.step(units, self.model.workload.accumulate)
        priced = price_units(self.plan.blocks, self.graph, self.model)
        self.finish(WorkKind.OPTIMIZER, sum(u.copies * u.optimizer_s for u in priced))
        self.finish(WorkKind.OUTSIDE, sum(u.copies * u.outside_s for u in priced))
        self.finish(WorkKind.HOST, self.plan.cost.host_wait_s)

    def step(self, units: Sequence[ScheduledUnit], micro_batches: int) -> None:
        """One training step, without its optimizer. Of the micro-batches between the first and the last one is simulated."""
        self.micro_batch(units, True, micro_batches == 1)
        if micro_batches > 2:
            begin = self.now
            self.micro_batch(units, False, False)
            self.repeat(micro_batches - 3, self.now - begin)
        if micro_batches > 1:
            self.micro_batch(units, False, True)

    def repeat(self, times: int, seconds: float) -> None:
        """Let as many micro-batches pass that are like the last one, which took `seconds`."""
        # At the end of a micro-batch a rank has waited for all that it issued, so each one begins like the one before.
        self.now += times * seconds

    def finish(self, kind: WorkKind, seconds: float) -> None:
        """Let the time pass of what a rank does when the last micro-batch is over."""
        self.now += seconds

    def record_collective(self, what: str, stage: BucketStage) -> None:
        """Issue a collective of weights, or wait for it."""
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
            self.send(join_chains((stage,) for stage in stages)[0])
            for stage in stages:
                self.ends.setdefault(stage, []).append(self.free)

    def send(self, stage: BucketStage) -> None:
        """Send one message."""
        # One stream sends one message after the other, so this one also waits for those before it.
        start = max(self.now, self.free)
        self.free = start + self._collective_seconds(stage)
        self.sending.append((start, self.free))

    def begin_unit(self, what: str, unit: str) -> None:
        """The begin of a unit takes 0 s."""

    def run_unit(self, unit: ScheduledUnit, phase: Phase) -> None:
        """Run a pass through a unit."""
        self.compute(self._undisturbed_seconds(unit, phase))

    def compute(self, left: float) -> None:
        """Do `left` seconds of work on the compute stream, which is delayed while the other stream sends."""
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

    def pass_through(self, unit: ScheduledUnit, phase: Phase) -> tuple[PassWork, ...]:
        """Return what a pass through a unit does: operators, and collectives for which they wait."""
        # Copies of one label do the same. The parts of the top block differ, so their first operator tells them apart.
        key = (unit.label, phase, "" if unit.label else unit.ops[0].name)
        if key not in self.known:
            block, bp = block_of(self.graph, unit.label), self.plan.blocks[unit.label]
            if phase == "forward":
                work = list_forward(block, unit.ops, bp, unit.forward, self.model)
            else:
                work = list_backward(block, unit.ops, bp, unit.backward, self.model)
            self.known[key] = tuple(work)
        return self.known[key]

    def _undisturbed_seconds(self, unit: ScheduledUnit, phase: Phase) -> float:
        """Return the seconds of a pass through a unit without traffic beside it."""
        return sum(work.seconds for work in self.pass_through(unit, phase))

    def _collective_seconds(self, stage: BucketStage) -> float:
        return collective_time(stage.kind, stage.num_bytes, self.model.link(stage.axes))[0]
