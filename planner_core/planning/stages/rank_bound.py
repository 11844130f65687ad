"""A bound on every cut of some degrees that holds each rank's time and memory together.

A copy that runs on a rank with k micro-batches in flight takes t seconds of a step, its weights, gradients and states take s bytes, and
a micro-batch of it keeps a bytes. At a price of x seconds per byte, no copy, in whatever placements and with whatever recomputation, is
cheaper than

    least(x, k) = min over all plans of a copy of   t + x · (s + k a)

A cut that takes less than T seconds leaves a rank T - d seconds, where d passes while its first micro-batch comes from the stages before
and the last gradient goes back to them, with the sends between; and it has B bytes. So for every price the rank has at most

    (T - d + x B) / least(x, k)     copies, which are whole

If these are fewer than the model's copies on all ranks together, no cut takes less than T seconds. The bound is the least T that is left,
or the evenly dealt work with the ranks' mean wait (`PipelineDegrees.mean_wait_s`), where that is more.

Example: a copy takes 3 s and 2 GB, or 4 s and 1 GB where it recomputes, with one micro-batch in flight; 2 ranks of 4 GB, 7 copies. In
12 s each rank computes 4 copies of 3 s, but 4 of them take 8 GB. At 1 s per GB a copy costs 5 in both ways, and a rank has 12 + 4 = 16, for
3 copies. In 16 s it has 20, for the 4 copies of which one rank needs as many.

The first rank has the embedding too and the last one the head, whose seconds are taken from its T. The optimizer and traffic of once a
step are left out, and so are the memory of embedding and head, the highest moments of a pass, waits for hosts, and that stages of few
copies do not divide the work evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner_core.core import Pipeline
from planner_core.cost import Component, Floats, Shares, in_flight_at_once
from planner_core.planning.stages.degrees import PipelineDegrees
from planner_core.search import Problem, least_copy_costs, least_costs_at_ends

PRICES = (0.0, 0.15, 0.4, 1.0)
"""Prices of memory at which the bound is taken, as shares of a rank's seconds per byte of its memory. Twice as many raise it by 0.2 %."""
MIDDLE_IN_FLIGHT = 4
"""Micro-batches in flight for which the least costs are found, beside one and one for each rank."""
PRECISION = 1e-4
"""How near to the least T the bound is, as a share."""


