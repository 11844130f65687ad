"""Cut a model into stages of which every rank has several: which stage has how many copies.

A rank's stages are not neighbours, so its time and memory are sums over several ranges of copies, and no dynamic program over copies
holds them. The search begins with equally many copies in each stage, all under one policy. It moves one at a time; where there are few
stages also two at a time, which leaves the places where no single move helps. Every cut of small models is its judge
(`tests/planning/test_stage_cuts.py`). Or the copies stay where they are, and on ranks that lack memory some run under a slower policy.

Example: 7 copies in 4 stages on 2 ranks. 2, 2, 2, 1 gives rank 0 four copies and the embedding, rank 1 three copies and the head. If the
head takes as long as three copies, 2, 1, 3, 1 is better: five copies on rank 0, two on rank 1.
"""

from __future__ import annotations

import numpy as np

from planner_core.core import Pipeline, StageCost
from planner_core.cost import Floats, Ints, bound_s, closed_form_by_rank, even_copies, in_flight_at_once
from planner_core.planning.stages.degrees import PipelineDegrees
from planner_core.planning.stages.pieces import PolicyMix, RangeCosts

Cut = tuple[tuple[int, ...], tuple[PolicyMix, ...]]
"""The copies of each stage, and the policies that it mixes."""

MAX_FOR_ALL, MAX_FOR_PAIRS = 24, 8
"""Stages of which each may give a copy to each, and of which two copies may move at once."""
MAX_MOVED_SHARE = 1 / 8
"""The share of a stage's copies that may move at once."""


def find_interleaved_cut(degrees: PipelineDegrees, costs: RangeCosts, limit: float) -> Cut | None:
    """Find a cut with several stages a rank that fits and takes less than `limit` seconds; None if there is none."""
    best, ranks, m = None, degrees.ranks, degrees.micro_batches
    forms = []
    for cut, stages in list_interleaved_cuts(degrees, costs, limit):
        pipeline = Pipeline(ranks, degrees.schedule, cut[0])
        forms.append((max(closed_form_by_rank(pipeline, stages, m)), pipeline, stages, cut))
    # The closed form by which copies are moved does not see what ranks wait for, and stages of very unequal size wait most. The bound sees
    # it and is not below the closed form, which takes a thousandth of the time: most cuts need no bound.
    for form_s, pipeline, stages, cut in sorted(forms, key=lambda form: form[0]):
        if form_s < limit and (seconds := bound_s(pipeline, stages, m)) < limit:
            best, limit = cut, seconds
    return best


def list_interleaved_cuts(
    degrees: PipelineDegrees, costs: RangeCosts, limit: float
) -> list[tuple[Cut, list[StageCost]]]:
    """List the cuts that fit and may take less than `limit` seconds, with the costs of their stages: under each policy that into stages of
    equally many copies, and the best that moves of copies lead to; and where equally many do not fit, with some of them under each slower
    policy."""
    even = np.array(even_copies(len(costs.kinds), degrees.ranks * degrees.virtual))
    costs_by_cut = {}
    searches = [_CopiesSearch(degrees, costs, number) for number in range(len(costs.policies))]
    for number, search in enumerate(searches):
        if search.least_seconds() >= limit:
            continue
        does_fit = search.num_bytes(even).max() <= costs.budget
        for other in range(number + 1, 0 if does_fit else len(searches)):
            if (num_slow := search.fit_by(searches[other], even)) is not None:
                mixes = (PolicyMix(number, other, k) for k in map(int, num_slow))
                costs_by_cut[tuple(map(int, even)), tuple(mixes)] = search.stage_costs(even, num_slow, searches[other])
        # No moves help where ranks that are as full as they may be lack room.
        if search.most_copies(limit).sum() < len(costs.kinds):
            continue
        for copies in (even, search.improve(even)):
            if search.num_bytes(copies).max() <= costs.budget and search.seconds(copies).max() < limit:
                cut = tuple(map(int, copies)), (PolicyMix(number, number),) * len(copies)
                costs_by_cut[cut] = search.stage_costs(copies)
    return list(costs_by_cut.items())


