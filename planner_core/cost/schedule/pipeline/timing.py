"""The seconds of a pipeline's step, event by event.

A rank does its work in the order of `orders`. A forward begins when the rank is free and the stage before has sent its results; a
backward when the stage behind has sent the gradients. A send takes `StageCost.send_s` and does not hold the sender; between two stages
of one rank nothing is sent. The traffic of once a step runs beside compute. Weights that are gathered before the first forward
(`first_s`) come from the begin of the step on, while the rank waits for its first micro-batch. Gradients that the last backward does not
hide (`last_s`) leave behind it; what is sent to the stage before does not wait for them. When a rank has done all micro-batches and its
gradients are summed, it does what is done once a step (`StageCost.step_s`). The step ends with the last rank.

Example: 2 stages, forward 1 s, backward 2 s, sends 0 s, 3 micro-batches, `1f1b`. Stage 1 begins after 1 s and works without a pause until
1 + 3 * 3 = 10 s. Stage 0 then has one backward left: 12 s. Each rank works for 9 s, so the bubble is 3 s.

The closed form is a lower bound of every order. Rank r computes for W_r seconds. It cannot begin before the first micro-batch has come
to its first stage, and when its last backward is done, the gradients must still go back to the first stage:

    bound = max over ranks r of   start_r + W_r + end_r

start_r: forwards and sends of the stages before the rank's first one, or the gathers of its first stage; end_r: backwards and sends of
those stages, and what is done once a step on the first rank; or what is done once a step on r, if that takes longer. Where gradients of
weights are apart, nothing need follow a rank's own work but what it does once a step.

In `1f1b` a rank r has at most n = ranks - r micro-batches in flight. So the forward of micro-batch k + n waits until the backward of k
is back: n micro-batches take at least as long as one takes from r to the last rank and back, sends included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner_core.core import Pipeline, StageCost
from planner_core.cost.schedule.pipeline.orders import Order, Pass, Work, rank_orders

LAST_OF_GRADIENTS = (Pass.BACKWARD, Pass.WEIGHT)
"""The passes that make gradients of weights."""
SPLIT = ("zb", "zbv")
"""The schedules in which the gradients of weights are apart."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of a rank, in seconds from the begin of the step."""

    rank: int
    work: Work
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """A simulated step: what each rank does when; the seconds of the step; the mean over ranks of the seconds in which one is idle; and by
    rank the seconds that follow its last work: gradients that nothing hides, and what is done once a step."""

    spans: tuple[Span, ...]
    step_s: float
    bubble_s: float
    once_s: tuple[float, ...]


def simulated_pipeline(pipeline: Pipeline, stages: Sequence[StageCost], micro_batches: int) -> PipelineTime:
    """Simulate one step of all ranks. Raises InputError if the schedule cannot run this number of micro-batches."""
    run = _PipelineRun(pipeline, stages, micro_batches)
    run.run()
    ends = [run.end_of(rank) for rank in range(pipeline.ranks)]
    step, busy = max(ends), sum(span.end_s - span.start_s for span in run.spans)
    # What is done once a step is work too, so the bubble is what remains of the step on average over the ranks.
    once = tuple(end - free for end, free in zip(ends, run.free, strict=True))
    return PipelineTime(tuple(run.spans), step, step - (busy + sum(once)) / pipeline.ranks, once)


