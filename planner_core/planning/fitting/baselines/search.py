"""The plans of baselines: the best plan of each baseline over the meshes. It fits if one of them fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from planner_core.core import (
    DeviceMesh,
    Note,
    NoteKind,
    Plan,
)
from planner_core.planning.fitting.micro_batch_numbers import MicroBatchNumbers
from planner_core.planning.fitting.shortage import note_memory
from planner_core.planning.methods import BASELINES, AxisRules, Method
from planner_core.planning.planner import Planner
from planner_core.planning.request import Progress
from planner_core.search import (
    UNPROVEN,
    Answer,
    Assignment,
    SearchLimits,
    find_least_memory,
    fit_simulated_memory,
    memory_bytes,
    no_plan_fits,
    possible_winners,
    rough_bound,
    rough_plan_fits,
    search_within_budget,
)
from planner_core.search.algebra import Incumbent, PointAllowance, best_first
from planner_core.search.network import Problem

MORE_NUMBERS = 4
"""Larger, and smaller, numbers of micro-batches at which a layout is looked at beside the chosen plan's number."""
MAX_OPEN_GAP = 0.01
"""A baseline whose gap is wider than this share is searched for the mixtures of recomputation between two prices of memory."""
MAX_GAP_POINTS = 40_000
"""Points that this search may form: some tenths of a second of one core, on each mesh that may still win."""
MAX_BASELINE_EXCESS = 0.02
"""A baseline that must take longer than the chosen plan by more than this share is not searched further: it leads no list."""
MAX_SHOWN_MEMORY_RATIO = 1.05
"""A baseline that does not fit is shown with the layout that people run, if its sum of memory is at most so many times the least."""
MAX_SHOWN_PEAK_RATIO = 1.1
"""By what factor its simulated peak may be above the least one. A sum holds no buffers, so peaks lie further apart than sums."""


def plan_baselines(
    planner: Planner,
    options: Iterable[DeviceMesh],
    recompute: str = "none",
    numbers: MicroBatchNumbers | None = None,
    chosen_s: float = math.inf,
    *,
    baselines: Mapping[str, Method] = BASELINES,
    report_progress: Progress = lambda text: None,
) -> list[Plan]:
    """Return the best plan of each of these baselines over the meshes. A baseline that suits no mesh is left out.

    If its fastest plan does not fit with the recomputation of `planner`, it is planned with `recompute`; if that does not fit either, at
    the next larger of the `numbers` of micro-batches. At smaller ones it is planned as long as the same plan fits there and gets
    faster, or where it has no plan with more. So it fits if the layout fits at all within MORE_NUMBERS of these. If it fits nowhere, it is
    shown near its least memory. `chosen_s`: the work of the chosen plan, with which baselines may tie.
    """
    options = list(options)
    # All baselines share the planners of each number, and with them the networks that they build.
    numbers = numbers or MicroBatchNumbers(planner, None, report_progress, several=False)
    plans = []
    for baseline in baselines.values():
        # Each takes tenths of a second: a page stops at the next report.
        report_progress(f"baselines: {baseline.title}")
        plan = _BaselineSearch(baseline, options, numbers, recompute, chosen_s).best_over_numbers()
        plans += [plan] if plan is not None else []
    return plans


def find_faster_baseline(
    planner: Planner, options: list[DeviceMesh], baselines: Mapping[str, Method], below: float
) -> Plan | None:
    """Return the plan of the shortest step of these baselines over the meshes, with the planner's micro-batches; None if none fits that
    takes less than `below` seconds."""
    numbers = MicroBatchNumbers(planner, None, lambda text: None, several=False)
    best = Incumbent[Plan](below)
    for baseline in baselines.values():
        search = _BaselineSearch(baseline, options, numbers, "none", math.inf)
        if (plan := search.plan_that_fits(search.number, best.value)) is not None:
            best.offer(plan.cost.step_time_s, plan)
    return best.solution


