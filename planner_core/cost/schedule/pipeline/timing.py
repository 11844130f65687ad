"""The seconds of a pipeline's step, event by event.

A rank does its work in the order of `orders`. A forward begins when the rank is free and the stage before has sent its results; a
backward when the stage behind has sent the gradients. A send takes `StageCost.send_s` and does not hold the sender; between two stages
of one rank nothing is sent. The traffic of once a step runs beside compute. Weights that are gathered before the first forward
(`first_s`) come from the begin of the step on, while the rank waits for its first micro-batch. Gradients that the last backward does not
hide (`last_s`) leave behind it; what is sent to the stage before does not wait for them. When a rank has done all micro-batches and its
gradients are summed, it does what is done once a step (`StageCost.step_s`). The step ends with the last rank.

Example: 2 stages, forward 1 s, backward 2 s, sends 0 s, 3 micro-batches, `1f1b`. Stage 1 begins after 1 s and works without a pause until
1 + 3 * 3 = 10 s. Stage 0 then has one backward left: 12 s. Each rank works for 9 s, so the bubble is 3 s.

Two bounds are below the simulated step. The *closed form* holds for every order. Rank r computes for W_r seconds. It cannot begin before
the first micro-batch has come to its first stage, and when its last backward is done, the gradients must still go back to the first stage:

    closed form = max over ranks r of   start_r + W_r + end_r

start_r: forwards and sends of the stages before the rank's first one, or the gathers of its first stage; end_r: backwards and sends of
those stages, and what is done once a step on the first rank; or what is done once a step on r, if that takes longer. Where gradients of
weights are apart, nothing need follow a rank's own work but what it does once a step.

The *bound* adds what a few ranks wait for. Let all other ranks take any number of micro-batches at once: then only the orders of these
few, and the way of a micro-batch through the other stages, are left, and no real rank is quicker. Example: `1f1b` on 4 ranks, a way of
1.6 s there and back, 0.25 s of work on rank 0. It has at most 4 micro-batches on their way, so it does 4 of them, 1 s of work, in 1.6 s.

Steps of many micro-batches are *folded*. Behind its first forwards a rank of `1f1b` or `interleaved` repeats pairs of a forward and a
backward. A period is the pairs of one micro-batch, or of a round of them if ranks have several stages. Once all passes end by one time
later than those a period before, every further period takes that time. So `FOLDED_ROUNDS` rounds are simulated, and the other periods are
added. Example: 8 ranks, forward 1 s, backward 2 s, 64 micro-batches. The 32 that are simulated take 117 s, the others 3 s each: 213 s in
all. If periods still differ after these rounds, every pass is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner_core.core import Pipeline, StageCost
from planner_core.cost.schedule.pipeline.orders import Pass, StagePass, check_micro_batches, work_columns

LAST_OF_GRADIENTS = (Pass.BACKWARD, Pass.WEIGHT)
"""The passes that make gradients of weights."""
SPLIT = ("zb", "zbv")
"""The schedules in which the gradients of weights are apart."""
FOLDED_ROUNDS = 4
"""Rounds of micro-batches that are simulated before the others are taken to be as long. Most steps are steady by then."""
EQUAL_PACE_SHARE = 1e-13
"""Sums of as many seconds as a step has differ by so small a part of it if they are equal."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of a rank, in seconds from the begin of the step."""

    rank: int
    work: StagePass
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
    """Simulate one step of all ranks, every pass of it. Raises InputError if the schedule cannot run this number of micro-batches."""
    run = _PipelineRun(pipeline, stages, micro_batches)
    run.run()
    spans = tuple(
        Span(rank, work, start_s, end_s)
        for rank, order in run.orders.items()
        for work, start_s, end_s in zip(order.works, run.starts[rank], run.ends[rank], strict=True)
    )
    step_s, bubbles_s, once_s = run.results()
    return PipelineTime(spans, step_s, sum(bubbles_s) / pipeline.ranks, once_s)