class _PipelineRun:
    """The state of a simulated step: when each rank is free, and when what a piece of work waits for is there."""

    def __init__(self, pipeline: Pipeline, stages: Sequence[StageCost], micro_batches: int) -> None:
        self.pipeline, self.stages, self.micro_batches = pipeline, stages, micro_batches
        self.last = len(stages) - 1
        self.free = [0.0] * pipeline.ranks
        self.issued = [0.0] * pipeline.ranks  # when a rank's host has issued the passes so far
        self.gathered = [0.0] * pipeline.ranks  # when the weights of a rank's stages so far are there
        self.summed = [0.0] * pipeline.ranks  # when the gradients of a rank's stages so far are summed
        self.there: dict[tuple[int, bool, int], float] = {(0, True, k): 0.0 for k in range(micro_batches)}
        self.spans: list[Span] = []

    def run(self) -> None:
        """Run every rank as far as it comes, until all are done."""
        todo: list[tuple[int, Order, int]] = [
            (r, o, 0) for r, o in enumerate(rank_orders(self.pipeline, self.micro_batches))
        ]
        while todo:
            before = len(self.spans)
            todo = [(r, o, at) for r, o, begin in todo if (at := self._run_rank(r, o, begin)) < len(o)]
            # No rank came further in a whole turn, so each waits for another one: no order of `orders` may do so.
            if todo and len(self.spans) == before:
                raise AssertionError(f"{self.pipeline.schedule} waits for itself at {[o[at] for _, o, at in todo]}")

    def _run_rank(self, rank: int, order: Order, at: int) -> int:
        """Run a rank's work from `at` on, up to what waits for a rank that has not run so far. Returns where it stopped."""
        while at < len(order):
            work = order[at]
            forward = work.what is Pass.FORWARD
            # The gradients of weights need only what this rank made before, in the first part of the same backward.
            ready = 0.0 if work.what is Pass.WEIGHT else self.there.get((work.stage, forward, work.micro_batch))
            if ready is None:
                break
            start, cost = max(self.free[rank], ready), self.stages[work.stage]
            # The gathers of a rank's stages come one after the other from the step's begin on. A later stage waits for its
            # first micro-batch meanwhile, so they often cost it nothing.
            if forward and work.micro_batch == 0:
                self.gathered[rank] += cost.first_s
                start = max(start, self.gathered[rank])
            end = self._end_of_pass(rank, start, self._pass_seconds(work), self._host_seconds(work))
            self.free[rank] = end
            # Sums leave behind the pass and do not delay what it sends. When each stage waited for them, they added up over all stages:
            # 28 s of the 103 s of a published model of 1 T parameters with 64 stages.
            if work.what in LAST_OF_GRADIENTS and work.micro_batch == self.micro_batches - 1:
                self.summed[rank] = max(self.summed[rank], end) + cost.last_s
            self.spans.append(Span(rank, work, start, end))
            self._send(work, end)
            at += 1
        return at

    def end_of(self, rank: int) -> float:
        """Return when a rank has done what is done once a step. Its own stages do that one after the other on one host."""
        mine = [self.stages[s] for s in self.pipeline.stages_of(rank)]
        begin = max(self.free[rank], self.summed[rank])
        return self._end_of_pass(rank, begin, sum(c.step_s for c in mine), sum(c.host_step_s for c in mine))

    def _end_of_pass(self, rank: int, start: float, gpu_s: float, host_s: float) -> float:
        """Return the end of `gpu_s` seconds of work that the rank's host issues in `host_s`, and let the host issue it.

        The host issues passes in order and does not wait for other ranks, so it runs ahead while the GPU idles in a bubble. A pass begins
        when its first kernel is issued and ends after its last one is, as in `cost.schedule.host`.
        """
        first, self.issued[rank] = self.issued[rank], self.issued[rank] + host_s
        return max(max(start, first) + gpu_s, self.issued[rank]) if host_s else start + gpu_s

    def _host_seconds(self, work: Work) -> float:
        """Return the seconds in which the host issues a pass. The two parts of a backward share its calls as they share its time."""
        cost = self.stages[work.stage]
        if work.what is Pass.FORWARD:
            return cost.host_forward_s
        share = self._pass_seconds(work) / cost.backward_s if cost.backward_s else 1.0
        return cost.host_backward_s * share

    def _pass_seconds(self, work: Work) -> float:
        """Seconds of a pass."""
        cost = self.stages[work.stage]
        return {
            Pass.FORWARD: cost.forward_s,
            Pass.BACKWARD: cost.backward_s,
            Pass.INPUT: cost.backward_s - cost.weight_s,
            Pass.WEIGHT: cost.weight_s,
        }[work.what]

    def _send(self, work: Work, end: float) -> None:
        """Results go to the next stage, gradients to the one before. The last stage's own loss begins its backward."""
        if work.what is Pass.WEIGHT:
            return
        step = 1 if work.what is Pass.FORWARD else -1
        to = work.stage + step
        if to > self.last:
            self.there[self.last, False, work.micro_batch] = end
        elif to >= 0:
            # In a V the two stages at its turn are on one rank, where nothing is sent.
            near = self.pipeline.rank_of(to) == self.pipeline.rank_of(work.stage)
            # A stage's `send_s` is to the next one. A gradient takes the same boundary back, so it takes that of the stage before.
            sent = 0.0 if near else self.stages[min(work.stage, to)].send_s
            self.there[to, step > 0, work.micro_batch] = end + sent


def bound_s(pipeline: Pipeline, stages: Sequence[StageCost], micro_batches: int) -> float:
    """Seconds that no order of the schedule's work is below (see the head of the file)."""
    apart, m = pipeline.schedule in SPLIT, micro_batches
    once = [sum(stages[s].step_s for s in pipeline.stages_of(r)) for r in range(pipeline.ranks)]
    most = 0.0
    for rank in range(pipeline.ranks):
        mine = pipeline.stages_of(rank)
        first = mine[0]  # it is also its rank, since the first turn goes from rank 0 on
        work = sum(m * (stages[s].forward_s + stages[s].backward_s) for s in mine)
        sends = sum(stages[s].send_s for s in range(first))
        start = max(stages[first].first_s, sends + sum(stages[s].forward_s for s in range(first)))
        back = sends + sum(stages[s].backward_s for s in range(first))
        # The sums of at least one stage follow the last backward. Which stage comes last is the order's, so the bound takes the least.
        own = min(stages[s].last_s for s in mine) + once[rank]
        end = own if apart or not first else max(own, back + stages[0].last_s + once[0])
        if pipeline.schedule == "1f1b":
            work = max(work, _round_trips(stages[first:], m))
        most = max(most, start + work + end)
    return most


def _round_trips(behind: Sequence[StageCost], micro_batches: int) -> float:
    """Seconds of all micro-batches on the first of the ranks `behind`, if each but the first few waits for another one to come back."""
    # The example of the head, rank 0: divmod(3 - 1, 2) = 1, 0, so 2 trips of 2 * (1 + 2) = 6 s. These 12 s are its simulated step.
    turns, late = divmod(micro_batches - 1, len(behind))
    trip = sum(s.forward_s + s.backward_s for s in behind) + 2 * sum(s.send_s for s in behind[:-1])
    return late * behind[0].forward_s + (turns + 1) * trip