class _BaselineSearch:
    """The search for the best plan of one baseline over meshes and numbers of micro-batches. It starts at the first of the `numbers`, or
    at the largest below it at which the data ranks of some mesh share the samples of a micro-batch."""

    def __init__(
        self,
        baseline: Method,
        options: list[DeviceMesh],
        numbers: MicroBatchNumbers,
        recompute: str,
        chosen_s: float,
    ) -> None:
        self.baseline, self.options, self.numbers, self.chosen_s = baseline, options, numbers, chosen_s
        first = numbers.first
        self.budget = first.budget
        suited = ((mesh, baseline.restrict(first.graph, mesh)) for mesh in options)
        self._ranks = {m: r.ranks if isinstance(r, AxisRules) else 1 for m, r in suited if r is not None}
        """The data ranks of each mesh that suits the baseline."""
        self.number = self.first_number()
        # What runs it may recompute all blocks or none, by one switch. Megatron-LM's row was once a mixture by block, which it cannot run.
        # With weights in 4 bits that is peft, whatever the layout.
        self.has_one_switch = baseline.one_switch or first.request.nf4
        switches = self.has_one_switch and recompute == "auto"
        self.first_policy, self.saving_policy = ("none", "full") if switches else (first.workload.recompute, recompute)
        """The recomputation with which it is planned first, and the one that saves memory where no such plan fits."""
        self._problems: dict[tuple[int, DeviceMesh], Problem] = {}
        """By the identity of the planner. A problem's cache has the answers of its searches, so they are not searched twice."""
        self._bounds_s: dict[tuple[int, DeviceMesh], float] = {}
        """A lower bound of each network, or of one that was not built since a network of less work is no faster than a known plan."""

    def first_number(self) -> int:
        """Return the number at which the search starts.

        The chosen plan may compute fewer samples at once than the baseline has data ranks. Example: 64 samples on 8 GPUs, the plan 2 tensor
        x 4 with 4 samples in each of 16 micro-batches: FSDP over 8 has at most 8 micro-batches.
        """
        number = first = self.numbers.first.workload.accumulate
        while number and not any(self.has_samples(number, mesh) for mesh in self._ranks):
            number = self.numbers.before(number)
        return number if number and self.numbers.at(number) is not None else first

    def best_over_numbers(self) -> Plan | None:
        """Return the best plan that fits, at its number of micro-batches; else one of nearly the least memory; None if there is no plan."""
        best = self.plan_that_fits(self.number) or self.plan_with_more_micro_batches()
        if best is not None and best.fits and self.has_one_switch:
            best = self.improve_with_more_micro_batches(best)
        if best is None and not self.lacks_samples():
            return None  # its ranks do not divide the model's sizes, which are the same at every number
        for fewer in islice(self.numbers.smaller_than(self.number), MORE_NUMBERS):
            if best is not None and not _fits_with_half_as_many(best, self.budget):
                break
            plan = self.plan_that_fits(fewer)
            if plan is not None and best is not None and plan.cost.step_time_s >= best.cost.step_time_s:
                break
            best = plan or best or self.plan_of_least_memory([fewer])
        return best

    def improve_with_more_micro_batches(self, best: Plan) -> Plan:
        """Return the best plan up to the first larger number at which all blocks fit without recomputation.

        One switch recomputes all blocks or none, a jump that no mixture has. Example: Megatron-LM runs six layers of Llama-3-8B on 8 GPUs
        of 14 GB in 3.6 s with 8 micro-batches and recomputation on 2 x 4, in 3.3 s with 16 on 4 x 2, and in 3.4 s with 32 and none.
        """
        number, larger = self.number, islice(self.numbers.larger_than(self.number), MORE_NUMBERS)
        # A planner of another number captures the model, so none is asked for where the number before leaves no mesh.
        while best.workload.recompute == "full" and self.may_be_faster(number, best):
            if (more := next(larger, None)) is None:
                break
            plan = self.plan_under_switch(more, number, best.cost.step_time_s)
            number = more
            if plan is None:
                continue
            best = min(best, plan, key=lambda p: p.cost.step_time_s)
            if plan.workload.recompute == "none":
                break
        return best

    def may_be_faster(self, number: int, than: Plan) -> bool:
        """Return whether a larger number than this one may have a faster plan, by the bounds of its meshes without recomputation."""
        first = self.numbers.under(number, self.first_policy)
        return any(self.bound_s((first,), mesh) < than.cost.step_time_s for mesh in self.options)

    def plan_with_more_micro_batches(self) -> Plan | None:
        """Return the plan that fits at the smallest larger number of micro-batches; if none fits, the plan of nearly the least
        memory; None if there is no plan.

        More micro-batches shrink activations alone. So where weights and states do not fit, no larger number is searched for a plan that
        fits, and on each mesh the largest at which every data rank has a sample takes the least memory. Example: Megatron-LM's Llama-3-70B
        on 32 H100, 4 data x 8 tensor, takes 171 GiB with 8 samples at once, and 86 GiB with one. A single micro-batch may take less than
        any, since no gradients are accumulated: with sequence parallelism on 64 H100, 8 samples at once take 39 GiB, and 65 one after the
        other.
        """
        looked_at = {self.number}
        saving = self.problems(self.numbers.under(self.number, self.saving_policy))
        # No number of micro-batches shrinks weights, gradients and states.
        states_may_fit = any(p.least_bytes_at_ends[1] <= self.budget for p in saving)
        last = self.last_numbers()
        for more in islice(self.numbers.larger_than(self.number), MORE_NUMBERS) if states_may_fit else ():
            if more > max(last, default=more):
                break  # no mesh has a sample for each data rank
            looked_at.add(more)
            if (plan := self.plan_that_fits(more)) is not None:
                return plan
        if self.numbers.several and self.numbers.at(1) is not None and 1 not in looked_at:
            looked_at.add(1)
            if (plan := self.plan_that_fits(1)) is not None:
                return plan
        return self.plan_of_least_memory(sorted({*looked_at, *last}))

    def last_numbers(self) -> set[int]:
        """Return for each mesh the largest number at which each of its data ranks has a sample."""
        numbers, number = [1], 1
        while number := self.numbers.after(number):
            numbers.append(number)
        last = {max((n for n in numbers if self.has_samples(n, m)), default=self.number) for m in self._ranks}
        return {n for n in last if self.numbers.several and self.numbers.at(n) is not None}

    def lacks_samples(self) -> bool:
        """Return whether a micro-batch has a number of samples that a layout's data ranks cannot share on some mesh."""
        return not all(self.has_samples(self.number, mesh) for mesh in self._ranks)

    def has_samples(self, number: int, mesh: DeviceMesh) -> bool:
        """Return whether the data ranks of a mesh that suits the baseline can share the samples of a micro-batch. If not, no larger number
        helps."""
        return self.numbers.last % (number * self._ranks[mesh]) == 0

    def plan_that_fits(self, number: int, below: float = math.inf) -> Plan | None:
        """Return the best plan at one number; None if none fits in less than `below` seconds. Recomputation is allowed if the fastest plan
        without it does not fit."""
        if self.has_one_switch:
            return self.plan_under_switch(number, below=below)
        first, saving = (self.numbers.under(number, policy) for policy in (self.first_policy, self.saving_policy))
        with first.clock("baselines"):
            fast = possible_winners(self.problems(first), "time") if saving is not first else []
            # Recomputation only adds work, so it is allowed only where no fastest plan without it fits.
            fits = any(rough_plan_fits(p, first.graph, self.budget, "time") for p in fast)
        return self.best_plan(first if fits else saving, below)

    def plan_under_switch(self, number: int, before: int | None = None, below: float = math.inf) -> Plan | None:
        """Return the best plan at one number with all blocks recomputed or none; None if none fits in less than `below` seconds.

        `before`: a number that divides this one, whose bounds are known. Recomputation and more micro-batches only add work, so no network
        is built for a mesh on which less of them already takes too long. Example: EXAONE-4 32B on 16 H100 recomputes in 1.50 s with one
        micro-batch, and no mesh could with more. Without recomputation 4 x 4 has a bound of 1.43 s with two and 1.58 s with four."""
        plans: list[Plan] = []
        less_work: list[Planner] = []
        # A mesh of no fast plan may fit without recomputation, so both switches are looked at.
        for policy in dict.fromkeys((self.first_policy, self.saving_policy)):
            planner = self.numbers.under(number, policy)
            less_work += [self.numbers.under(before, policy)] if before else []
            if (plan := self.best_plan(planner, below, less_work)) is not None:
                plans.append(plan)
                below = min(below, plan.cost.step_time_s)
            less_work = [planner]
        return min(plans, key=lambda p: p.cost.step_time_s, default=None)

    def best_plan(self, planner: Planner, below: float = math.inf, less_work: Sequence[Planner] = ()) -> Plan | None:
        """Return the best plan at one number under one recomputation; None if none fits, or none in less than `below` seconds. `less_work`:
        planners of less work."""
        with planner.clock("baselines"):
            chosen = _best_answer(planner, self.problems(planner, below, less_work), self.chosen_s, below)
            return planner.plan(*chosen, self.baseline.title, self.baseline.name, "time") if chosen else None

    def plan_of_least_memory(self, numbers: Iterable[int]) -> Plan | None:
        """Return the plan of nearly the least memory, of a baseline that does not fit; None if it has no plan. The `numbers` rise.

        Its fastest plan would be no fair comparison. Example: Llama-3-70B on 64 H100 with 256 x 8 192 tokens takes 877 GiB a GPU as
        Megatron-LM runs it fastest, on a mesh of 32 x 2 without recomputation, which nobody would start; and at least 76 GiB.
        """
        smallest = Incumbent[tuple[Planner, Problem, Answer]]()
        meshes: Sequence[DeviceMesh] = self.options
        for planner in (self.numbers.under(number, self.saving_policy) for number in numbers):
            with planner.clock("baselines"):
                problems = self.problems(planner, meshes=meshes)
                for problem in best_first(problems, [lambda p: p.least_bytes], lambda: smallest.value):
                    answer = fit_simulated_memory(problem, planner.graph, planner.budget, "time", UNPROVEN)
                    if answer.assignment is not None and (plan := self.plan_that_fits(planner.workload.accumulate)):
                        return plan
                    if answer.smallest is not None:
                        smallest.offer(answer.least_memory, (planner, problem, answer))
                # What stands when backward ends does not fall with more micro-batches, so few meshes need a network with these.
                meshes = [p.model.mesh for p in problems if p.least_bytes_at_ends[1] < smallest.value]
        if smallest.solution is None:
            return None
        planner, problem, answer = smallest.solution
        # The plan of the least memory splits what nobody splits: a row-parallel q_proj behind a norm saves 4 % of Llama-3-8B's peak on 8
        # A100, and costs 10 % of its step. So the fastest plan that takes hardly more is shown.
        with planner.clock("baselines"):
            # One search among the sums is enough, since nothing here has to fit: to meet a simulated peak took five.
            assert answer.smallest is not None
            room = memory_bytes(answer.smallest) * MAX_SHOWN_MEMORY_RATIO
            near = search_within_budget(problem, budget=room, limits=UNPROVEN).assignment
        plan = self.plan_without_proof(planner, problem, near or answer.smallest)
        # Where logits fill the most, sums of every recomputation are equal, and the peak of that of all blocks is the least.
        others = [(planner, problem, answer.smallest)]
        full = self.numbers.under(planner.workload.accumulate, "full")
        if self.saving_policy == "auto" and (of_full := self.problems(full, meshes=[problem.model.mesh])):
            others += [(full, of_full[0], a)] if (a := find_least_memory(of_full[0])) else []
        least = min((self.plan_without_proof(*other) for other in others), key=_peak)
        plan = plan if _peak(plan) <= _peak(least) * MAX_SHOWN_PEAK_RATIO else least
        words = f"does not fit: shown within {MAX_SHOWN_PEAK_RATIO - 1:.0%} of the least memory found for it"
        return replace(plan, notes=(Note(words, NoteKind.SHORTAGE), *note_memory(plan, planner)))

    def plan_without_proof(self, planner: Planner, problem: Problem, assignment: Assignment) -> Plan:
        """Return the plan of an assignment that does not fit: it is bounded in memory, not in time."""
        with planner.clock("baselines"):
            answer = Answer(assignment, assignment.seconds, 0.0, memory_bytes(assignment))
            plan = planner.plan(problem, answer, self.baseline.title, self.baseline.name, "time")
        return replace(plan, optimal=False, bound=None)

    def problems(
        self,
        planner: Planner,
        below: float = math.inf,
        less_work: Sequence[Planner] = (),
        meshes: Sequence[DeviceMesh] | None = None,
    ) -> list[Problem]:
        """Return the networks of the baseline at a planner's number of micro-batches and recomputation, one for each mesh that suits it.

        Left out are meshes on which planners of `less_work` have a bound of `below` seconds or more. `meshes`: all, if None."""
        zero = self.baseline.highest_stage(planner.request.zero)
        meshes = self.options if meshes is None else meshes
        for mesh in meshes:
            key = id(planner), mesh
            if key in self._problems:
                continue
            # Most meshes of many GPUs fail at the samples, which costs no network to see.
            is_suited = mesh in self._ranks and self.has_samples(planner.workload.accumulate, mesh)
            self._bounds_s[key] = self.bound_s(less_work, mesh) if is_suited else math.inf
            if self._bounds_s[key] < below:
                costs = planner.cost_model(mesh, zero=zero, usual=True)
                restrict = self.baseline.restrict(planner.graph, mesh)
                self._problems[key] = problem = planner.problem(costs, restrict)
                self._bounds_s[key] = rough_bound(problem, "time")
        return [self._problems[key] for mesh in meshes if (key := (id(planner), mesh)) in self._problems]

    def bound_s(self, planners: Sequence[Planner], mesh: DeviceMesh) -> float:
        """Return the highest known lower bound on the step of these planners' plans on a mesh; 0 if none is known."""
        return max((self._bounds_s.get((id(planner), mesh), 0.0) for planner in planners), default=0.0)


