"""The numbers of micro-batches that a step may have, the planner of each, and what is known of its memory before a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import DeviceMesh, Graph, InputError
from planner_core.cost import Component
from planner_core.planning.methods import METHODS
from planner_core.planning.planner import Planner, prepare_planner, with_any_samples, with_recompute
from planner_core.planning.request import Effort, Progress, Request
from planner_core.search import no_plan_fits, possible_winners, search_roughly
from planner_core.search.algebra import PointAllowance, TooWide
from planner_core.search.network import Problem

GraphSource = Graph | Callable[[Request], Graph] | None
"""The graph of a request's model; or a function that makes it for a number of micro-batches; None: that of the zoo or the file."""


class MicroBatchNumbers:
    """The numbers of micro-batches that a step may have, and the planner of each, prepared when it is asked for first.

    `first`: the planner of the number at hand, with which the others share graphs, clock and work. `several`: whether there are others.
    """

    def __init__(self, first: Planner, source: GraphSource, report_progress: Progress, *, several: bool) -> None:
        self.first, self.several = replace(first, counts_open=several), several
        self._source, self._report_progress = source, report_progress
        own = first.workload
        # 0 stands for no number that follows, so `at(after(n))` is None at the end.
        self._planners: dict[int, Planner | None] = {own.accumulate: self.first, 0: None}
        self._under: dict[tuple[int, str], Planner] = {(own.accumulate, own.recompute): self.first}

    @staticmethod
    def of_request(
        request: Request,
        source: GraphSource,
        report_progress: Progress,
        effort: Effort,
        earlier_planner: Planner | None = None,
    ) -> MicroBatchNumbers:
        """Return the numbers of a request, from one micro-batch on where it leaves the number open. The `earlier_planner` is that
        of `prepare_planner`."""
        several = leaves_number_open(request, source)
        asked = replace(request, accumulate=1) if several else request
        first = prepare_planner(
            asked, source(asked) if callable(source) else source, report_progress, effort, earlier_planner
        )
        # A request has an allowance of its own: what an earlier one with the same graphs took of its own must not change this answer.
        return MicroBatchNumbers(
            replace(first, work=PointAllowance(effort.request)), source, report_progress, several=several
        )

    @staticmethod
    def around(planner: Planner, request: Request, source: GraphSource, report_progress: Progress) -> MicroBatchNumbers:
        """Return the number of a planner of the `request`, and all others if the request leaves them open."""
        several = leaves_number_open(request, source) and request.micro_batch is None
        return MicroBatchNumbers(planner, source, report_progress, several=several)

    def at(self, number: int) -> Planner | None:
        """Return the planner of a number; None if a model fixes its batch, so that it has no smaller micro-batches."""
        if number not in self._planners:
            asked = replace(self.first.request, batch=self.last, accumulate=number)
            try:
                graph = self._source(asked) if callable(self._source) else self._source
                planner = prepare_planner(asked, graph, self._report_progress, self.first.effort, self.first)
                self._planners[number] = replace(planner, counts_open=self.several)
            except InputError:
                self._planners[number] = None
        return self._planners[number]

    def under(self, number: int, recompute: str) -> Planner:
        """Return the planner of a number that has one, with another choice of recomputation."""
        if (key := (number, recompute)) not in self._under:
            planner = self.at(number)
            assert planner is not None
            own = planner.workload.recompute
            self._under[key] = planner if own == recompute else with_recompute(planner, recompute)
        return self._under[key]

    @property
    def prepared(self) -> list[Planner]:
        """The planners so far."""
        return [planner for planner in self._planners.values() if planner is not None]

    @property
    def last(self) -> int:
        """The largest number: each micro-batch has one sample."""
        return self.first.workload.batch

    def after(self, number: int) -> int:
        """Return the least product of a number and a prime that divides the samples of a step; 0 if there is none."""
        # The least divisor above 1 is a prime. Example: 240 samples give 1, 2, 4, 8, 16, 48, 240.
        samples = self.last // number if self.several else 1
        return number * _least_prime(samples) if samples > 1 else 0

    def before(self, number: int) -> int:
        """Return a number by its least prime; 0 if it is 1."""
        return number // _least_prime(number) if self.several and number > 1 else 0

    def larger_than(self, number: int) -> Iterator[int]:
        """Yield the numbers after this one as far as they have planners. Each divides the next."""
        while self.at(number := self.after(number)) is not None:
            yield number

    def smaller_than(self, number: int) -> Iterator[int]:
        """Yield the numbers before this one as far as they have planners. Each is a multiple of the next."""
        while self.at(number := self.before(number)) is not None:
            yield number


def leaves_number_open(request: Request, source: GraphSource) -> bool:
    """Return whether a request leaves the number of micro-batches open. A graph holds one micro-batch of a number that is fixed."""
    return request.accumulate is None and not isinstance(source, Graph)


def _least_prime(number: int) -> int:
    """Return the least prime that divides a number above 1."""
    return next(p for p in range(2, number + 1) if number % p == 0)


