"""The numbers of micro-batches that a step may have, and the planner of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner_core.core import Graph, InputError
from planner_core.planning.planner import Planner, prepare_planner
from planner_core.planning.request import Effort, Progress, Request
from planner_core.search.algebra import PointAllowance

GraphSource = Graph | Callable[[Request], Graph] | None
"""The graph of a request's model; or a function that makes it for a number of micro-batches; None: that of the zoo or the file."""


class MicroBatchNumbers:
    """The numbers of micro-batches to look at, and their planners. The numbers rise, and each divides the next."""

    def __init__(
        self, request: Request, graph: GraphSource, say: Progress, effort: Effort, like: Planner | None = None
    ) -> None:
        self._request, self._graph, self._say, self.effort = request, graph, say, effort
        self.several = request.accumulate is None and not isinstance(graph, Graph)
        first = self._planner(replace(request, accumulate=1) if self.several else request, like)
        # A request has an allowance of its own: what an earlier one with the same graphs took of its own must not change this answer.
        self.first = replace(first, work=PointAllowance(effort.request))
        # 0 stands for no number that follows, so `at(after(n))` is None at the end.
        self._made: dict[int, Planner | None] = {self.first.workload.accumulate: self.first, 0: None}

    def _planner(self, request: Request, like: Planner | None = None) -> Planner:
        """The planner of one number. It shares the clock and the work of proofs with the planner `like`."""
        graph = self._graph(request) if callable(self._graph) else self._graph
        return replace(prepare_planner(request, graph, self._say, self.effort, like), counts_open=self.several)

    def at(self, number: int) -> Planner | None:
        """The planner of a number; None if a model fixes its batch, so that it has no smaller ones."""
        if number not in self._made:
            asked = replace(self._request, batch=self.first.workload.batch, accumulate=number)
            try:
                self._made[number] = self._planner(asked, self.first)
            except InputError:
                self._made[number] = None
        return self._made[number]

    @property
    def last(self) -> int:
        """The largest number: each micro-batch has one sample."""
        return self.first.workload.batch

    def after(self, number: int) -> int:
        """The number that follows; 0 if there is none."""
        return _next_multiple(number, self.first.workload.batch) if self.several else 0


def _next_multiple(number: int, batch: int) -> int:
    """The least product of a number of micro-batches and a prime that divides the samples of a step; 0 if there is none."""
    # The least divisor above 1 is a prime. Example: 240 samples give 1, 2, 4, 8, 16, 48, 240.
    left = batch // number
    return number * next((p for p in range(2, left + 1) if left % p == 0), 0)


def other_numbers(planner: Planner, source: GraphSource, say: Progress, *, larger: bool) -> Iterator[Planner]:
    """The planners of larger numbers of micro-batches, of which each is a multiple of the one before; or of smaller ones."""
    number, batch = planner.workload.accumulate, planner.workload.batch
    while number := _next_multiple(number, batch) if larger else _previous_divisor(number):
        asked = replace(planner.request, batch=batch, accumulate=number)
        try:
            yield prepare_planner(asked, source(asked) if callable(source) else source, say, planner.effort, planner)
        except InputError:  # a model that fixes its batch has no smaller micro-batches
            return


def open_numbers(
    request: Request, planner: Planner, source: GraphSource, say: Progress, *, larger: bool
) -> Iterator[Planner]:
    """The planners of larger (or smaller) numbers of micro-batches than that of `planner`, if the request leaves the number open."""
    if request.accumulate is None and request.micro_batch is None and not isinstance(source, Graph):
        yield from other_numbers(planner, source, say, larger=larger)


def _previous_divisor(number: int) -> int:
    """A number of micro-batches by its least prime; 0 if it is 1."""
    return next((number // p for p in range(2, number + 1) if number % p == 0), 0)