def schedule_seconds(
    pipeline: Pipeline, stages: Sequence[StageCost], micro_batches: int
) -> tuple[float, tuple[float, ...], float]:
    """Return the seconds of a step, of the bubble of each rank, and by which waits for hosts make the step longer.

    The step is that of `simulated_pipeline`, with steps of many micro-batches folded (see the head). The bubbles are those of the same step
    without hosts, so that no second is in both a bubble and the waits. Raises InputError if the schedule cannot run this number of
    micro-batches."""
    run = _folded_run(pipeline, stages, micro_batches)
    step_s = run.results()[0]
    # The waits of ranks overlap with bubbles, so only a simulation without a host tells what they add. Hosts that are ahead of their GPU
    # delay at most what is done once a step, so their passes need no second one.
    is_ahead = all(map(_is_ahead_of_gpu, stages))
    unhindered = run if is_ahead else _folded_run(pipeline, tuple(map(_without_host, stages)), micro_batches)
    without_s, bubbles_s, _ = unhindered.results(hosts=False)
    return step_s, bubbles_s, max(0.0, step_s - without_s)


def _is_ahead_of_gpu(cost: StageCost) -> bool:
    """Return whether the host issues every pass in less time than it runs. Then no pass waits for it: if it is done with one pass before
    the GPU is, so it is with the next."""
    return cost.host_forward_s <= cost.forward_s and cost.host_backward_s <= cost.backward_s


def _without_host(cost: StageCost) -> StageCost:
    return replace(cost, host_forward_s=0.0, host_backward_s=0.0, host_step_s=0.0)


def _folded_run(
    pipeline: Pipeline, stages: Sequence[StageCost], micro_batches: int, some: tuple[int, ...] = ()
) -> _PipelineRun:
    """Simulate a step as far as it differs from one period to the next."""
    check_micro_batches(pipeline, micro_batches)
    # Only these repeat one pair of passes for each rank from its first backward on, and only whole rounds all have one length.
    repeats = pipeline.schedule == "1f1b" or (pipeline.schedule == "interleaved" and not micro_batches % pipeline.ranks)
    few = FOLDED_ROUNDS * pipeline.ranks
    if repeats and few < micro_batches:
        run = _PipelineRun(pipeline, stages, few, some)
        run.run()
        if run.skip_periods(micro_batches - few):
            return run
    # A rank that is a little slower than the others may take any number of periods until it sets the pace of all.
    run = _PipelineRun(pipeline, stages, micro_batches, some)
    run.run()
    return run


class _Kind(NamedTuple):
    """What is alike of a pass in all micro-batches: its seconds on GPU and host; by micro-batch, when what it waits for is `there`; and the
    same list of the pass that waits for it, `onward`, which may begin `wait_s` later."""

    gpu_s: float
    host_s: float
    there: list[float]
    onward: list[float]
    wait_s: float


