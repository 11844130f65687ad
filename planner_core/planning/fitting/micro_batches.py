"""Choose the number of micro-batches of a step, and whether blocks are recomputed. Memory decides both.

More micro-batches never make a step of the same layout faster: operators become smaller, and every collective of a micro-batch
is sent more often. But they need less memory, so that a faster layout may fit. So the least step time without a limit of memory
never falls as the number grows:

    least step time with n micro-batches  ≤  least step time with n · p micro-batches        (any memory)

This holds for each mesh. A mesh is left out from the first number on whose least step time is not below the best plan that fits.
The search ends when no mesh is left.

A search for the least communication takes the first number with a plan that fits. More micro-batches only let layouts fit that do
the same work on more GPUs. They send less and take far longer.

Example: a batch of 512 samples. With one micro-batch nothing fits. With two, the best plan that fits recomputes, and takes
9.0 s. With four it takes 8.5 s, without recomputation. With eight, even the best plan of any memory takes 8.6 s. So the answer
is four, and sixteen is not looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import DeviceMesh, Graph, InputError, NoPlanFits, Plan
from planner_core.cost import Component
from planner_core.planning.fitting.mesh_search import MeshSearch, choose_mesh
from planner_core.planning.methods import METHODS
from planner_core.planning.request import MOMENT, THOROUGH, Effort, Progress, Request
from planner_core.planning.session import Planner, meshes, prepare, with_recompute
from planner_core.search import TIE, far_above, fastest, fits_about, least_value, quick, quick_bound
from planner_core.search.algebra import TooWide
from planner_core.search.network import Problem

GraphSource = Graph | Callable[[Request], Graph] | None
"""The graph of a request's model; or a function that makes it for a number of micro-batches; None: that of the zoo or the file."""


@dataclass(frozen=True, slots=True)
class Count:
    """One number of micro-batches: the planner of the request, the same without recomputation, and the meshes that are left."""

    planner: Planner
    plain: Planner
    options: Sequence[DeviceMesh]

    @property
    def micro_batches(self) -> int:
        """The number."""
        return self.planner.workload.accumulate

    @staticmethod
    def of(planner: Planner, options: Sequence[DeviceMesh]) -> Count:
        """The number of micro-batches of a planner."""
        opened = planner.workload.recompute == "auto"
        plain = with_recompute(planner, "none") if opened else planner
        return Count(planner, plain, options)

    def below(self, value: float) -> Count:
        """The same without the meshes on which no plan of any memory is below `value`."""
        if value == np.inf:
            return self
        return replace(self, options=[mesh for mesh in self.options if _below(self.plain, mesh, value)])


def choose_micro_batches(
    request: Request,
    graph: GraphSource,
    say: Progress,
    *,
    search: MeshSearch = choose_mesh,
    effort: Effort | None = None,
) -> tuple[Planner, Plan]:
    """The planner of the best number of micro-batches, and its plan; if nothing fits, the plan of least memory.

    Each number is searched without proof first. That saves the exact searches most of their work. `effort`: what proofs may take; None:
    a moment, or all that it takes where the request says `prove`. Raises NoPlanFits if the user gave a budget that no plan fits, and
    InputError.
    """
    effort = effort or (THOROUGH if request.prove else MOMENT)
    numbers = Numbers(request, graph, say, effort)
    seen: list[Count] = []
    needed: dict[int, float] = {}  # bytes per GPU of the plan of each number of micro-batches, where one was looked for
    count = Count.of(numbers.first, meshes(numbers.first.request, numbers.first.cluster))
    free = best = _without_recomputation(count, search, say)
    if free is None and numbers.several and count.planner.objective() == "time":
        free = best = _with_room(count, numbers, search, say)
    end = free[0].workload.accumulate if free else 0  # larger numbers are not better
    vain = best is None and _in_vain(count, numbers)
    while count.micro_batches != end:
        known = best[0].value(best[1]) if best else np.inf
        count = count.below(known * (1 - TIE))
        if not count.options:
            break
        if seen and (found := _without_recomputation(count, search, say, known)) is not None:
            best = free = found  # of any memory, and it fits: more micro-batches or recomputation would not help
            break
        seen.append(count)
        if numbers.several:
            best, needed[count.micro_batches] = _looked_at(count, best, known, search, say)
            if best is not None and count.planner.objective() == "communication":
                break
        number = numbers.after(count.micro_batches)
        following = numbers.at(numbers.last if vain and number else number)
        if following is None:
            break
        count = Count.of(following, count.options)
    if (
        numbers.several and best is None
    ):  # nothing fits: more work finds no other plan but at the number that needs the least memory
        seen = [min(seen, key=lambda c: needed[c.micro_batches])]
    return _proven(seen, best, free, search, say)


