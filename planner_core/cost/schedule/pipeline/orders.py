"""The order in which each rank of a pipeline runs its work: which stage, which micro-batch, forward or backward.

    gpipe         all forwards, then all backwards                                (Huang et al. 2019)
    1f1b          some forwards, then one forward and one backward in turn        (PipeDream-Flush; Narayanan et al. 2021)
    interleaved   the same with several stages a rank, micro-batches in rounds    (Megatron-LM; Narayanan et al. 2021)
    zb            backward in two: gradients of operands at once, those of weights later, where a rank would wait (ZB-H1; Qi et al. 2024)
    zbv           the same with two stages a rank that lie in a V                 (ZB-V; Qi et al. 2024)

The orders are those that `torch.distributed.pipelining` runs (`tests/cost/test_pipeline.py` compares them), so a plan's prediction is
of the order in which it runs. A rank does its work in order and waits where an operand is not there yet.

Example: `1f1b`, 2 ranks, 3 micro-batches. Rank 0: F0 F1 B0 F2 B1 B2. Rank 1: F0 B0 F1 B1 F2 B2.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import repeat
from typing import NamedTuple

import numpy as np

from planner_core.core import InputError, Pipeline, named
from planner_core.cost.step_time import Ints


class Pass(StrEnum):
    """What a rank does with a micro-batch in a stage. `INPUT` and `WEIGHT` are the two parts of `BACKWARD`: the gradients of the stage's
    operands, and those of its weights."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


class StagePass(NamedTuple):
    """One micro-batch's pass through one stage."""

    stage: int
    what: Pass
    micro_batch: int


class WorkColumns(NamedTuple):
    """The passes of a rank in order: [pass] the stage, what is done, and the micro-batch."""

    # A step has up to 10^5 passes, and many orders are kept. As tuples of `StagePass` the garbage collector looked at each of
    # them time and again: making those of 64 ranks took 0.15 s, of which 0.1 s were its own.
    stages: list[int]
    passes: list[Pass]
    micro_batches: list[int]

    @property
    def works(self) -> Order:
        """The same passes one by one."""
        return tuple(map(StagePass, *self))


class Situation(NamedTuple):
    """A pass of a rank, and for each of the rank's stages how many other micro-batches are in flight there and whether a backward has
    run. `is_last`: whether it is the backward of the stage's last micro-batch. `operands`, `gradients`: in each of the stages, those of how
    many micro-batches were received for later passes. What a rank holds depends on these alone, and a step of thousands of passes has few
    of them."""

    stage: int
    forward: bool
    others: tuple[int, ...]
    begun: tuple[bool, ...]
    is_last: bool = False
    operands: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()


Order = tuple[StagePass, ...]
Received = tuple[tuple[int, ...], tuple[int, ...]]
"""By stage of a rank: the micro-batches of which operands were received for a later pass, and those of which gradients were."""
STEADY_ROUNDS = 4
"""Rounds of micro-batches after which a step has no situation that it did not have before."""
INTERLEAVED_HOPS = 2
"""How many more forwards a rank of `interleaved` runs ahead for each rank behind it."""


def rank_orders(pipeline: Pipeline, micro_batches: int) -> tuple[Order, ...]:
    """Return each rank's work in order. Raises InputError if the schedule cannot run this number of micro-batches."""
    check_micro_batches(pipeline, micro_batches)
    return tuple(work_columns(pipeline, rank, micro_batches).works for rank in range(pipeline.ranks))


def work_columns(pipeline: Pipeline, rank: int, micro_batches: int) -> WorkColumns:
    """Return one rank's work in order. The number of micro-batches is one that `check_micro_batches` lets pass."""
    return _order_in_stages(pipeline.ranks, pipeline.schedule, len(pipeline.copies), rank, micro_batches)