class _PipelineRun:
    """The state of a simulated step: when each rank is free, and when what a piece of work waits for is there.

    `some`: the ranks that are simulated, the first rank among them; the others take every micro-batch at once. Empty: all ranks are."""

    def __init__(
        self, pipeline: Pipeline, stages: Sequence[StageCost], micro_batches: int, some: tuple[int, ...] = ()
    ) -> None:
        self.pipeline, self.stages, self.micro_batches = pipeline, stages, micro_batches
        self.free = [0.0] * pipeline.ranks
        self.issued = [0.0] * pipeline.ranks  # when a rank's host has issued the passes so far
        self.gathered = [0.0] * pipeline.ranks  # when the weights of a rank's stages so far are there
        self.summed = [0.0] * pipeline.ranks  # when the gradients of a rank's stages so far are summed
        check_micro_batches(pipeline, micro_batches)
        simulated = some or range(pipeline.ranks)
        self.orders = {rank: work_columns(pipeline, rank, micro_batches) for rank in simulated}
        # The begin and the end of each pass of a rank's order that has run.
        self.starts: dict[int, list[float]] = {rank: [] for rank in simulated}
        self.ends: dict[int, list[float]] = {rank: [] for rank in simulated}
        self.busy_s = [0.0] * pipeline.ranks
        self.skipped_s = 0.0  # `skip_periods`: how much later the last passes end than `ends` has it
        # A step has thousands of passes of a few kinds, so what depends on the kind alone is looked up.
        self.seconds = {(k, what): s for k, c in enumerate(stages) for what, s in _pass_seconds(c).items()}
        mine = [stage for rank in simulated for stage in pipeline.stages_of(rank)]
        self.host = {(k, what): s for k in mine for what, s in _host_seconds(stages[k]).items()}
        # By stage and whether it is a forward: when what the passes of each micro-batch wait for is there. A stage takes them in order.
        self.there: dict[tuple[int, bool], list[float]] = {(k, forward): [] for k in mine for forward in (True, False)}
        self.there[0, True] = [0.0] * micro_batches
        self.kinds = {(k, what): self._kind_of(k, what) for k in mine for what in Pass}

    def run(self) -> None:
        """Run every rank as far as it comes, until all are done."""
        todo = {rank: len(order.stages) for rank, order in self.orders.items()}
        while todo:
            before = sum(todo.values())
            todo = {rank: left for rank in todo if (left := self._run_rank(rank))}
            # No rank came further in a whole turn, so each waits for another one: no order of `orders` may do so.
            if sum(todo.values()) == before:
                waiting = [self.orders[rank].works[-left] for rank, left in todo.items()]
                raise AssertionError(f"{self.pipeline.schedule} waits for itself at {waiting}")
        for rank, starts in self.starts.items():
            self.busy_s[rank] = sum(self.ends[rank]) - sum(starts)

    def results(self, *, hosts: bool = True) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
        """Return the seconds of the step, and by rank those in which it is idle and those that follow its last pass.

        `hosts`: whether they delay what is done once a step."""
        ends = [self.end_of(rank, hosts=hosts) for rank in range(self.pipeline.ranks)]
        # What is done once a step is work too, so a bubble is what remains of the step.
        once = tuple(end - free for end, free in zip(ends, self.free, strict=True))
        idle = tuple(max(ends) - busy - after for busy, after in zip(self.busy_s, once, strict=True))
        return max(ends), idle, once

    def skip_periods(self, micro_batches: int) -> bool:
        """Add some micro-batches to the step behind those that were simulated, if its periods differ by one time (see the head)."""
        ranks, virtual = self.pipeline.ranks, self.pipeline.virtual
        each = 1 if virtual == 1 else ranks
        pairs, number = each * virtual, micro_batches // each
        # A pass waits for one of at most so many pairs before it: its micro-batch's pass in the stage before, which a rank with several
        # stages ran `each` pairs before, or its forward, which a rank runs up to two passes ahead for every rank behind it.
        window = each + 2 * ranks
        ahead = {
            r: next(k for k, w in enumerate(o.passes) if w is not Pass.FORWARD) - 1 for r, o in self.orders.items()
        }
        steady = min(len(order.stages) // 2 - ahead[rank] for rank, order in self.orders.items())
        if steady < pairs + window:
            return False
        # The last `window` pairs of all ranks, and those one period before.
        last = {r: slice(a + 2 * (steady - window), a + 2 * steady) for r, a in ahead.items()}
        before = {r: slice(s.start - 2 * pairs, s.stop - 2 * pairs) for r, s in last.items()}
        ends = np.concatenate([np.array(self.ends[r])[last[r]] for r in last])
        paces = ends - np.concatenate([np.array(self.ends[r])[before[r]] for r in last])
        pace_s = float(paces.mean())
        if np.ptp(paces) > EQUAL_PACE_SHARE * ends.max():
            return False
        period = {r: slice(s.stop - 2 * pairs, s.stop) for r, s in last.items()}
        hosts = {
            r: sum(self.host[work] for work in zip(o.stages[period[r]], o.passes[period[r]], strict=True))
            for r, o in self.orders.items()
        }
        # A host that needs longer than a period falls behind by more in each, until it sets the pace.
        if max(hosts.values()) > pace_s * (1 + EQUAL_PACE_SHARE):
            return False
        self.skipped_s = number * pace_s
        for r in last:
            self.free[r] += self.skipped_s
            self.summed[r] += self.skipped_s
            self.issued[r] += number * hosts[r]
            self.busy_s[r] += number * (sum(self.ends[r][period[r]]) - sum(self.starts[r][period[r]]))
        return True

    def _find_next_pass(self, stage: int, forward: bool) -> tuple[int, bool, float]:
        """Return the next pass of a simulated rank that waits for a stage's forward or backward, and the seconds until it may begin.

        The pass is a stage and whether it is a forward; the stage is -1 if there is none."""
        seconds, step = 0.0, 1 if forward else -1
        while True:
            last, at = stage == len(self.stages) - 1, stage
            if forward and last:
                forward, step = False, -1  # the last stage's own loss begins its backward
            else:
                stage += step
            if stage < 0:
                return stage, False, seconds
            # In a V the two stages at its turn are on one rank, where nothing is sent.
            if self.pipeline.rank_of(stage) != self.pipeline.rank_of(at):
                # A stage's `send_s` is to the next one. A gradient takes the same boundary back, so it takes that of the stage before.
                seconds += self.stages[min(at, stage)].send_s
            if self.pipeline.rank_of(stage) in self.orders:
                return stage, forward, seconds
            back = Pass.INPUT if self.pipeline.schedule in SPLIT else Pass.BACKWARD
            seconds += self.seconds[stage, Pass.FORWARD if forward else back]

    def _kind_of(self, stage: int, what: Pass) -> _Kind:
        to, forward, wait_s = self._find_next_pass(stage, what is Pass.FORWARD)
        # The gradients of weights need only what this rank made before, in the first part of the same backward.
        weight = what is Pass.WEIGHT
        there = [0.0] * self.micro_batches if weight else self.there[stage, what is Pass.FORWARD]
        # Results go to the next stage, gradients to the one before.
        onward = [] if weight or to < 0 else self.there[to, forward]
        return _Kind(self.seconds[stage, what], self.host[stage, what], there, onward, wait_s)

    def _run_rank(self, rank: int) -> int:
        """Run a rank's work up to what waits for a rank that has not run so far. Returns how many passes are left."""
        stages, passes, numbers = self.orders[rank]
        starts, ends, kinds = self.starts[rank], self.ends[rank], self.kinds
        at, free, last = len(ends), self.free[rank], self.micro_batches - 1
        while at < len(stages):
            stage, what, number = stages[at], passes[at], numbers[at]
            gpu_s, host_s, there, onward, wait_s = kinds[stage, what]
            if number >= len(there):
                break
            start = free if free > there[number] else there[number]
            # The gathers of a rank's stages come one after the other from the step's begin on. A later stage waits for its
            # first micro-batch meanwhile, so they often cost it nothing.
            if number == 0 and what is Pass.FORWARD:
                self.gathered[rank] += self.stages[stage].first_s
                start = max(start, self.gathered[rank])
            free = self._end_of_pass(rank, start, gpu_s, host_s) if host_s else start + gpu_s
            # Sums leave behind the pass and do not delay what it sends. When each stage waited for them, they added up over all stages:
            # 28 s of the 103 s of a published model of 1 T parameters with 64 stages.
            if number == last and what in LAST_OF_GRADIENTS:
                self.summed[rank] = max(self.summed[rank], free) + self.stages[stage].last_s
            starts.append(start)
            ends.append(free)
            onward.append(free + wait_s)
            at += 1
        self.free[rank] = free
        return len(stages) - at

    def end_of(self, rank: int, *, hosts: bool = True) -> float:
        """Return when a rank has done what is done once a step. Its own stages do that one after the other on one host."""
        mine = [self.stages[s] for s in self.pipeline.stages_of(rank)]
        host_s = sum(c.host_step_s for c in mine) if hosts else 0.0
        return self._end_of_pass(rank, self.ready_s(rank), sum(c.step_s for c in mine), host_s)

    def ready_s(self, rank: int) -> float:
        """Return when a rank has done all passes and its gradients are summed."""
        return max(self.free[rank], self.summed[rank])

    def _end_of_pass(self, rank: int, start: float, gpu_s: float, host_s: float) -> float:
        """Return the end of `gpu_s` seconds of work that the rank's host issues in `host_s`, and let the host issue it.

        The host issues passes in order and does not wait for other ranks, so it runs ahead while the GPU idles in a bubble. A pass begins
        when its first kernel is issued and ends after its last one is, as in `cost.schedule.host`.
        """
        first, self.issued[rank] = self.issued[rank], self.issued[rank] + host_s
        return max(max(start, first) + gpu_s, self.issued[rank]) if host_s else start + gpu_s


def _pass_seconds(cost: StageCost) -> dict[Pass, float]:
    return {
        Pass.FORWARD: cost.forward_s,
        Pass.BACKWARD: cost.backward_s,
        Pass.INPUT: cost.backward_s - cost.weight_s,
        Pass.WEIGHT: cost.weight_s,
    }


def _host_seconds(cost: StageCost) -> dict[Pass, float]:
    """Return the seconds in which the host issues a pass. The two parts of a backward share its calls as they share its time."""
    backward = {what: s / cost.backward_s if cost.backward_s else 1.0 for what, s in _pass_seconds(cost).items()}
    host = {what: cost.host_backward_s * share for what, share in backward.items()}
    return {**host, Pass.FORWARD: cost.host_forward_s}


def bound_s(pipeline: Pipeline, stages: Sequence[StageCost], micro_batches: int) -> float:
    """Return the seconds that the schedule's step is not below: the closed form, and what ranks by themselves wait for (see the head)."""
    by_rank = closed_form_by_rank(pipeline, stages, micro_batches)
    # A few ranks take as long as their part of a simulated step. Those in front wait longest for a micro-batch to come back, those behind
    # until they begin; a rank with most work sets the pace. With sends of slow links one between them waits longest. They wait for each
    # other too, so they are taken together: of 8 ranks of `zbv` over such links none by itself is within 3.4 % of the step.
    ranks = pipeline.ranks
    few = {0, 1, ranks // 4, ranks // 2, 3 * ranks // 4, ranks - 1, by_rank.index(max(by_rank))}
    run = _folded_run(pipeline, stages, micro_batches, tuple(sorted(few)))
    return max(*by_rank, *map(run.end_of, few))


def closed_form_by_rank(pipeline: Pipeline, stages: Sequence[StageCost], micro_batches: int) -> list[float]:
    """Return the seconds that no order of each rank's work is below (see the head of the file)."""
    split, m = pipeline.schedule in SPLIT, micro_batches
    once = [sum(stages[s].step_s for s in pipeline.stages_of(r)) for r in range(pipeline.ranks)]
    seconds = []
    for rank in range(pipeline.ranks):
        mine = pipeline.stages_of(rank)
        first = mine[0]  # it is also its rank, since the first turn goes from rank 0 on
        work = sum(m * (stages[s].forward_s + stages[s].backward_s) for s in mine)
        sends = sum(stages[s].send_s for s in range(first))
        start = max(stages[first].first_s, sends + sum(stages[s].forward_s for s in range(first)))
        back = sends + sum(stages[s].backward_s for s in range(first))
        # The sums of at least one stage follow the last backward. Which stage comes last is the order's, so the bound takes the least.
        sums_s = min(stages[s].last_s for s in mine) + once[rank]
        end = sums_s if split or not first else max(sums_s, back + stages[0].last_s + once[0])
        seconds.append(start + work + end)
    return seconds