@dataclass(frozen=True, slots=True)
class RankBound:
    """The least costs of a copy on the mesh of a rank.

    Attributes:
        budget: Bytes of a GPU.
        in_flight: Numbers of micro-batches in flight for which the least costs are known.
        prices: Seconds per byte.
        least_costs: [in flight, price] the least cost of a copy, in seconds of a step.
        pass_s: The least seconds of a copy's forward and backward, of all micro-batches.
        ends_s: Those of what stands before the first copy (an embedding) and behind the last one (a head and its loss).
        buffer: Whether gradients stand all through a step.
    """

    budget: float
    in_flight: Floats
    prices: Floats
    least_costs: Floats
    pass_s: float
    ends_s: tuple[float, float] = (0.0, 0.0)
    buffer: bool = False

    def least_step_s(self, d: PipelineDegrees, copies: int, send_s: float = 0.0) -> float:
        """Return the seconds that no cut of a model of so many copies takes less than. `send_s`: the least of a send and its gradient's."""
        # A minimum of functions that are linear in the number in flight is concave, so a chord is not above it; and no number in flight
        # makes a copy cheaper than a smaller one does.
        least_costs = np.stack(
            [np.interp(self._in_flight(d), self.in_flight, column) for column in self.least_costs.T], axis=-1
        )
        low = (copies * self.pass_s + sum(self.ends_s)) / d.ranks + d.mean_wait_s(self.pass_s / d.micro_batches, send_s)
        high = low
        while not self._may_take(high, d, copies, least_costs, send_s):
            low, high = high, 2 * high
            if high > 1e9 * self.pass_s:
                return np.inf  # no time is enough: a rank lacks the memory of one copy
        while high > low * (1 + PRECISION):
            middle = (low + high) / 2
            low, high = (low, middle) if self._may_take(middle, d, copies, least_costs, send_s) else (middle, high)
        return low

    def _may_take(self, seconds: float, d: PipelineDegrees, copies: int, least_costs: Floats, send_s: float) -> bool:
        """Return whether ranks as full as `seconds` and their memory allow hold all copies. `least_costs`: [rank, moment, its stage,
        price]."""
        rank = np.arange(d.ranks)
        before = rank * 1.0  # each stage before has a copy
        while True:
            left_s = seconds - before * self.pass_s / d.micro_batches - rank * send_s
            left_s[[0, -1]] -= self.ends_s
            room = left_s[:, None, None] + self.prices * self.budget
            # Each stage of a rank has one copy. The others are cheapest where the fewest micro-batches are in flight.
            more = np.floor((room - least_costs.sum(axis=2)) / least_costs.min(axis=2) + 1e-9).min(axis=(1, 2))
            most = d.virtual + more
            if more.min() < 0 or most.sum() < copies or seconds < self._mean_step_s(d, copies, most, send_s):
                return False
            if d.virtual > 1:  # other stages of a rank follow behind
                return True
            # What this rank and those behind it cannot hold is before it, and delays it. Example: 7 copies, at most 2 a rank: the third of
            # four ranks has 3 before it at least.
            previous, before = before, np.maximum(before, copies - np.cumsum(most[::-1])[::-1])
            if np.array_equal(previous, before):
                return True

    def _in_flight(self, d: PipelineDegrees) -> Floats:
        """[rank, moment, stage of a rank] micro-batches in flight while the gradients of all stages of the rank stand."""
        # Before the first backward PyTorch has none. Example: of 4 micro-batches on 4 ranks the first rank holds 4 then, and 3 with
        # gradients; under a buffer of gradients it holds 4 with them.
        begun = not self.buffer
        if d.virtual == 1:
            return np.minimum(d.micro_batches - begun, d.ranks - np.arange(d.ranks))[:, None, None].astype(float)
        pipeline = Pipeline(d.ranks, d.schedule, (1,) * (d.ranks * d.virtual))
        return in_flight_at_once(pipeline, d.micro_batches, begun=begun).astype(float)

    def _mean_step_s(self, d: PipelineDegrees, copies: int, most: Floats, send_s: float) -> float:
        """Return the work and the waits of the mean rank, in the mean of all turns, if no rank has more than `most` [rank] copies.

        Where `PipelineDegrees.mean_wait_s` takes a copy a stage, here in each turn the copies of a rank delay all ranks behind it. They
        delay least if the last ranks have as many as they can. Example: 2 ranks of two stages, 8 copies of 1 s a micro-batch, at most 5 on
        a rank: the first rank has 3 copies, which delay the other one, so the mean rank waits 3 s / 2 ranks / 2 turns."""
        if d.virtual > 1 and d.micro_batches % d.ranks:
            return 0.0
        behind = np.arange(d.ranks)[::-1]
        behind_most = np.cumsum(most[::-1])[::-1] - most
        dealt = np.clip(copies - behind_most, 0, most)
        delays_s = float((behind * dealt).sum()) / d.virtual * self.pass_s / d.micro_batches
        sends = (d.virtual - 1) / 2 * d.ranks + (d.ranks - 1) / 2
        return (copies * self.pass_s + sum(self.ends_s) + delays_s) / d.ranks + sends * send_s


def rank_bound(problem: Problem, budget: float, ranks: int, copies: int) -> RankBound:
    """Find the least costs of a copy of a network, whose sums of memory are of no plan above what a GPU holds."""
    # The side of the maxima that computes bounds them (`cost.step_time`). Traffic of once a step hides in bubbles, and what is done once
    # a step delays no other rank, so both are left out.
    weights = problem.model.step_time.linear(Shares()).array()
    weights[[Component.FORWARD_ONCE, Component.BACKWARD_ONCE, Component.STEP]] = 0.0

    def least_cost(in_flight: int, price: float) -> float:
        # When backward ends no activation is left, so the difference of the two ends is what one micro-batch keeps:
        # s + k a = k (s + a) - (k - 1) s.
        weights[Component.AFTER_FORWARD] = price * in_flight
        weights[Component.AFTER_BACKWARD] = -price * (in_flight - 1)
        return min(least_copy_costs(problem, weights).values())

    pass_s = least_cost(1, 0.0)
    prices = np.array(PRICES) * copies * pass_s / ranks / budget
    in_flight = sorted({1, min(MIDDLE_IN_FLIGHT, ranks), ranks})
    least_costs = [[pass_s, *(least_cost(k, price) for price in prices[1:])] for k in in_flight]
    weights[[Component.AFTER_FORWARD, Component.AFTER_BACKWARD]] = 0.0
    ends_s = least_costs_at_ends(problem, weights)
    return RankBound(
        budget,
        np.array(in_flight, dtype=float),
        prices,
        np.array(least_costs),
        pass_s,
        ends_s,
        problem.model.software.gradient_buffer,
    )
