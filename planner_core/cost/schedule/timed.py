"""The simulated step piece by piece: what a rank computes, sends and waits for, and when.

It is the clock of `simulation`, which writes down what it measures. So the pieces on the compute stream add up to `simulate_step`, and each
message of weights is there from the moment at which the run issues it, or at which the one before it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner_core.core import Graph, Phase, Plan
from planner_core.cost.schedule.pass_work import WorkKind
from planner_core.cost.schedule.simulation import SimulatedRank
from planner_core.cost.schedule.units import BucketStage, ScheduledUnit
from planner_core.cost.step_messages import Message

MAX_LISTED_WORK = 100_000
"""Up to this much work of micro-batches that are alike is listed in full. More of it is summed up by kind."""
ROUNDING_S = 1e-15
"""Shorter delays are rounding errors of sums."""


@dataclass(frozen=True, slots=True)
class TimedWork:
    """One piece of work of a rank, in seconds from the begin of the step.

    `unit`: its place among the units of a forward pass; None for messages of weights, and for the work of a step. `op`: the operator that
    runs, or that sends. `sent`: the message that is sent, or waited for; what is held up without one is slowed by what is sent beside it.
    `follows`: what is behind the operator waits, not the operator itself. Micro-batches count from 1; 0 is the work of a step. `together`:
    the number of micro-batches of which it is the sum.
    """

    kind: WorkKind
    phase: str
    micro_batch: int
    start_s: float
    seconds: float
    unit: int | None = None
    op: str = ""
    sent: Message | BucketStage | None = None
    follows: bool = False
    together: int = 1


def list_timed_work(plan: Plan, graph: Graph, units: Sequence[ScheduledUnit]) -> list[TimedWork]:
    """Return all work of one rank in a step of a plan of one stage; `units` are those of a forward pass (`schedule_units`)."""
    clock = _Timer(plan, graph, units)
    clock.run(units)
    return clock.done


class _Timer(SimulatedRank):
    """Writes down each piece of work with its time."""

    def __init__(self, plan: Plan, graph: Graph, units: Sequence[ScheduledUnit]) -> None:
        super().__init__(plan, graph)
        self.places = {id(unit): place for place, unit in enumerate(units)}
        self.done: list[TimedWork] = []
        self.phase, self.number, self.begin = "forward", 0, 0

    def micro_batch(self, units: Sequence[ScheduledUnit], first: bool, last: bool) -> None:
        """Forward and backward, with the number of the micro-batch."""
        self.number, self.begin = self.number + 1, len(self.done)
        super().micro_batch(units, first, last)

    def one_forward(self, units: Sequence[ScheduledUnit], first: bool) -> None:
        """Forward of a micro-batch."""
        self.phase = "forward"
        super().one_forward(units, first)

    def one_backward(self, units: Sequence[ScheduledUnit], first: bool, last: bool) -> None:
        """Backward of a micro-batch."""
        self.phase = "backward"
        super().one_backward(units, first, last)

    def record_collective(self, what: str, stage: BucketStage) -> None:
        """Issue a collective of weights, or wait for it."""
        begin = self.now
        super().record_collective(what, stage)
        if self.now > begin:
            self._add(WorkKind.EXPOSED, begin, self.now - begin, sent=stage)

    def send(self, stage: BucketStage) -> None:
        """Send one message, and write down from when to when."""
        super().send(stage)
        start, end = self.sending[-1]
        self._add(WorkKind.SEND, start, end - start, sent=stage)

    def run_unit(self, unit: ScheduledUnit, phase: Phase) -> None:
        """Run a pass through a unit, piece by piece."""
        begin, place = self.now, self.places[id(unit)]
        for work in self.pass_through(unit, phase):
            start = self.now
            self.compute(work.seconds)
            took, message = self.now - start, work.message
            if message is not None:
                # One message is two pieces: it occupies its link, and the compute stream waits for all of it.
                self._add(WorkKind.SEND, start, took, place, work.op, message, work.follows)
                self._add(WorkKind.WAIT, start, took, place, work.op, message, work.follows)
                continue
            self._add(work.kind, start, work.seconds, place, work.op)
            if took - work.seconds > ROUNDING_S:
                self._add(WorkKind.EXPOSED, start + work.seconds, took - work.seconds, place, work.op)
        self._add(WorkKind.PASS, begin, self.now - begin, place)

    def repeat(self, times: int, seconds: float) -> None:
        """Write down as many micro-batches like the last one."""
        last_micro_batch = self.done[self.begin :]
        if times * len(last_micro_batch) > MAX_LISTED_WORK:
            self._sum_up(last_micro_batch, times)
        else:
            for k in range(1, times + 1):
                self.done += [
                    replace(w, micro_batch=w.micro_batch + k, start_s=w.start_s + k * seconds) for w in last_micro_batch
                ]
        self.number += times
        super().repeat(times, seconds)

    def finish(self, kind: WorkKind, seconds: float) -> None:
        """Write down what the rank does when the last micro-batch is over."""
        self.phase, self.number = "optimizer", 0
        self._add(kind, self.now, seconds)
        super().finish(kind, seconds)

    def _add(
        self,
        kind: WorkKind,
        start_s: float,
        seconds: float,
        unit: int | None = None,
        op: str = "",
        sent: Message | BucketStage | None = None,
        follows: bool = False,
    ) -> None:
        if seconds:
            self.done.append(TimedWork(kind, self.phase, self.number, start_s, seconds, unit, op, sent, follows))

    def _sum_up(self, last_micro_batch: Sequence[TimedWork], times: int) -> None:
        """Write down the compute stream of `times` micro-batches with the work `last_micro_batch` as one piece for each kind."""
        sums: dict[WorkKind, float] = defaultdict(float)
        for w in last_micro_batch:
            if w.kind not in (WorkKind.SEND, WorkKind.PASS):
                sums[w.kind] += times * w.seconds
        start, phase = self.now, "forward and backward"
        for kind, seconds in sums.items():
            self.done.append(TimedWork(kind, phase, self.number + 1, start, seconds, together=times))
            start += seconds