def _peak(plan: Plan) -> float:
    return plan.cost.memory_bytes["peak"]


def _fits_with_half_as_many(plan: Plan, budget: float) -> bool:
    """Return whether the same plan fits with half as many micro-batches, which keep twice the activations.

    Only then is a smaller number looked at, since its networks take as long to build as those of the chosen number. What would have to
    recompute more there gains little by it.
    """
    memory = plan.cost.memory_bytes
    return memory["peak"] + memory["activations"] <= budget


def _best_answer(
    planner: Planner, problems: list[Problem], chosen_s: float, below: float
) -> tuple[Problem, Answer] | None:
    """Return the problem with the best plan that fits in less than `below` seconds, and its answer; None if none does."""
    best = Incumbent[tuple[Problem, Answer]](below)
    for problem in best_first(problems, [lambda p: rough_bound(p, "time")], lambda: best.value):
        if no_plan_fits(problem, planner.budget):
            continue
        # Nobody asked to prove a baseline, and it says its gap. But prices of memory find only the ends of a mixture. Example: FSDP of
        # Llama-3-8B on 8 H100 lacks 0.4 GiB. With one price all 32 blocks are recomputed, and the step takes 6.7 % longer than with one. So
        # a gap is closed where that may make the layout as fast as the chosen plan.
        limits = SearchLimits(abandon_above=best.value, prove=False, max_open_gap=MAX_OPEN_GAP)
        answer = fit_simulated_memory(problem, planner.graph, planner.budget, "time", limits)
        if answer.assignment is not None and answer.bound < min(
            answer.value / (1 + MAX_OPEN_GAP), chosen_s * (1 + MAX_BASELINE_EXCESS)
        ):
            limits = SearchLimits(best.value, points=PointAllowance(MAX_GAP_POINTS), max_open_gap=MAX_OPEN_GAP)
            answer = fit_simulated_memory(problem, planner.graph, planner.budget, "time", limits)
        if answer.assignment is not None:
            best.offer(answer.value, (problem, answer))
    return best.solution