@dataclass(frozen=True, slots=True)
class MicroBatchCandidate:
    """One number of micro-batches: the planner of the request, the same without recomputation, and the meshes that are left. The least
    step times of the planner `bounding` hold for multiples of the number too."""

    planner: Planner
    plain: Planner
    bounding: Planner
    options: Sequence[DeviceMesh]

    @property
    def micro_batches(self) -> int:
        """The number."""
        return self.planner.workload.accumulate

    @staticmethod
    def of(planner: Planner, options: Sequence[DeviceMesh]) -> MicroBatchCandidate:
        """Return the number of micro-batches of a planner."""
        plain = with_recompute(planner, "none") if planner.workload.recompute == "auto" else planner
        if planner.spaces:
            holds_for_multiples = all(space.layout.cp == 1 for space in planner.spaces)
        else:
            holds_for_multiples = planner.workload.graph_batch % planner.cluster.num_gpus == 0
        bounding = plain if holds_for_multiples else with_any_samples(plain)
        return MicroBatchCandidate(planner, plain, bounding, options)


def no_number_can_fit(candidate: MicroBatchCandidate, numbers: MicroBatchNumbers) -> bool:
    """Return whether no number of micro-batches can have a plan that fits."""
    if not numbers.several or _some_plan_may_fit(candidate):
        return False
    others = list_least_memory_numbers(candidate, numbers)
    return bool(others) and not any(_some_plan_may_fit(one) for one in others)


def list_least_memory_numbers(candidate: MicroBatchCandidate, numbers: MicroBatchNumbers) -> list[MicroBatchCandidate]:
    """Return the numbers of which one has the plan of least memory, if the first has not: those that give each data rank one sample.

    Activations shrink as the number grows, while every data rank has a sample. From two on, gradients stand beside them, as large with
    each number. Where nothing bounds the plans, GPUs may repeat the work of a single sample, so the last number takes the least. A tool's
    data ranks cannot: each number of ranks takes the least at its own number, on the meshes that have as many. Example: 128 samples on 64
    GPUs by Megatron-LM. Llama-3-70B fits without recomputation on 8 data x 8 tensor ranks with 16 micro-batches alone. With 2, as 64 ranks
    need, nothing fits, and 128 of one sample cannot be dealt out.
    """
    meshes: dict[int, set[tuple[int, ...]]] = {}
    for space in candidate.planner.spaces:
        if numbers.last % space.layout.data == 0:
            meshes.setdefault(numbers.last // space.layout.data, set()).add(space.mesh.axis_sizes)
    every = {mesh.axis_sizes for mesh in candidate.options}
    if not candidate.planner.spaces:
        meshes[numbers.last] = every
    planners = {n: numbers.at(n) for n in sorted(meshes) if meshes[n] & every}
    return [
        MicroBatchCandidate.of(planner, [mesh for mesh in candidate.options if mesh.axis_sizes in meshes[n]])
        for n, planner in planners.items()
        if planner is not None
    ]


def _some_plan_may_fit(candidate: MicroBatchCandidate) -> bool:
    """Return whether some plan may fit, as far as is known without a search."""
    # One mesh decides mostly, and the networks of the others take long.
    for mesh in candidate.options:
        problems = build_problems(candidate.planner, [mesh])
        if problems is None:
            return True
        if any(p.unrestricted is not None or not no_plan_fits(p, candidate.planner.budget) for p in problems):
            return True
    return False


def least_sum_of_bytes(candidate: MicroBatchCandidate) -> float:
    """Return the bytes per GPU that no sum of a plan of this number is below; infinite if it has no plan."""
    problems = build_problems(candidate.planner, candidate.options) or ()
    return min((p.least_bytes for p in problems if not p.is_infeasible), default=math.inf)


def micro_batches_that_fit(candidate: MicroBatchCandidate) -> float:
    """About how many micro-batches make the activations of the fastest layouts fit beside their weights."""
    # Without recomputation: with it almost any layout keeps few activations, and the number would say nothing of its speed.
    planner, least_factor = candidate.plain, np.inf
    for problem in possible_winners(build_problems(planner, candidate.options) or (), planner.objective()):
        if (fast := search_roughly(problem, planner.objective())) is not None:
            after_forward, after_backward = fast.totals[[Component.AFTER_FORWARD, Component.AFTER_BACKWARD]]
            room = planner.budget - after_backward
            # What backward frees are activations. Example: 140 GB after forward and 40 after backward, in 60 GB: 100 / (60 - 40) = 5.
            least_factor = min(least_factor, (after_forward - after_backward) / room if room > 0 else np.inf)
    return candidate.micro_batches * float(least_factor)


def build_problems(planner: Planner, options: Iterable[DeviceMesh]) -> list[Problem] | None:
    """Return the networks of the request's method on these meshes, one for each set of ZeRO stages; none on a mesh that does not suit the
    method. None if the tables of one would be too large."""
    method = METHODS[planner.request.method]
    try:
        return [build() for mesh in options for build in planner.builders(method, mesh)]
    except TooWide:
        return None
