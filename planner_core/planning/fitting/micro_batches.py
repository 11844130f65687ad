"""How many micro-batches a step should have, and whether blocks should be recomputed: what memory decides.

More micro-batches never make a step faster by themselves: of the same layout, compute is cut into smaller operators, every
collective of a micro-batch is sent more often, and each starts anew. They make it smaller, so that a faster layout fits.
So the least step time without a limit of memory never falls as micro-batches are split further, and the search ends where
it is no less than the best plan that fits.

Example: a batch of 512. In one micro-batch nothing fits; in two the best plan takes 9.0 s, recomputing; in four 8.5 s, without;
in eight even a plan of any memory takes 8.6 s: four it is, and sixteen need not be looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import DeviceMesh, Graph, InputError, NoPlanFits, Plan
from planner_core.planning.methods import METHODS, Method
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import Planner, meshes, prepare, with_recompute
from planner_core.search import TIE, search
from planner_core.search.algebra import MAX_WORK, TooWide

Choose = Callable[..., Plan]
"""The best plan of a planner over meshes, told how it goes on; `below`: a value that is known, above which nothing matters;
`prove`: else the gap that prices of memory leave stays. Raises NoPlanFits."""


Source = Graph | Callable[[Request], Graph] | None
"""The graph of a request's model; or what gives it for a number of micro-batches; None: the zoo's or the file's own."""


@dataclass(frozen=True, slots=True)
class Count:
    """One number of micro-batches: the planner of what was asked, one without recomputation, and the meshes."""

    planner: Planner
    plain: Planner
    options: Sequence[DeviceMesh]

    @staticmethod
    def of(planner: Planner) -> Count:
        """The count that a planner is for."""
        opened = planner.workload.recompute == "auto"
        plain = with_recompute(planner, "none") if opened else planner
        return Count(planner, plain, meshes(planner.request, planner.cluster))


def settle(
    request: Request, graph: Source, choose: Choose, say: Progress, work: int = MAX_WORK
) -> tuple[Planner, Plan]:
    """The planner of the number of micro-batches that is best, and its plan; the plan of least memory where nothing fits. `work`
    as in `search`.

    Each number is looked at without proof first. What that finds spares the exact searches most of their work.

    Raises NoPlanFits where an explicit budget is below every plan's need, and InputError.
    """
    best: tuple[Planner, Plan] | None = None
    seen: list[Count] = []
    several = request.accumulate is None and not isinstance(graph, Graph)
    for count in map(Count.of, _planners(request, graph, say, work)):
        if best is not None and _least(count.plain, count.options) >= _value(best[1]) * (1 - TIE):
            break
        free = _without_recomputation(count, choose, say, _value(best[1]) if best else np.inf)
        if free is not None:  # not even recomputation would help: memory sets no limit here
            return free
        seen.append(count)
        if several:
            with contextlib.suppress(NoPlanFits):
                found = choose(
                    count.planner, count.options, say, below=_value(best[1]) if best else np.inf, prove=False
                )
                if found.fits and (best is None or _better(found, best[1])):
                    best = count.planner, found
    return _proven(seen, best, choose, say)


def choose_recomputation(
    planner: Planner, options: Sequence[DeviceMesh], choose: Choose, say: Progress
) -> tuple[Planner, Plan]:
    """The best plan; where recomputation is open, first without, since it only saves memory."""
    count = replace(Count.of(planner), options=options)
    return _without_recomputation(count, choose, say) or (planner, choose(planner, options, say))


def _without_recomputation(
    count: Count, choose: Choose, say: Progress, below: float = np.inf
) -> tuple[Planner, Plan] | None:
    """The best plan of any memory without recomputation, if it fits: nothing is better then."""
    if count.plain is count.planner:
        return None
    with contextlib.suppress(NoPlanFits):
        plan = choose(count.plain, count.options, say, below=below, prove=False)
        if plan.fits and _value(plan) <= _least(count.plain, count.options) * (1 + TIE):
            return count.plain, plan
    return None


def _proven(
    seen: Sequence[Count], best: tuple[Planner, Plan] | None, choose: Choose, say: Progress
) -> tuple[Planner, Plan]:
    """The best of the numbers that were looked at, the most promising first. Raises NoPlanFits."""
    refused: NoPlanFits | None = None
    found: tuple[Planner, Plan] | None = None
    known = _value(best[1]) * (1 + TIE) if best else np.inf
    for count in sorted(seen, key=lambda c: best is None or c.planner is not best[0]):
        below = min(known, _value(found[1])) if found and found[1].fits else known
        try:
            plan = choose(count.planner, count.options, say, below=below)
        except NoPlanFits as error:
            refused = min(refused or error, error, key=lambda e: e.needed_bytes)
            continue
        if found is None or _better(plan, found[1]):
            found = count.planner, plan
    if found is None and best is not None:
        return best
    if found is None:
        assert refused is not None
        raise refused
    return found


def _planners(request: Request, graph: Source, say: Progress, work: int) -> Iterator[Planner]:
    """One planner for each number of micro-batches to look at, rising; each divides the next."""
    if request.accumulate is not None or isinstance(graph, Graph):
        yield prepare(request, graph(request) if callable(graph) else graph, say, work)
        return
    count = 1
    while count:
        try:
            asked = replace(request, accumulate=count)
            planner = prepare(asked, graph(asked) if callable(graph) else None, say, work)
        except InputError:
            if count == 1:
                raise
            return  # a model that fixes its batch has no smaller ones
        request = replace(request, batch=planner.workload.batch)
        yield planner
        count = _next(count, planner.workload.batch)


def _next(count: int, batch: int) -> int:
    """The least multiple of `count` by a prime that divides the batch; 0 where there is none."""
    left = batch // count
    prime = next((p for p in range(2, left + 1) if left % p == 0), 0)
    return count * prime


def _least(planner: Planner, options: Sequence[DeviceMesh]) -> float:
    """A lower bound on the objective whatever the memory, over the meshes."""
    method = METHODS[planner.request.method]
    return min((_bound(planner, mesh, method) for mesh in options), default=float("inf"))


def _bound(planner: Planner, mesh: DeviceMesh, method: Method) -> float:
    restrict = method.restrict(planner.graph, mesh)
    if restrict is None:
        return float("inf")
    try:
        problem = planner.problem(mesh, restrict, zero=method.zero, uniform=method.uniform, by_volume=method.by_volume)
    except TooWide:
        return 0.0
    if problem.whole is not None or method.by_volume:  # not a bound of the whole space, or not of seconds
        return 0.0
    return search(problem, objective=method.objective or planner.request.objective).bound


def _value(plan: Plan) -> float:
    return plan.cost.seconds(plan.objective)


def _better(plan: Plan, other: Plan) -> bool:
    """Fitting first, then the objective; of plans that do not fit the smaller."""
    if plan.fits != other.fits:
        return plan.fits
    if plan.fits:
        return _value(plan) < _value(other) * (1 - TIE)
    return plan.cost.memory_bytes["peak"] < other.cost.memory_bytes["peak"]