def _looked_at(
    count: Count, best: tuple[Planner, Plan] | None, below: float, search: MeshSearch, say: Progress
) -> tuple[tuple[Planner, Plan] | None, float]:
    """The better of `best` and of a plan of this number, searched without proof; and the bytes per GPU that the latter takes."""
    try:
        plan = search(count.planner, count.options, say, below=below, prove=False)
    except NoPlanFits as error:
        return best, error.needed_bytes
    if plan.fits and (best is None or _better((count.planner, plan), best)):
        best = count.planner, plan
    return best, plan.cost.memory_bytes["peak"]


def _with_room(count: Count, numbers: Numbers, search: MeshSearch, say: Progress) -> tuple[Planner, Plan] | None:
    """The best plan of the first number of micro-batches at which the fastest layout of any memory seems to fit without recomputation;
    None if it does not, or is not the best there. Only smaller numbers can be better.

    Example: 40 GB of weights and states, and 100 GB of activations in one micro-batch. In 60 GB there is room at 8 micro-batches.
    """
    number, room = numbers.after(count.micro_batches), _room(count)
    while 0 < number < room:
        number = numbers.after(number)
    planner = numbers.at(number)
    return _without_recomputation(Count.of(planner, count.options), search, say) if planner else None


def _in_vain(count: Count, numbers: Numbers) -> bool:
    """Whether no number of micro-batches can have a plan that fits. Then the first number or the last has the plan of least memory.

    Activations shrink as the number grows. From two on, gradients stand beside them, as large with each number.
    """
    if not numbers.several or _may_fit(count):
        return False
    last = numbers.at(numbers.last)
    return last is not None and not _may_fit(Count.of(last, count.options))


def _may_fit(count: Count) -> bool:
    """Whether some plan may fit, as far as is known without a search."""
    try:
        problems = _problems(count.planner, count.options)
    except TooWide:
        return True
    return any(p.whole is not None or not far_above(p, count.planner.budget) for p in problems)


def _room(count: Count) -> float:
    """About how many micro-batches make the activations of the fastest layouts fit beside their weights."""
    planner, least = count.plain, np.inf
    with contextlib.suppress(TooWide):
        problems = _problems(planner, count.options)
        for problem in fastest(problems, planner.objective()):
            if (fast := quick(problem, planner.objective())) is not None:
                after_forward, after_backward = fast.totals[[Component.AFTER_FORWARD, Component.AFTER_BACKWARD]]
                left = planner.budget - after_backward
                least = min(least, (after_forward - after_backward) / left if left > 0 else np.inf)
    return count.micro_batches * float(least)


def choose_recomputation(
    planner: Planner, options: Sequence[DeviceMesh], search: MeshSearch, say: Progress
) -> tuple[Planner, Plan]:
    """The best plan. If recomputation is to be chosen, a plan without it is looked for first, since it only saves memory."""
    count = Count.of(planner, options)
    return _without_recomputation(count, search, say) or (planner, search(planner, options, say))


