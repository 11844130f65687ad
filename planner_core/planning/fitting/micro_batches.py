"""Choose the number of micro-batches of a step, and whether blocks are recomputed. Memory decides both.

More micro-batches never make a step of the same layout faster: operators become smaller, and every collective of a micro-batch
is sent more often. But they need less memory, so that a faster layout may fit. So the least step time without a limit of memory
never falls as the number grows:

    least step time with n micro-batches  ≤  least step time with n · p micro-batches        (any memory)

This holds for each mesh. A mesh is left out from the first number on whose least step time is not below the best plan that fits.
The search ends when no mesh is left. Where a micro-batch gives each GPU a sample, what context ranks do is done at least as quickly by
ranks with samples of their own. Where it does not, or a tool's layout has context ranks, the least step time is that of a larger space
(`ops.free_tokens`): beside experts, context ranks take one sample of a rank at once, which a larger number of micro-batches alone may give.

A search for the least communication takes the first number with a plan that fits. More micro-batches only let layouts fit that do
the same work on more GPUs. They send less and take far longer.

Example: a batch of 512 samples. With one micro-batch nothing fits. With two, the best plan that fits recomputes, and takes
9.0 s. With four it takes 8.5 s, without recomputation. With eight, even the best plan of any memory takes 8.6 s. So the answer
is four, and sixteen is not looked at.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner_core.core import DeviceMesh, NoPlanFits, NoteKind, Plan, divisors
from planner_core.planning.fitting.mesh_search import MeshSearch, choose_mesh, mesh_of_quick_plan, with_lower_bound
from planner_core.planning.fitting.micro_batch_numbers import (
    GraphSource,
    MicroBatchCandidate,
    MicroBatchNumbers,
    build_problems,
    least_sum_of_bytes,
    list_least_memory_numbers,
    micro_batches_that_fit,
    no_number_can_fit,
)
from planner_core.planning.fitting.shortage import least_state_bytes, states_can_fit
from planner_core.planning.planner import Planner, candidate_meshes
from planner_core.planning.request import MOMENT, THOROUGH, Effort, Progress, Request
from planner_core.search import (
    FIRST_BUDGET_FACTOR,
    TIE,
    bound_of_whole_space,
    least_value_bound,
    memory_bytes,
    possible_winners,
    rough_plan_fits,
    search_roughly,
)

ShowFirst = Callable[[Planner, Plan], None]
"""Gets a first plan, and a planner of its model whose graphs serve again."""
GOOD_GAP = 0.4
"""A plan at most this share above its bound is shown before the other numbers are looked at."""
MOST_BETWEEN = 3
"""Numbers that the steps passed over and that are looked at, where no proof is asked for."""
NEAR_LEAST = 1.5
"""A plan that does not fit is good enough if it takes at most so many times what evenly shared weights, gradients and states take."""
HARDLY_FITS = 0.99
"""If evenly shared weights, gradients and states take more than this share of the budget, a plan that fits is rare."""


def choose_micro_batches(
    request: Request,
    graph: GraphSource,
    say: Progress,
    *,
    search: MeshSearch = choose_mesh,
    effort: Effort | None = None,
    like: Planner | None = None,
    show_first: ShowFirst = lambda planner, plan: None,
) -> tuple[Planner, Plan]:
    """Return the planner of the best number of micro-batches, and its plan; if nothing fits, the plan of least memory.

    Each number is searched without proof first. That saves the exact searches most of their work. The plan's bound holds for all numbers.
    `effort`: what proofs may take; None: a moment, or all that it takes where the request says `prove`. `like`: an earlier planner of the
    same model, whose graphs serve again. `show_first` gets one plan as soon as a good one is known, at the latest that of the search
    without proof, with a bound that holds for all numbers; where nothing can fit, that of least memory with the first number. Raises
    NoPlanFits if the user gave a budget that no plan fits, and InputError.
    """
    effort = effort or (THOROUGH if request.prove else MOMENT)
    numbers = MicroBatchNumbers.of_request(request, graph, say, effort, like)
    return _MicroBatchSearch(numbers, search, say, show_first).run()


class _MicroBatchSearch:
    """One choice of the number of micro-batches, and what is known of each number that was looked at.

    `best`: the best plan that fits. `free`: the best plan of any memory of a number, where it fits: no multiple of that number is better.
    """

    def __init__(self, numbers: MicroBatchNumbers, search: MeshSearch, say: Progress, show_first: ShowFirst) -> None:
        self.numbers, self.search, self.say = numbers, search, say
        self._show_first: ShowFirst | None = show_first
        self.best: tuple[Planner, Plan] | None = None
        self.free: tuple[Planner, Plan] | None = None
        self.seen: list[MicroBatchCandidate] = []
        self._candidates: dict[int, MicroBatchCandidate] = {}
        self.needed: dict[int, float] = {}
        """Bytes per GPU of the plan of each number, where one was looked for."""
        self.least: dict[int, float] = {}
        """A value that no plan of a number or of a multiple of it is below, whatever its memory."""
        self.least_on: dict[int, dict[DeviceMesh, float]] = {}
        """As `least`, by number and mesh."""
        self.bounds: dict[int, float] = {}
        """A value that no plan of a number that fits is below."""
        self.floor = 0.0
        """A value that no plan of any number is below, whatever its memory."""
        self.states_fit = states_can_fit(numbers.first)
        """Whether weights, gradients and states fit if all GPUs share them evenly. If not, no plan fits, and no time has to be bounded."""

    @property
    def known(self) -> float:
        """The value of the best plan that fits."""
        return self.best[0].value(self.best[1]) if self.best else np.inf

    def show(self, plan: Plan) -> None:
        """Show a plan, unless one was shown already."""
        if self._show_first is not None:
            self._show_first(self.numbers.first, plan)
        self._show_first = None

    def show_if_good(self, plan: Plan) -> None:
        """Show a plan whose bound for all numbers says that it is a good one.

        The other numbers mostly raise its bound alone. Example: Llama-3.1-405B on 512 H100 has its best plan after 3 s, with a bound 27 %
        below it, and after 6 s a bound of 1.3 %.
        """
        if plan.bound is not None and plan.cost.gpu_time_s <= plan.bound * (1 + GOOD_GAP):
            self.show(plan)

    def run(self) -> tuple[Planner, Plan]:
        """Return the best plan over all numbers, with a bound that holds for all of them."""
        numbers = self.numbers
        count = self._candidate(numbers.first, candidate_meshes(numbers.first.request, numbers.first.cluster))
        if self.states_fit and (answer := self._unlimited_best_if_fits(count)):
            self._keep_unlimited(answer, count)
        if self.states_fit and self.free is None and numbers.several and count.planner.objective() == "time":
            room, gpus = micro_batches_that_fit(count), count.planner.cluster.num_gpus
            room = room if room < np.inf else self.numbers.last / gpus  # else about one sample for each GPU at once
            # A good plan makes the searches of all other numbers short. With less than a sample for each GPU it is no good one: Llama-3-70B
            # with 16 samples on 16 H100 takes 5.1 s with one micro-batch and recomputation, and 9.6 s with 16.
            if not no_number_can_fit(count, numbers):
                self.floor = min(self._bounds_on_meshes(count).values(), default=0.0)
                self._look_near(min(room, numbers.last / gpus), count.options, most=1)
            self._look_in_steps(count)
            if self.best is not None:
                self._look_near(
                    room, count.options, MOST_BETWEEN if numbers.first.effort is not THOROUGH else numbers.last
                )
        else:
            self._look_in_steps(count)
        if not self.seen and self.best is None:
            self.seen = [count]  # no mesh has a plan at all, which the search says
        elif numbers.several and self.best is None:
            # Nothing fits: more work finds another plan at most at the number that needs the least memory.
            self.seen = [min(self.seen, key=lambda c: self.needed[c.micro_batches])]
        if self.best is not None:
            self.show(self._over_all(*self.best)[1])
        answer = self._over_all(*self._search_exactly())
        self.show(answer[1])
        return answer

    @property
    def _last_useful(self) -> int:
        """The number of which no multiple is better; 0 if there is none."""
        return self.free[0].workload.accumulate if self.free else 0

    def _look_in_steps(self, count: MicroBatchCandidate) -> None:
        """Look at numbers of which each divides the next, the least first, until no mesh may be better with more of them."""
        # Where no number fits, few numbers beside the first can have the plan of least memory: all others are passed over.
        vain = self.best is None and (not self.states_fit or no_number_can_fit(count, self.numbers))
        options = count.options
        if vain and self._ends_on_one_axis(count):
            return
        while count.micro_batches != self._last_useful:
            if count.micro_batches not in self.least:
                options, plan = self._look_at(count)
                # That nothing fits is the answer. Another number, whose graph may have to be captured first, decides by how much alone.
                if vain and plan is not None:
                    self.show(plan)
            if not options or (self.best and count.planner.objective() == "communication"):
                return
            following = None if vain else self.numbers.at(self.numbers.after(count.micro_batches))
            if following is None:
                break
            count = self._candidate(following, options)
        if vain and self.numbers.several:
            others = [c for c in list_least_memory_numbers(count, self.numbers) if c.micro_batches not in self.least]
            if others:
                self._look_at(min(others, key=least_sum_of_bytes))

    def _ends_on_one_axis(self, count: MicroBatchCandidate) -> bool:
        """Show the plan of least memory on the mesh of one axis, where nothing can fit: that is the answer. Returns whether other meshes
        and numbers can change hardly by how much."""
        # Their networks take most of the time. Example: DeepSeek-V4 on 16 H100 says after 2.5 s and not after 5 that no plan fits.
        one_axis = [mesh for mesh in count.options if len(mesh.axis_sizes) == 1]
        # Who states a budget, or asks for a proof, is told of the very least.
        may_end = not self.states_fit and self.numbers.first.effort is not THOROUGH
        if not one_axis or len(count.options) == 1 or not (may_end or self._show_first):
            return False
        count = replace(count, options=one_axis)
        plan, needed = self._plan_number(count)
        if plan is None:
            return False
        self.show(plan)
        # Evenly shared states bound every mesh and number.
        if not may_end or needed > NEAR_LEAST * least_state_bytes(count.planner):
            return False
        self.seen.append(count)
        self.needed[count.micro_batches] = needed
        return True

    def _show_plan_on_best_mesh(self, count: MicroBatchCandidate, least: Mapping[DeviceMesh, float]) -> None:
        """Show the plan of the mesh that has the `least` bound before the other meshes of a number are searched, if it is a good one, or of
        a smaller space: no other search raises the bound of a relaxation. Where states hardly fit, show also that nothing fits so far."""
        # Mostly it is the plan of all meshes, and the networks of the others take most of the time. What is found serves that search.
        if self._show_first is not None and self.best is None and self.states_fit and len(count.options) > 1:
            best = min(count.options, key=least.__getitem__)
            self._show_kept_plan(replace(count, options=[best]))
            self._show_plan_on(best, count)
            if self._show_first is None or count.planner.spaces:
                return
            # The sums of memory do not hold buffers. Example: on 16 384 GPUs the plan of the least bound takes 93 GB where its sum is 78,
            # and the plans of 11 of the other 13 meshes do not fit either.
            fitting = mesh_of_quick_plan(count.planner, count.options, self.say)
            if fitting is not None:
                self._show_plan_on(fitting, count)

    def _show_plan_on(self, mesh: DeviceMesh, count: MicroBatchCandidate) -> None:
        """Show the plan of one mesh as `_show_plan_on_best_mesh` says."""
        plan, _ = self._plan_number(replace(count, options=[mesh]))
        if plan is not None and plan.fits:
            over_all = self._over_all(count.planner, plan)[1]
            is_narrowed = any(note.kind is NoteKind.SCOPE for note in plan.notes)
            (self.show if is_narrowed and over_all.bound else self.show_if_good)(over_all)
        elif plan is not None and least_state_bytes(count.planner) > HARDLY_FITS * count.planner.budget:
            # Every mesh and number may be searched in vain. Example: of 78.7 GB the states of Kolibri-1 take 78.1 on 16 H100, and what
            # takes least of all plans, 80.3. To find it takes 33 s, and the first mesh 2 s.
            self.show(plan)

    def _candidate(self, planner: Planner, options: Sequence[DeviceMesh]) -> MicroBatchCandidate:
        """Return the number of micro-batches of a planner on some meshes. It has the networks that were made of it before."""
        number = planner.workload.accumulate
        if number not in self._candidates:
            self._candidates[number] = MicroBatchCandidate.of(planner, options)
        return replace(self._candidates[number], options=options)

    def _show_kept_plan(self, count: MicroBatchCandidate) -> None:
        """Show the best plan without recomputation if the fastest one of any memory nearly fits, and if it is a good one."""
        # Their network is a third of that with recomputation. Example: the fastest plan of MiniMax-Text-01 takes 78.9 of 78.7 GB.
        if count.plain is count.planner or not _nearly_fits(count):
            return
        plan, _ = self._plan_number(replace(count, planner=count.plain))
        if plan is not None and plan.fits:
            self.show_if_good(self._over_all(count.planner, plan)[1])

    def _look_at(self, count: MicroBatchCandidate) -> tuple[Sequence[DeviceMesh], Plan | None]:
        """Search one number without proof. Returns the meshes on which a multiple of it may be better than what is known, and its plan, if
        it has one."""
        number, known = count.micro_batches, self.known
        least = self._bounds_on_meshes(count)
        count = replace(count, options=[mesh for mesh in count.options if least[mesh] < known * (1 - TIE)])
        # Meshes that were left out have no plan below `known`, so `known` bounds them.
        self.least[number] = min([known, *(least[mesh] for mesh in count.options)])
        if not count.options:
            return (), None
        # At the first number it was looked for already.
        if self.states_fit and number != self.numbers.first.workload.accumulate:
            unlimited = self._unlimited_best_if_fits(count)
            if unlimited is not None:
                self._keep_unlimited(unlimited, count)
                if self.free is not None:
                    return (), unlimited[1]
        self.seen.append(count)
        plan: Plan | None = None
        if self.numbers.several:
            self._show_plan_on_best_mesh(count, least)
            # Below the value from before: a search below a lower one sees fewer plans, of which trade-offs are made.
            plan, self.needed[number] = self._plan_number(count, known, self.bounds)
            if plan is not None and plan.fits and (self.best is None or _is_better((count.planner, plan), self.best)):
                self.best = count.planner, plan
            if self.best is not None and self.best[0] is count.planner:
                self.show_if_good(self._over_all(*self.best)[1])
        # Their bounds are known now, and nothing else is asked of them.
        served = [p for p in (count.plain, count.bounding) if p is not count.planner]
        if self.bounds.get(number, 0.0) >= self.known * (1 - TIE) and not (self.best and self.best[0] is count.planner):
            served.append(count.planner)  # no plan of this number is better, so it is not searched again
        for planner in served:
            planner.networks.clear_problems()
        return [mesh for mesh in count.options if least[mesh] < self.known * (1 - TIE)], plan

    def _keep_unlimited(self, unlimited: tuple[Planner, Plan], count: MicroBatchCandidate) -> None:
        """Keep the best plan of any memory of a number, which fits. Neither recomputation nor, as a rule, more micro-batches would help."""
        self.best = unlimited
        least = unlimited[0].value(unlimited[1]) * (1 - TIE)
        holds = not self.numbers.several or count.bounding is count.plain
        if holds or all(self._bound_on(mesh, count) >= least for mesh in count.options):
            self.free = unlimited

    def _look_near(self, room: float, options: Sequence[DeviceMesh], most: int) -> None:
        """Look at up to `most` numbers of all that divide the samples, those first that leave about as much room as it takes. A number is
        left out where the fastest plan of a divisor of it is no better than what is known."""
        # By ratio: with room for 8, the numbers 4 and 16 are equally near.
        for number in sorted(divisors(self.numbers.last), key=lambda n: abs(math.log(n / max(room, 1.0)))):
            planner = self.numbers.at(number) if most and self._may_be_better(number) else None
            if planner is not None:
                most -= 1
                near = [c for c in self.seen if number % c.micro_batches == 0]
                fewer = max(near, key=lambda c: c.micro_batches).options if near else options
                self._look_at(self._candidate(planner, fewer))

    def _may_be_better(self, number: int) -> bool:
        end = self._last_useful
        return (
            number not in self.least
            and self._bound_of(number) < self.known * (1 - TIE)
            and not (end and number % end == 0)
        )

    def _bound_of(self, number: int) -> float:
        """Return a value that no plan of a number is below: its own bound, or that of the divisors which were looked at."""
        if number in self.bounds:
            return self.bounds[number]
        # The bound of every divisor holds, so the highest one does. Example: 12 is bounded by 1, 2, 3, 4 and 6, where they were looked at.
        return max((least for n, least in self.least.items() if number % n == 0), default=self.floor)

    def _bounds_on_meshes(self, count: MicroBatchCandidate) -> dict[DeviceMesh, float]:
        """`_bound_on` each mesh of a number; they are worked out once."""
        # They tell where other numbers may be better: of one number alone nobody asks.
        needed = self.states_fit and self.numbers.several
        if count.micro_batches not in self.least_on:
            bounds = {mesh: self._bound_on(mesh, count) if needed else 0.0 for mesh in count.options}
            self.least_on[count.micro_batches] = bounds
        return self.least_on[count.micro_batches]

    def _bound_on(self, mesh: DeviceMesh, count: MicroBatchCandidate) -> float:
        """Return a value that no plan of any memory on one mesh is below, with a number of micro-batches or with a multiple of it."""
        of_divisors = [on[mesh] for n, on in self.least_on.items() if count.micro_batches % n == 0 and mesh in on]
        least = max(of_divisors, default=0.0)
        if least >= self.known:
            return least
        # A relaxation of seconds is in vain where that of a divisor is far below what is known. Example: Zamba2, 0.2 of 1.1 s.
        relaxed = not of_divisors or least >= self.known / 2
        return max(least, bound_on_mesh(count.bounding, mesh, relaxed=relaxed))

    def _over_all(self, planner: Planner, plan: Plan) -> tuple[Planner, Plan]:
        """Return the plan with a bound that holds for every number of micro-batches that the request admits."""
        if not (self.numbers.several and plan.fits and planner.objective() == "time") or plan.bound is None:
            return planner, plan
        value, end = planner.value(plan), self._last_useful
        # Multiples of `end` need no bound of their own: none is better than the plan of any memory that fits at `end`.
        every = [n for n in divisors(self.numbers.last) if not (end and n % end == 0 and n not in self.bounds)]
        bound = min(plan.bound, value, *(self._bound_of(n) for n in every)) if every else plan.bound
        return planner, with_lower_bound(planner, plan, bound)

    def _plan_number(
        self, count: MicroBatchCandidate, below: float | None = None, bounds: dict[int, float] | None = None
    ) -> tuple[Plan | None, float]:
        """Return a plan of a number on its meshes, searched without proof, None if none is within the user's budget; and the bytes per GPU
        that it takes. What no plan of these is below is put in `bounds`."""
        below, bounds = self.known if below is None else below, {} if bounds is None else bounds
        try:
            plan = self.search(count.planner, count.options, self.say, below=below, prove=False)
        except NoPlanFits as error:
            bounds[count.micro_batches] = min(below, error.bound)
            return None, error.needed_bytes
        # A plan that does not fit has the bound of those that do, which the search may have missed; none if nothing fits.
        nothing = 0.0 if plan.fits else np.inf
        bounds[count.micro_batches] = min(below, nothing if plan.bound is None else plan.bound)
        return plan, plan.cost.memory_bytes["peak"]

    def _unlimited_best_if_fits(self, count: MicroBatchCandidate) -> tuple[Planner, Plan] | None:
        """Return the best plan of any memory without recomputation if it fits, since no plan is better then; else None."""
        planner, objective = count.plain, count.plain.objective()
        problems = build_problems(planner, count.options) if planner is not count.planner else None
        if problems is None or any(p.unrestricted is not None for p in problems):  # no bound holds for the whole space
            return None
        with planner.clock("search"):
            fast = possible_winners(problems, objective)
            if not any(rough_plan_fits(p, planner.graph, planner.budget, objective) for p in fast):
                return None
            # A plan that fits and is as fast as any of any memory ends the search: more micro-batches and recomputation only add work.
            least = least_value_bound(fast, objective) * (1 + TIE)
        with contextlib.suppress(NoPlanFits):
            plan = self.search(planner, count.options, self.say, below=min(self.known, least), prove=False)
            if plan.fits and planner.value(plan) <= least:
                return planner, plan
        return None

    def _search_exactly(self) -> tuple[Planner, Plan]:
        """Return the best plan over the numbers that were looked at, searched exactly, the most promising number first. What is proven of a
        number raises its bound. Raises NoPlanFits."""
        refused: NoPlanFits | None = None
        best, chosen, bounds = self.best, self.free, self.bounds
        known = self.known * (1 + TIE)
        # The number of the best plan first: its exact value makes the searches of the others short.
        for count in sorted(self.seen, key=lambda c: best is None or c.planner is not best[0]):
            below = min(known, chosen[0].value(chosen[1])) if chosen and chosen[1].fits else known
            number = count.micro_batches
            # A number is closed if its bound reaches what is known, or if proofs may take no more work.
            closed = bounds.get(number, 0.0) >= below * (1 - TIE) or (
                number in bounds and count.planner.work.remaining <= 0
            )
            if best is not None and closed and (chosen is not None or count.planner is not best[0]):
                continue
            try:
                plan = self.search(count.planner, count.options, self.say, below=below)
            except NoPlanFits as error:
                bounds[number] = max(bounds.get(number, 0.0), min(below, error.bound) if below < np.inf else 0.0)
                refused = min(refused or error, error, key=lambda e: e.needed_bytes)
                continue
            if plan.fits:
                bounds[number] = max(bounds.get(number, 0.0), plan.bound or 0.0)
            if chosen is None or _is_better((count.planner, plan), chosen):
                chosen = count.planner, plan
        # An exact search below the best value may end without a plan: then the best one stands.
        if best is not None and (chosen is None or not chosen[1].fits):
            return best
        if chosen is None:
            assert refused is not None
            raise refused
        return chosen


def bound_on_mesh(planner: Planner, mesh: DeviceMesh, *, relaxed: bool = True) -> float:
    """Return a value that no plan of any memory on one mesh is below; 0 if it is not known. `relaxed`: also where the space is a smaller
    one.

    Of `MicroBatchCandidate.bounding` it holds for multiples of the number of micro-batches too. ALBERT, whose layers share their weights,
    is searched in a smaller space. Its first plan took 16 s as long as these had no bound: no mesh was left out at 2, 4, 8 and 16
    micro-batches."""
    problems = build_problems(planner, [mesh])
    if problems is None:
        return 0.0
    with planner.clock("search"):
        objective = planner.objective()
        if not relaxed and any(p.unrestricted is not None for p in problems):
            return 0.0
        return min((bound_of_whole_space(p, objective) for p in problems), default=np.inf)


def _nearly_fits(count: MicroBatchCandidate) -> bool:
    """Return whether the fastest plan of any memory without recomputation takes hardly more than there is, on one of the meshes."""
    problems = build_problems(count.plain, count.options) or ()
    fast = (search_roughly(p, count.plain.objective()) for p in problems if p.unrestricted is None)
    return any(a is not None and memory_bytes(a) <= FIRST_BUDGET_FACTOR * count.plain.budget for a in fast)


def _is_better(one: tuple[Planner, Plan], other: tuple[Planner, Plan]) -> bool:
    """Return whether the first plan is better: a plan that fits is better; then the objective counts; of two that do not fit, memory."""
    (planner, plan), (other_planner, other_plan) = one, other
    if plan.fits != other_plan.fits:
        return plan.fits
    if plan.fits:
        return planner.value(plan) < other_planner.value(other_plan) * (1 - TIE)
    return plan.cost.memory_bytes["peak"] < other_plan.cost.memory_bytes["peak"]