# Orders do not depend on where the model is cut, and a search asks for those of many cuts into as many stages. They are kept by rank, since
# a bound needs those of five ranks and a step of 10^5 passes has 32 or more.
@functools.lru_cache(maxsize=256)
def _order_in_stages(ranks: int, schedule: str, stages: int, rank: int, micro_batches: int) -> WorkColumns:
    if schedule == "1f1b":
        return _one_f_one_b(ranks, rank, micro_batches)
    pipeline = Pipeline(ranks, schedule, (1,) * stages)
    one = {"gpipe": _gpipe, "interleaved": _interleaved, "zb": _zero_bubble, "zbv": _v_shaped}
    works = one[schedule](pipeline, rank, micro_batches)
    return WorkColumns(*map(list, zip(*works, strict=True)))


def check_micro_batches(pipeline: Pipeline, micro_batches: int) -> None:
    """Raise InputError if the schedule cannot run this number of micro-batches."""
    name, ranks = pipeline.schedule, pipeline.ranks
    if name == "1f1b" and micro_batches < ranks:
        raise InputError(
            f"schedule 1f1b of {ranks} stages needs at least {ranks} micro-batches a step, not {micro_batches}; give ",
            named("accumulate", ranks),
        )
    rounds = max(1, micro_batches // ranks)
    if name in ("interleaved", "zb") and micro_batches % rounds:
        raise InputError(
            f"schedule {name} runs micro-batches in rounds of about {ranks}, and {micro_batches} cannot be dealt to ",
            f"{rounds} equal rounds; give ",
            named("accumulate", rounds * ranks),
        )


def steady_orders(pipeline: Pipeline, micro_batches: int) -> tuple[Order, ...]:
    """Return each rank's work with as few micro-batches as have every situation of the step: which pass, and how many are in flight in each
    stage.

    A rank fills up in less than two rounds of micro-batches and empties in as many; between them every round is like the one before
    (`tests/cost/test_pipeline.py` compares the situations of long and short steps)."""
    return rank_orders(pipeline, _steady_micro_batches(pipeline, micro_batches))


def _steady_micro_batches(pipeline: Pipeline, micro_batches: int) -> int:
    # Example: 1,024 micro-batches on 32 ranks are 32 rounds, and 4 have all that memory depends on.
    few = STEADY_ROUNDS * pipeline.ranks
    whole_rounds = micro_batches % pipeline.ranks == 0 and pipeline.schedule != "gpipe"
    return min(micro_batches, few) if whole_rounds else micro_batches


def steady_situations(pipeline: Pipeline, micro_batches: int) -> tuple[tuple[Situation, ...], ...]:
    """Return each rank's different situations of a step. Of those that differ in the stages whose backward has begun there is the last,
    in which most have."""
    return _situations_in_stages(pipeline.ranks, pipeline.schedule, len(pipeline.copies), micro_batches)


# Like orders, situations do not depend on where the model is cut, and a search walks the memory of many cuts.
@functools.lru_cache(maxsize=64)
def _situations_in_stages(
    ranks: int, schedule: str, stages: int, micro_batches: int
) -> tuple[tuple[Situation, ...], ...]:
    pipeline = Pipeline(ranks, schedule, (1,) * stages)
    orders = steady_orders(pipeline, micro_batches)
    early = receives_ahead(pipeline, orders) if schedule == "interleaved" else [repeat(((), ()))] * ranks
    return tuple(_list_situations(pipeline.stages_of(rank), order, early[rank]) for rank, order in enumerate(orders))


def receives_ahead(pipeline: Pipeline, orders: Sequence[Order]) -> list[list[Received]]:
    """[rank][pass] what the rank has received for later passes.

    torch lets ranks take a pass in turn, and issues a receive before the pass that the receiver runs next after it was sent. Example:
    rank 0 of 2 sends micro-batch 1 of stage 0 while rank 1 runs micro-batch 0 of stage 3 backward, which has the buffer beside it."""
    place = {stage: (rank, k) for rank in range(len(orders)) for k, stage in enumerate(pipeline.stages_of(rank))}
    # [rank][forward, backward][stage of the rank] micro-batches whose tensors are there, and whose pass has not begun
    received = [[[0] * len(pipeline.stages_of(rank)) for _ in range(2)] for rank in range(len(orders))]
    early: list[list[Received]] = [[] for _ in orders]
    left = [iter(order) for order in orders]
    waiting = {rank: next(passes) for rank, passes in enumerate(left)}
    while waiting:
        for rank, (stage, what, _) in list(waiting.items()):
            way, following = (0, stage + 1) if what is Pass.FORWARD else (1, stage - 1)
            here, k = received[rank], place[stage][1]
            # The first stage receives no operands, and the last one no gradients.
            if (stage - 1, stage + 1)[way] in place:
                if not here[way][k]:
                    continue
                here[way][k] -= 1
            early[rank].append((tuple(here[0]), tuple(here[1])))
            if following in place:
                receiver, at = place[following]
                received[receiver][way][at] += 1
            if (work := next(left[rank], None)) is None:
                del waiting[rank]
            else:
                waiting[rank] = work
    return early


def _list_situations(stages: Sequence[int], order: Order, early: Iterable[Received]) -> tuple[Situation, ...]:
    in_flight, begun = dict.fromkeys(stages, 0), dict.fromkeys(stages, False)
    latest: dict[object, Situation] = {}
    last = max(work.micro_batch for work in order)
    for (stage, what, micro_batch), ahead in zip(order, early, strict=False):
        forward = what is Pass.FORWARD
        # A backward's own micro-batch is in the moments of its pass already; a forward's is not in flight before it has run.
        if what is not Pass.WEIGHT:
            others = tuple(n - (s == stage and not forward) for s, n in in_flight.items())
            is_last = not forward and micro_batch == last
            begun_now = tuple(begun.values())
            latest[stage, forward, others, is_last, ahead] = Situation(
                stage, forward, others, begun_now, is_last, *ahead
            )
        if forward:
            in_flight[stage] += 1
        elif what is not Pass.INPUT:
            in_flight[stage] -= 1
            begun[stage] = True
    return tuple(latest.values())


def in_flight_at_once(pipeline: Pipeline, micro_batches: int, *, begun: bool = False) -> Ints:
    """[rank, moment, stage of the rank] micro-batches in flight in `interleaved`, at the moments that no other one exceeds in every stage.
    Ranks of fewer moments repeat one. `begun`: of the moments at which a backward of every stage of the rank has run.

    Stages are not at their most together. Example: the first of four ranks with two stages each has up to 8 in the one and up to 4 in the
    other, but 7 and 4 or 8 and 3 at once."""
    assert pipeline.schedule == "interleaved"
    return _moments_in_stages(pipeline.ranks, pipeline.virtual, _steady_micro_batches(pipeline, micro_batches), begun)


# A search of hundreds of degrees has few numbers of ranks, stages and steady micro-batches.
@functools.lru_cache(maxsize=256)
def _moments_in_stages(ranks: int, virtual: int, micro_batches: int, begun: bool) -> Ints:
    pipeline = Pipeline(ranks, "interleaved", (1,) * (ranks * virtual))
    each, total = _round_of(pipeline, micro_batches), micro_batches * virtual
    turns = np.arange(total) // each % virtual
    # Row j counts the passes of turn j among the first 0, 1, 2, ... of a rank. Backwards take the turns from the last one on.
    forwards = np.cumsum(np.arange(virtual)[:, None] == np.concatenate([[-1], turns]), axis=1)
    by_rank = []
    for rank in range(ranks):
        ahead = _forwards_ahead(pipeline, rank, micro_batches, INTERLEAVED_HOPS)
        # When n backwards have run, the `ahead` forwards before the first and one more for each have. The first stage of a rank is the last
        # to run one.
        done = np.arange((virtual - 1) * each + 1 if begun else 0, total)
        now = np.unique((forwards[:, np.minimum(total, done + ahead + 1)] - forwards[::-1, done]).T, axis=0)
        no_more = (now[:, None] <= now).all(axis=-1)  # [moment, other moment]
        by_rank.append(now[no_more.sum(axis=-1) == 1])  # each has no more than itself
    moments = max(map(len, by_rank))
    return np.stack([np.pad(now, ((0, moments - len(now)), (0, 0)), mode="edge") for now in by_rank])


def in_flight(order: Order) -> Counter[int]:
    """By stage: the most micro-batches whose forward is done, or running, and whose backward is not."""
    now, most = Counter[int](), Counter[int]()
    for work in order:
        if work.what is Pass.FORWARD:
            now[work.stage] += 1
            most[work.stage] = max(most[work.stage], now[work.stage])
        # The first part of a split backward frees nothing: what the gradients of weights need is taken to be all that was kept.
        elif work.what is not Pass.INPUT:
            now[work.stage] -= 1
    return most


def _gpipe(pipeline: Pipeline, rank: int, m: int) -> list[StagePass]:
    return [StagePass(rank, what, k) for what in (Pass.FORWARD, Pass.BACKWARD) for k in range(m)]


def _one_f_one_b(ranks: int, rank: int, m: int) -> WorkColumns:
    """A rank runs a forward for each rank behind it before its first backward comes back."""
    # 4 ranks: rank 0 runs F0 F1 F2, then F3 B0, and so holds 4 micro-batches. Rank 3 runs F0 B0 at once and holds 1.
    ahead = min(m, ranks - 1 - rank)
    pairs = m - ahead
    passes = [Pass.FORWARD] * ahead + [Pass.FORWARD, Pass.BACKWARD] * pairs + [Pass.BACKWARD] * ahead
    steady = [0] * (2 * pairs)
    steady[::2], steady[1::2] = range(ahead, m), range(pairs)
    return WorkColumns([rank] * (2 * m), passes, [*range(ahead), *steady, *range(pairs, m)])


def _interleaved(pipeline: Pipeline, rank: int, m: int) -> list[StagePass]:
    return _in_rounds(pipeline, rank, m, INTERLEAVED_HOPS, weights_after=None)


def _zero_bubble(pipeline: Pipeline, rank: int, m: int) -> list[StagePass]:
    """Gradients of weights begin `rank` backwards late: a rank further behind gets its first gradient sooner, and has less to fill."""
    return _in_rounds(pipeline, rank, m, hops=1, weights_after=rank)


def _in_rounds(pipeline: Pipeline, rank: int, m: int, hops: int, weights_after: int | None) -> list[StagePass]:
    """Rounds of micro-batches: a round goes through all stages of a rank before the next round begins. `hops`: how many more forwards a
    rank runs ahead for each rank behind it. `weights_after`: after how many backwards those of weights begin; None: they are not apart."""
    ranks, stages = pipeline.ranks, pipeline.virtual
    each, total = _round_of(pipeline, m), m * stages
    ahead = _forwards_ahead(pipeline, rank, m, hops)
    back = Pass.BACKWARD if weights_after is None else Pass.INPUT
    # 2 ranks of 2 stages in rounds of 2: rank 0 runs micro-batches 0 and 1 in stage 0, then both in stage 2, then 2 and 3 in stage 0.
    forward = _number_passes(Pass.FORWARD, lambda k: (k // each) % stages * ranks + rank)
    backward = _number_passes(back, lambda k: (stages - 1 - (k // each) % stages) * ranks + rank)
    weight = _number_passes(Pass.WEIGHT, lambda k: (stages - 1 - (k // each) % stages) * ranks + rank)
    works = [forward(k) for k in range(ahead)]
    for k in range(total):
        if ahead + k < total:
            works.append(forward(ahead + k))
        works.append(backward(k))
        if weights_after is not None and k >= weights_after:
            works.append(weight(k - weights_after))
    # The gradients of weights that were put off fill the end, where a rank would wait.
    late = min(weights_after or 0, total)
    return works + [weight(k) for k in range(total - late, total)]


def _round_of(pipeline: Pipeline, m: int) -> int:
    """Return the micro-batches of a round, about as many as there are ranks: 10 on 4 ranks are 10 // 4 = 2 rounds of 5."""
    return m // max(1, m // pipeline.ranks)


def _forwards_ahead(pipeline: Pipeline, rank: int, m: int, hops: int) -> int:
    """Return the forwards of a rank before its first backward."""
    # A first gradient comes back when a round is through all stages: all but the last of this rank's, then `hops` passes for each rank
    # behind. So rank 0 runs furthest ahead, and the last rank the least.
    behind = pipeline.ranks - 1 - rank
    return min(m * pipeline.virtual, (pipeline.virtual - 1) * _round_of(pipeline, m) + hops * behind)


def _number_passes(what: Pass, stage_of: Callable[[int], int]) -> Callable[[int], StagePass]:
    """Return the k-th pass of a kind on a rank; each stage takes its micro-batches in order."""
    seen: Counter[int] = Counter()

    def work(k: int) -> StagePass:
        stage = stage_of(k)
        seen[stage] += 1
        return StagePass(stage, what, seen[stage] - 1)

    return work


def _v_shaped(pipeline: Pipeline, rank: int, m: int) -> list[StagePass]:
    """Two stages a rank, one met on the way to the last rank and one on the way back. Fewer micro-batches than fill the V leave gaps."""
    v = _V(rank, 2 * pipeline.ranks - 1 - rank, m)
    v.fill(pipeline.ranks, rank)
    v.steady(max(2 * pipeline.ranks - 1, m))
    v.drain(pipeline.ranks, rank)
    return v.works


class _V:
    """The work of one rank of a V: its stages are `down` and `up`. Micro-batches from `real` on are not there."""

    def __init__(self, down: int, up: int, real: int) -> None:
        self.down, self.up, self.real = down, up, real
        self.passed: Counter[tuple[int, Pass]] = Counter()
        self.works: list[StagePass] = []

    def run(self, stage: int, *passes: Pass) -> None:
        for what in passes:
            # Micro-batches that are not there are numbered too: so the order of the others is that of a full V.
            number = self.passed[stage, what]
            self.passed[stage, what] += 1
            if number < self.real:
                self.works.append(StagePass(stage, what, number))

    def fill(self, ranks: int, rank: int) -> None:
        """Forwards until the first gradient comes; ranks further behind get it sooner."""
        for _ in range(2 * (ranks - rank) - 1):
            self.run(self.down, Pass.FORWARD)
        for _ in range(rank):
            self.run(self.up, Pass.FORWARD)
            self.run(self.down, Pass.FORWARD)
        for _ in range(ranks - rank):
            self.run(self.up, Pass.FORWARD, Pass.INPUT, Pass.WEIGHT)

    def steady(self, whole: int) -> None:
        """One forward and one backward in turn, in both stages."""
        done = self.passed
        while done[self.up, Pass.FORWARD] < done[self.down, Pass.FORWARD] or done[self.down, Pass.FORWARD] < whole:
            if done[self.down, Pass.FORWARD] < whole:
                self.run(self.down, Pass.FORWARD)
            self.run(self.down, Pass.INPUT, Pass.WEIGHT)
            self.run(self.up, Pass.FORWARD, Pass.INPUT, Pass.WEIGHT)

    def drain(self, ranks: int, rank: int) -> None:
        """Gradients of operands first, for which other ranks wait; those of weights fill the end."""
        for _ in range(rank):
            self.run(self.down, Pass.INPUT)
            self.run(self.up, Pass.INPUT)
        for _ in range(ranks - rank):
            self.run(self.down, Pass.INPUT, Pass.WEIGHT)
        for stage in (self.up, self.down):
            while self.passed[stage, Pass.WEIGHT] < self.passed[stage, Pass.INPUT]:
                self.run(stage, Pass.WEIGHT)