def _without_recomputation(
    count: Count, search: MeshSearch, say: Progress, below: float = np.inf
) -> tuple[Planner, Plan] | None:
    """The best plan of any memory without recomputation if it fits, since no plan is better then; else None."""
    if count.plain is count.planner:
        return None
    planner, objective = count.plain, count.plain.objective()
    try:
        problems = _problems(planner, count.options)
    except TooWide:
        return None
    if any(p.whole is not None for p in problems):  # its bound does not hold for the whole space
        return None
    with planner.clock("search"):
        fast = fastest(problems, objective)
        if not any(fits_about(p, planner.graph, planner.budget, objective) for p in fast):
            return None
        least = least_value(fast, objective) * (1 + TIE)
    with contextlib.suppress(NoPlanFits):
        plan = search(planner, count.options, say, below=min(below, least), prove=False)
        if plan.fits and planner.value(plan) <= least:
            return planner, plan
    return None


def _proven(
    seen: Sequence[Count], best: tuple[Planner, Plan] | None, found: tuple[Planner, Plan] | None, search: MeshSearch,
    say: Progress,
) -> tuple[Planner, Plan]:  # fmt: skip
    """The best plan over the numbers that were looked at, searched exactly, the most promising number first. `found` is the best plan
    of a further number. Raises NoPlanFits."""
    refused: NoPlanFits | None = None
    known = best[0].value(best[1]) * (1 + TIE) if best else np.inf
    for count in sorted(seen, key=lambda c: best is None or c.planner is not best[0]):
        below = min(known, found[0].value(found[1])) if found and found[1].fits else known
        try:
            plan = search(count.planner, count.options, say, below=below)
        except NoPlanFits as error:
            refused = min(refused or error, error, key=lambda e: e.needed_bytes)
            continue
        if found is None or _better((count.planner, plan), found):
            found = count.planner, plan
    if best is not None and (found is None or not found[1].fits):
        return best
    if found is None:
        assert refused is not None
        raise refused
    return found


class Numbers:
    """The numbers of micro-batches to look at, and their planners. The numbers rise, and each divides the next."""

    def __init__(self, request: Request, graph: GraphSource, say: Progress, effort: Effort) -> None:
        self._request, self._graph, self._say, self._effort = request, graph, say, effort
        self.several = request.accumulate is None and not isinstance(graph, Graph)
        self.first = self._planner(replace(request, accumulate=1) if self.several else request)
        self._made: dict[int, Planner | None] = {self.first.workload.accumulate: self.first, 0: None}

    def _planner(self, request: Request, like: Planner | None = None) -> Planner:
        """The planner of one number. It shares the clock and the work of proofs with the planner `like`."""
        graph = self._graph(request) if callable(self._graph) else self._graph
        return prepare(request, graph, self._say, self._effort, like)

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
        """The number that follows: the least product of `number` and a prime that divides the batch; 0 if there is none."""
        left = self.first.workload.batch // number if self.several else 0
        prime = next((p for p in range(2, left + 1) if left % p == 0), 0)
        return number * prime


def _below(planner: Planner, mesh: DeviceMesh, value: float) -> bool:
    """Whether a plan of any memory on one mesh may be below `value`."""
    try:
        problems = _problems(planner, [mesh])
    except TooWide:
        return True
    with planner.clock("search"):
        return any(p.whole is not None or quick_bound(p, planner.objective()) < value for p in problems)


def _problems(planner: Planner, options: Iterable[DeviceMesh]) -> list[Problem]:
    """The networks of the request's method on these meshes, one for each set of ZeRO stages; none on a mesh that does not suit the
    method. Raises TooWide."""
    method = METHODS[planner.request.method]
    return [build() for mesh in options for build in planner.builders(method, mesh)]


def _better(one: tuple[Planner, Plan], other: tuple[Planner, Plan]) -> bool:
    """Whether the first plan is better: a plan that fits is better; then the objective counts; of two that do not fit, memory."""
    (planner, plan), (other_planner, other_plan) = one, other
    if plan.fits != other_plan.fits:
        return plan.fits
    if plan.fits:
        return planner.value(plan) < other_planner.value(other_plan) * (1 - TIE)
    return plan.cost.memory_bytes["peak"] < other_plan.cost.memory_bytes["peak"]