class _CopiesSearch:
    """A search of the copies of each stage, under one policy. Many cuts are priced at once, so arrays are [cuts, stages]."""

    def __init__(self, degrees: PipelineDegrees, costs: RangeCosts, number: int) -> None:
        self.degrees, self.budget = degrees, costs.budget
        self.policy, sums = costs.policies[number], costs.sums[number]
        self.times, self.memory = sums.times, sums.memory
        stages = degrees.ranks * degrees.virtual
        pipeline = Pipeline(degrees.ranks, degrees.schedule, (1,) * stages)
        self.in_flight = in_flight_at_once(pipeline, degrees.micro_batches).astype(float)
        self.passing = _RangeMaximum(self.policy.passing_bytes)

    def improve(self, copies: Ints) -> Ints:
        """Move copies as long as that helps. First all ranks must fit, then the step becomes shorter.

        Stages of many copies give several at once first, so that the moves of a model of a thousand layers are not a hundred times those of
        a model of ten.
        """
        at_once = int(copies.max() * MAX_MOVED_SHARE)
        for number in [2**k for k in range(max(1, at_once.bit_length()))][::-1]:
            while (better := self._improve_once(copies, number)) is not None:
                copies = better
        return copies

    def _improve_once(self, copies: Ints, number: int) -> Ints | None:
        """Return the best cut in which a `number` of copies have moved, or twice as many; None if none is better."""
        moved = self._list_moves(copies, number)
        better = self._best_of(copies, moved)
        if better is None and len(copies) <= MAX_FOR_PAIRS and len(moved):
            better = self._best_of(copies, np.concatenate([self._list_moves(m, number) for m in moved]))
        return better

    def _best_of(self, copies: Ints, moved: Ints) -> Ints | None:
        """Return the best of some cuts; None if none is better than `copies`."""
        if not len(moved):
            return None
        every = np.concatenate([copies[None], moved])
        num_bytes, seconds = self.num_bytes(every), self.seconds(every)
        over = np.maximum(0.0, num_bytes - self.budget)
        # The pace is set by one rank, and many moves leave it as it is. Of these the best is that which evens out the other ranks, so that
        # a later move has where to put a copy.
        keys = ((seconds**2).sum(axis=-1), seconds.max(axis=-1), over.sum(axis=-1))
        best = int(np.lexsort(keys)[0])
        return every[best] if [key[best] for key in reversed(keys)] < [key[0] for key in reversed(keys)] else None

    def _list_moves(self, copies: Ints, number: int) -> Ints:
        """[cuts, stages] a `number` of copies of one stage given to another one. Of many stages only the rank that sets the pace gives."""
        stages = np.arange(len(copies))
        givers = stages[copies > number]  # a stage has at least one copy
        if len(copies) > MAX_FOR_ALL:
            num_bytes = self.num_bytes(copies)
            pace = num_bytes if num_bytes.max() > self.budget else self.seconds(copies)
            givers = givers[givers % self.degrees.ranks == pace.argmax()]
        # A move inside a rank counts too: it changes what other ranks wait for.
        pairs = np.array([(giver, taker) for giver in givers for taker in stages if giver != taker], dtype=np.int64)
        pairs = pairs.reshape(-1, 2)
        moved = np.repeat(copies[None], len(pairs), axis=0)
        rows = np.arange(len(pairs))
        moved[rows, pairs[:, 0]] -= number
        moved[rows, pairs[:, 1]] += number
        return moved

    def _of_ranks(self, by_stage: Floats) -> Floats:
        """[..., stages] as [..., virtual, ranks]: stage `turn * ranks + rank` is of that rank."""
        return by_stage.reshape(*by_stage.shape[:-1], -1, self.degrees.ranks)

    def seconds(self, copies: Ints) -> Floats:
        """[..., ranks] the closed form of `cost.schedule.pipeline.timing`: a rank's start, its work, and what must follow it."""
        ranks, m, policy = self.degrees.ranks, self.degrees.micro_batches, self.policy
        ends = np.cumsum(copies, axis=-1)
        forward, backward, gather, reduce, step = self.times[:, ends] - self.times[:, ends - copies]
        send = policy.send_s[ends - 1] / 2  # `send_s` of a policy is there and back
        work = m * self._of_ranks(forward + backward).sum(axis=-2)
        once = self._of_ranks(step + policy.stage_s).sum(axis=-2)
        own_end = self._of_ranks(reduce).min(axis=-2) + once
        # What comes before a rank's first stage, and goes back through the stages before it.
        none = np.zeros((*copies.shape[:-1], 1))
        before_s = np.concatenate([none, np.cumsum((forward + send)[..., : ranks - 1], axis=-1)], axis=-1)
        behind_s = np.concatenate([none, np.cumsum((backward + send)[..., : ranks - 1], axis=-1)], axis=-1)
        end_s = np.maximum(own_end, behind_s + reduce[..., :1] + once[..., :1])
        end_s[..., 0] = own_end[..., 0]
        seconds: Floats = np.maximum(gather[..., :ranks], before_s) + work + end_s
        return seconds

    def least_seconds(self) -> float:
        """Return a bound on every cut: the work of all ranks, evenly dealt, and their mean wait."""
        work_s = self.degrees.micro_batches * self.times[:2, -1].sum() / self.degrees.ranks
        copy_s = np.diff(self.times[:2]).min(axis=-1).sum()
        return float(work_s + self.degrees.mean_wait_s(copy_s, self.policy.send_s[:-1].min()))

    def most_copies(self, limit: float) -> Floats:
        """[ranks] no cut within the budget and `limit` seconds gives a rank more copies. Zero if a rank cannot have a copy a stage."""
        states, activations = np.diff(self.memory).min(axis=-1)
        copy_s = np.diff(self.times[:2]).sum(axis=0).min()
        virtual = self.degrees.virtual
        # Each stage has a copy. All others are taken to be of the least kind, where the fewest micro-batches are in flight. Example: 2 and
        # 1 in flight, 3 GB of states and 1 GB of activations a copy, 25 GB: the first copies take 5 + 4 GB and each other 4 GB, so 6 fit.
        first_bytes = virtual * states + self.in_flight.sum(axis=-1) * activations
        next_bytes = np.maximum(1.0, states + self.in_flight.min(axis=-1) * activations)
        by_memory = virtual + np.floor((self.budget - first_bytes) / next_bytes).min(axis=-1)
        by_time = np.floor(limit / max(self.degrees.micro_batches * copy_s, 1e-30))
        most: Floats = np.minimum(by_memory, by_time)
        return np.where(most < virtual, 0.0, most)

    def stage_costs(self, copies: Ints, num_slow: Ints | int = 0, slow: _CopiesSearch | None = None) -> list[StageCost]:
        """Return the seconds of each stage of one cut, without waits for the host. `num_slow`, `slow`: as of `num_bytes`."""
        ends = np.cumsum(copies)
        middles, other = ends - num_slow, slow or self
        times = (
            self.times[:, middles] - self.times[:, ends - copies] + other.times[:, ends] - other.times[:, middles]
        ).T
        sends = self.policy.send_s[ends - 1] / 2
        return [
            StageCost(f, b, 0.0, first, last, step + self.policy.stage_s, send, send_bytes=0, peak_bytes=0)
            for (f, b, first, last, step), send in zip(times.tolist(), sends.tolist(), strict=True)
        ]

    def num_bytes(self, copies: Ints, num_slow: Ints | int = 0, slow: _CopiesSearch | None = None) -> Floats:
        """[..., ranks] bytes of a rank's stages: their states, what they keep at the fullest moment, and the highest passing moment.

        The last `num_slow` [..., stages] copies run under the policy of `slow`."""
        ends = np.cumsum(copies, axis=-1)
        begins, middles, other = ends - copies, ends - num_slow, slow or self
        states, activations = (
            self.memory[:, middles] - self.memory[:, begins] + other.memory[:, ends] - other.memory[:, middles]
        )
        kept = self._of_ranks(activations + self.policy.sent_bytes[ends - 1]).T  # [rank, stage of the rank, ...]
        held = (self.in_flight @ kept.reshape(*kept.shape[:2], -1)).max(axis=1).T
        # A rank runs one pass at a time, so the highest passing moment of its stages counts once, and what they hold all.
        passing = np.maximum(self.passing.of(begins, middles), other.passing.of(middles, ends))
        highest = self._of_ranks(passing).max(axis=-2)
        num_bytes: Floats = self._of_ranks(states).sum(axis=-2) + held.reshape(highest.shape) + highest
        return num_bytes

    def fit_by(self, slow: _CopiesSearch, copies: Ints) -> Ints | None:
        """Return how many copies of each stage run under the policy of `slow`, so that all ranks fit; None if not all do.

        A rank that is over the budget gives one copy after the other, of that stage where it saves most: what a copy takes longer does not
        depend on the stage."""
        num_slow, stages = np.zeros_like(copies), np.arange(len(copies))
        ranks = stages % self.degrees.ranks
        while (over := self.num_bytes(copies, num_slow, slow) > self.budget).any():
            may = stages[over[ranks] & (num_slow < copies)]
            if set(ranks[may]) != set(np.flatnonzero(over)):
                return None
            # A row has one copy more of one stage, and what its rank then holds.
            more = num_slow + np.eye(len(copies), dtype=np.int64)[may]
            held = self.num_bytes(np.broadcast_to(copies, more.shape), more, slow)[np.arange(len(may)), ranks[may]]
            for rank in np.flatnonzero(over):
                num_slow[may[np.where(ranks[may] == rank, held, np.inf).argmin()]] += 1
        return num_slow


class _RangeMaximum:
    """The maximum of any range of values, from the maxima of all ranges whose length is a power of two."""

    def __init__(self, values: Floats) -> None:
        # Row k has the maxima of 2^k values from each place on; a range of 6 is covered by its first 4 and its last 4.
        rows = [values]
        while (width := 2 ** (len(rows) - 1)) * 2 <= len(values):
            last, number = rows[-1], len(values) - 2 * width + 1
            row = np.full(len(values), -np.inf)
            row[:number] = np.maximum(last[:number], last[width : width + number])
            rows.append(row)
        self.rows = np.array(rows)

    def of(self, begins: Ints, ends: Ints) -> Floats:
        """Return the maxima of the ranges from `begins` up to `ends`; 0 of those that are empty."""
        lengths = np.maximum(1, ends - begins)
        k = np.frexp(lengths.astype(float))[1] - 1
        first = np.minimum(begins, self.rows.shape[1] - 1)
        maxima: Floats = np.maximum(self.rows[k, first], self.rows[k, first + lengths - 2**k])
        return np.where(ends > begins, maxima, 0.0)
