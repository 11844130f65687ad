"""The plans of baselines: the best plan of each baseline over the meshes. It fits if one of them fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, takewhile

from planner_core.core import (
    ZERO,
    DeviceMesh,
    Graph,
    Note,
    NoteKind,
    Plan,
    PlannerError,
    Sentence,
    Term,
    named,
    time_amount,
)
from planner_core.cost import micro_batch, zero_stage
from planner_core.planning.fitting.mesh_search import check_bound_below
from planner_core.planning.fitting.micro_batch_numbers import GraphSource, MicroBatchNumbers
from planner_core.planning.fitting.shortage import note_memory, note_oversized_states
from planner_core.planning.methods import BASELINES, AxisRules, Method, parse_layout
from planner_core.planning.methods.legality import operator_faults, undecided_fault
from planner_core.planning.planner import Planner, candidate_meshes, prepare_planner, with_recompute
from planner_core.planning.request import Progress, Request
from planner_core.search import (
    UNPROVEN,
    Answer,
    SearchLimits,
    fit_simulated_memory,
    memory_bytes,
    no_plan_fits,
    possible_winners,
    rough_bound,
    rough_plan_fits,
    search_within_budget,
)
from planner_core.search.algebra import Incumbent, PointAllowance, best_first
from planner_core.search.network import Problem, Restriction

DEAL_OUT_SAMPLES = ("data-parallel", "fsdp")
"""The baselines that give every GPU samples of its own."""
MORE_NUMBERS = 4
"""Larger, and smaller, numbers of micro-batches at which a layout is looked at beside the chosen plan's number."""
MAX_OPEN_GAP = 0.01
"""A baseline whose gap is wider than this share is searched for the mixtures of recomputation between two prices of memory."""
MAX_GAP_POINTS = 40_000
"""Points that this search may form: some tenths of a second of one core, on each mesh that may still win."""
NEARLY_CHOSEN = 0.02
"""A baseline that must take longer than the chosen plan by more than this share is not searched further: it leads no list."""
NEARLY_LEAST = 1.05
"""By what factor the sum of memory of a baseline that does not fit may be shown above the least, to be the layout that people run."""


def plan_baselines(
    planner: Planner,
    options: Iterable[DeviceMesh],
    recompute: str = "none",
    numbers: MicroBatchNumbers | None = None,
    chosen_s: float = math.inf,
    *,
    baselines: Mapping[str, Method] = BASELINES,
    say: Progress = lambda text: None,
) -> list[Plan]:
    """Return the best plan of each of these baselines over the meshes. A baseline that suits no mesh is left out.

    If its fastest plan does not fit with the recomputation of `planner`, it is planned with `recompute`; if it does not fit so either, at
    the next larger one of the `numbers` of micro-batches. At smaller ones it is planned as long as the same plan fits there and gets
    faster, or where it has no plan with more. So it fits if the layout fits at all within MORE_NUMBERS of these. If it fits nowhere, it is
    shown near its least memory. `chosen_s`: the work of the chosen plan, with which baselines may tie.
    """
    options = list(options)
    # All baselines share the planners of each number, and with them the networks that they build.
    numbers = numbers or MicroBatchNumbers(planner, None, say, several=False)
    plans = []
    for baseline in baselines.values():
        say(f"baselines: {baseline.title}")  # each takes tenths of a second: a page stops at the next report
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


def plan_stated_layout(
    planner: Planner, request: Request, source: GraphSource, say: Progress
) -> tuple[Planner, Plan] | None:
    """Return the plan of the layout that the `request` states, and its planner; None if it states none. `planner`: that of the chosen plan.

    What the request leaves open of such a run is settled here: its micro-batches by `Layout.count_micro_batches`, and recomputation, of
    which it has none. A note of the plan says so. Raises InputError if the model cannot follow the layout.
    """
    if request.layout is None:
        return None
    layout, number = parse_layout(request.layout), planner.workload.accumulate
    if request.accumulate is None and not isinstance(source, Graph):
        number = layout.count_micro_batches(planner.workload.batch, number, request.micro_batch)
    if number != planner.workload.accumulate:
        stated = replace(planner.request, batch=planner.workload.batch, accumulate=number)
        graph = source(stated) if callable(source) else None
        planner = prepare_planner(stated, graph, say, planner.effort, planner)
    planner = with_recompute(planner, "none" if request.recompute == "auto" else request.recompute)
    plan = planner.stated(layout)
    unfit = () if plan.fits else (Note("does not fit: its step is that of a GPU with more memory"),)
    plan = replace(plan, notes=(*unfit, *plan.notes, *note_memory(plan, planner)))
    left_open = [named("micro_batch")] if (request.accumulate, request.micro_batch) == (None, None) else []
    left_open += [named("recompute")] if request.recompute == "auto" else []
    if not left_open:
        return planner, plan
    settled = (
        f"priced with micro-batch {micro_batch(plan)} x {number} and recomputation {planner.workload.recompute}, since "
    )
    was = " was not given" if len(left_open) == 1 else " were not given"
    note = Note(Sentence(settled, Sentence.from_list(" and ", left_open), was))
    return planner, replace(plan, notes=(note, *plan.notes))


class _BaselineSearch:
    """The search for the best plan of one baseline over meshes and numbers of micro-batches. It starts at the first of the `numbers`."""

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
        self.number, self.budget = first.workload.accumulate, first.budget
        # What runs it may recompute all blocks or none, by one switch. Megatron-LM's row was once a mixture by block, which it cannot run.
        # With weights in 4 bits that is peft, whatever the layout.
        self.has_one_switch = baseline.one_switch or first.request.nf4
        switches = self.has_one_switch and recompute == "auto"
        self.first_policy, self.saving_policy = ("none", "full") if switches else (first.workload.recompute, recompute)
        """The recomputation with which it is planned first, and the one that saves memory where no such plan fits."""
        self._problems: dict[tuple[int, DeviceMesh], Problem] = {}
        """By the identity of the planner. A problem's cache has the answers of its searches, so they are not searched twice."""
        self._least_s: dict[tuple[int, DeviceMesh], float] = {}
        """A lower bound of each network, or of one that was not built since a network of less work is no faster than a known plan."""

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
        return any(self.least_s((first,), mesh) < than.cost.step_time_s for mesh in self.options)

    def plan_with_more_micro_batches(self) -> Plan | None:
        """Return the plan at the first larger number of micro-batches at which one fits; else that of nearly the least memory; None
        without any.

        More micro-batches shrink activations alone. So where weights and states do not fit, no larger number is searched for a plan that
        fits, and of all larger ones the largest at which each data rank of some mesh has a sample takes the least memory. Example:
        Megatron-LM's Llama-3-70B on 32 H100, 4 data x 8 tensor, takes 171 GiB with 8 samples at once, and 86 GiB with one. A single
        micro-batch may take less than any, since no gradients are accumulated: with sequence parallelism on 64 H100, 8 samples at once take
        39 GiB, and 65 one after the other.
        """
        looked_at = {self.number}
        saving = self.problems(self.numbers.under(self.number, self.saving_policy))
        # No number of micro-batches shrinks weights, gradients and states.
        states_may_fit = any(p.least_bytes_at_ends[1] <= self.budget for p in saving)
        for more in islice(self.numbers.larger_than(self.number), MORE_NUMBERS) if states_may_fit else ():
            looked_at.add(more)
            if (plan := self.plan_that_fits(more)) is not None:
                return plan
        if self.numbers.several and self.numbers.at(1) is not None and 1 not in looked_at:
            looked_at.add(1)
            if (plan := self.plan_that_fits(1)) is not None:
                return plan
        meshes = [p.model.mesh for p in saving if not p.is_infeasible]
        dealt = takewhile(lambda n: any(self.has_samples(n, m) for m in meshes), self.numbers.larger_than(self.number))
        return self.plan_of_least_memory(sorted({*looked_at, max(dealt, default=self.number)}))

    def lacks_samples(self) -> bool:
        """Return whether a micro-batch has a number of samples that a layout's data ranks cannot share on some mesh."""
        graph = self.numbers.first.graph
        suited = (mesh for mesh in self.options if self.baseline.restrict(graph, mesh) is not None)
        return not all(self.has_samples(self.number, mesh) for mesh in suited)

    def has_samples(self, number: int, mesh: DeviceMesh) -> bool:
        """Return whether the baseline suits a mesh and its data ranks can share the samples of a micro-batch. If not, no larger number
        helps."""
        return self.rules(self.numbers.under(number, self.saving_policy).graph, mesh) is not None

    def rules(self, graph: Graph, mesh: DeviceMesh) -> Restriction | None:
        """Return what the baseline forbids on a mesh; None if it does not suit it or cannot deal out the graph's samples."""
        rules = self.baseline.restrict(graph, mesh)
        return None if isinstance(rules, AxisRules) and graph.workload["batch"] % rules.ranks else rules

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
        less: list[Planner] = []
        # A mesh of no fast plan may fit without recomputation, so both switches are looked at.
        for policy in dict.fromkeys((self.first_policy, self.saving_policy)):
            planner = self.numbers.under(number, policy)
            less += [self.numbers.under(before, policy)] if before else []
            if (plan := self.best_plan(planner, below, less)) is not None:
                plans.append(plan)
                below = min(below, plan.cost.step_time_s)
            less = [planner]
        return min(plans, key=lambda p: p.cost.step_time_s, default=None)

    def best_plan(self, planner: Planner, below: float = math.inf, less: Sequence[Planner] = ()) -> Plan | None:
        """Return the best plan at one number under one recomputation; None if none fits, or none in less than `below` seconds. `less`:
        planners of less work."""
        with planner.clock("baselines"):
            chosen = _best_answer(planner, self.problems(planner, below, less), self.chosen_s, below)
            return planner.plan(*chosen, self.baseline.title, self.baseline.name, "time") if chosen else None

    def plan_of_least_memory(self, numbers: Iterable[int]) -> Plan | None:
        """Return the plan of nearly the least memory, of a baseline that does not fit; None if it has no plan. The `numbers` rise.

        Its fastest plan would be no fair comparison. Example: Llama-3-70B on 64 H100 with 256 x 8 192 tokens takes 877 GiB a GPU as
        Megatron-LM runs it fastest, on a mesh of 32 x 2 without recomputation, which nobody would start; and at least 76 GiB.
        """
        least = Incumbent[tuple[Planner, Problem, Answer]]()
        meshes: Sequence[DeviceMesh] = self.options
        for planner in (self.numbers.under(number, self.saving_policy) for number in numbers):
            with planner.clock("baselines"):
                problems = self.problems(planner, meshes=meshes)
                for problem in best_first(problems, [lambda p: p.least_bytes], least):
                    answer = fit_simulated_memory(problem, planner.graph, planner.budget, "time", UNPROVEN)
                    if answer.smallest is not None:
                        least.offer(answer.least_memory, (planner, problem, answer))
                # What stands when backward ends does not fall with more micro-batches, so few meshes need a network with these.
                meshes = [p.model.mesh for p in problems if p.least_bytes_at_ends[1] < least.value]
        if least.solution is None:
            return None
        planner, problem, answer = least.solution
        # The very least splits what nobody splits: a row-parallel q_proj behind a norm saves 4 % of Llama-3-8B's peak on 8 A100, and
        # costs 10 % of its step. So the fastest plan that takes hardly more is shown.
        with planner.clock("baselines"):
            # One search among the sums is enough, since nothing here has to fit: to meet a simulated peak took five.
            assert answer.smallest is not None
            room = memory_bytes(answer.smallest) * NEARLY_LEAST
            near = search_within_budget(problem, budget=room, limits=UNPROVEN).assignment
        # A plan that does not fit is bounded in memory, not in time.
        shown = replace(answer, assignment=near or answer.smallest, bound=0.0)
        plan = planner.plan(problem, shown, self.baseline.title, self.baseline.name, "time")
        note = Note("does not fit: shown at nearly the least memory that it takes", NoteKind.SHORTAGE)
        return replace(plan, optimal=False, bound=None, notes=(note, *note_memory(plan, planner)))

    def problems(
        self,
        planner: Planner,
        below: float = math.inf,
        less: Sequence[Planner] = (),
        meshes: Sequence[DeviceMesh] | None = None,
    ) -> list[Problem]:
        """Return the networks of the baseline at a planner's number of micro-batches and recomputation, one for each mesh that suits it.

        Without those of meshes on which planners of `less` work have a bound of `below` seconds or more. `meshes`: all, if None."""
        zero = self.baseline.highest_stage(planner.request.zero)
        meshes = self.options if meshes is None else meshes
        for mesh in meshes:
            key = id(planner), mesh
            if key in self._problems:
                continue
            # Most meshes of many GPUs fail at the samples, which costs no network to see.
            restrict = self.rules(planner.graph, mesh)
            self._least_s[key] = math.inf if restrict is None else self.least_s(less, mesh)
            if self._least_s[key] < below:
                self._problems[key] = problem = planner.problem(mesh, restrict, zero=zero, usual=True)
                self._least_s[key] = rough_bound(problem, "time")
        return [self._problems[key] for mesh in meshes if (key := (id(planner), mesh)) in self._problems]

    def least_s(self, planners: Sequence[Planner], mesh: DeviceMesh) -> float:
        """Return what no plan of these planners takes less than on a mesh, as far as it is known."""
        return max((self._least_s.get((id(planner), mesh), 0.0) for planner in planners), default=0.0)


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
    for problem in best_first(problems, [lambda p: rough_bound(p, "time")], best):
        if no_plan_fits(problem, planner.budget):
            continue
        # Nobody asked to prove a baseline, and it says its gap. But prices of memory find only the ends of a mixture. Example: FSDP of
        # Llama-3-8B on 8 H100 lacks 0.4 GiB. With one price all 32 blocks are recomputed, and the step takes 6.7 % longer than with one. So
        # a gap is closed where that may make the layout as fast as the chosen plan.
        limits = SearchLimits(abandon_above=best.value, prove=False, max_open_gap=MAX_OPEN_GAP)
        answer = fit_simulated_memory(problem, planner.graph, planner.budget, "time", limits)
        if answer.assignment is not None and answer.bound < min(
            answer.value / (1 + MAX_OPEN_GAP), chosen_s * (1 + NEARLY_CHOSEN)
        ):
            limits = SearchLimits(best.value, points=PointAllowance(MAX_GAP_POINTS), max_open_gap=MAX_OPEN_GAP)
            answer = fit_simulated_memory(problem, planner.graph, planner.budget, "time", limits)
        if answer.assignment is not None:
            best.offer(answer.value, (problem, answer))
    return best.solution


def note_missing_baselines(planner: Planner, request: Request, plans: Sequence[Plan]) -> tuple[str, ...]:
    """Sentences about the baselines that do not have a plan of this model on these meshes, or none of the micro-batch that is asked for."""
    if oversized := note_oversized_states(planner):
        return oversized
    planned, size, notes = {p.method for p in plans}, request.micro_batch, list[str]()
    missing = [b for b in BASELINES.values() if b.name not in planned and b.suits(planner.graph)]
    if missing:
        # These deal out samples alone, so that every GPU needs one. The others can be kept from a plan by the model's sizes too.
        batch, gpus = planner.workload.batch, planner.cluster.num_gpus
        # FSDP gathers weights that are sharded, which only ZeRO-3 holds.
        stated = planner.request.zero if planner.request.zero != max(ZERO) else None
        unsharded = [b for b in missing if b.name == "fsdp" and stated is not None]
        missing = [b for b in missing if b not in unsharded]
        uneven = [b for b in missing if b.name in DEAL_OUT_SAMPLES] if batch % gpus else []
        rest = [b for b in missing if b not in uneven]
        if unsharded:
            stages = named("zero", max(ZERO)), " would do, ", named("zero", stated)
            words = " without a plan, since it shards weights: "
            notes.append(Sentence(_list_titles(unsharded), words, *stages, " does not"))
        if uneven:
            near = sorted({max(gpus, batch // gpus * gpus), -(-batch // gpus) * gpus})
            wanted = Sentence.from_list(" or ", (named("batch", number) for number in near))
            why = f": {batch:,} samples cannot be dealt out to {gpus:,} GPUs; "
            notes.append(Sentence(_list_titles(uneven), " without a plan", why, wanted, " would do"))
        if rest:
            words = "baselines that no plan of this model follows on these meshes: "
            notes.append(Sentence(words, _list_titles(rest), _explain_missing_split(planner)))
    if other := [f"{p.name} ({micro_batch(p)} at once)" for p in plans if size not in (None, micro_batch(p))]:
        why = "without a row, since they compute another number of samples at once than "
        notes.append(Sentence(why, named("micro_batch", size), f": {', '.join(other)}"))
    return tuple(notes)


def _explain_missing_split(planner: Planner) -> str:
    """Say why the model cannot be split over the fewest tensor ranks to which its samples can be dealt: `; 25 attention heads cannot be
    dealt to tp=2 ranks`. Where its sizes allow that, the operator is named that cannot follow; empty if all of them can."""
    request, gpus = replace(planner.request, tool=None), planner.cluster.num_gpus
    numbers = sorted({m.axis_sizes[-1] for m in candidate_meshes(request, planner.cluster) if m.axis_sizes[-1] > 1})
    layouts = [parse_layout(f"dp={gpus // ranks},tp={ranks}") for ranks in numbers]
    if not layouts:
        return ""
    layout = next((one for one in layouts if planner.workload.graph_batch % one.data == 0), layouts[0])
    if faults := operator_faults(planner.graph, layout):
        return Sentence("; ", faults[0].reason)
    with suppress(PlannerError):  # the network of a wide mesh may be too large to look at
        problem = planner.of_space(layout.space())
        return f"; {undecided_fault(problem, layout)}" if problem.is_infeasible else ""
    return ""


def _list_titles(baselines: Iterable[Method]) -> Sentence:
    return Sentence.from_list(", ", (Term("method", b.name, None, b.title) for b in baselines))


def describe_restriction_cost(plan: Plan, exact: Mapping[str, Plan]) -> Sentence:
    """Return a sentence: step and communication of a method's plan, then both of each plan of the exact search (`exact`, by its row).

    The plan of the shortest step need not communicate least, so that the least of both may be no plan's. Example:
    "a step takes 488.4 ms, its communication 88.14 ms; of best 273.3 ms and 26.8 ms; of least communication 536 ms and 0.5977 ms".
    Raises SearchFault if the method's plan is better than the bound of one of these, whose space holds it.
    """
    for best in exact.values():
        check_bound_below(best, [plan])

    def both(words: tuple[str, str], of: Plan) -> Sentence:
        return Sentence(words[0], time_amount(of.cost.step_time_s), words[1], time_amount(of.cost.comm_time_s))

    parts = [both(("a step takes ", ", its communication "), plan)]
    parts += [both((f"of {row} ", " and "), best) for row, best in exact.items()]
    return Sentence.from_list("; ", parts)


def better_of_baselines(chosen: Plan, others: Iterable[Plan], zero_stages: Sequence[int] = ZERO) -> Plan:
    """Return the chosen plan; or a baseline that fits, has one of the ZeRO stages that the request leaves open, and is better.

    It may be if the search proved nothing and missed it, if the chosen plan does not fit, or if the GPU waits for its host: the search
    minimises the GPU's part of the step, and a plan with fewer messages and uncut weights takes the host less. Example: GPT-2 XL with
    2 x 1 024 tokens a GPU on 16 GPUs keeps the GPU busy for 91 ms fully sharded and 117 ms data parallel, and the host for 297 and 211 ms.
    """
    timed = chosen.objective == "time"

    def value(plan: Plan) -> float:
        return plan.cost.step_time_s if timed else plan.cost.comm_time_s

    if chosen.method != "exact":
        return chosen
    admitted = [p for p in others if p.fits and zero_stage(p) in zero_stages]
    check_bound_below(chosen, admitted)
    if chosen.fits and chosen.is_step_proven:
        return chosen
    better = min(admitted, key=value, default=chosen)
    if better is chosen or (chosen.fits and value(better) >= value(chosen)):
        return chosen
    if not chosen.fits:
        why = "which fits, while no plan of the search does"
    elif chosen.optimal:
        why = "whose GPU waits less for its host than that of the plan with the least work"
    elif timed:
        why = "whose step is shorter than that of what the search found, which minimises the GPU's part, without waits for the host"
    else:
        why = "which is better than what the search found"
    # A plan that does not fit is bounded in memory, not in time, and the bound of one pipeline stage says nothing of several.
    bound = chosen.bound if chosen.fits else None
    # How the chosen plan was laid out, and what fills its memory, is not said of the plan in its place.
    notes = tuple(note for note in chosen.notes if note.kind in (NoteKind.SCOPE, NoteKind.GAP))
    if better.pipeline is not None:
        notes = (_note_open_gap(bound if timed else None), *(n for n in notes if n.kind is not NoteKind.GAP))
        bound = None
    return replace(
        better,
        name=chosen.name,
        role=chosen.role,
        method=chosen.method,
        objective=chosen.objective,
        optimal=False,
        bound=bound,
        notes=(Note(f"laid out as {better.name}, {why}"), *notes),
    )


def _note_open_gap(one_stage_s: float | None) -> Note:
    """Return a note on the gap of a stated layout with stages. `one_stage_s`: seconds that no plan of one pipeline stage is below, if
    known."""
    known = (": no plan of one pipeline stage takes less than ", time_amount(one_stage_s)) if one_stage_s else ()
    return Note(Sentence("not proven", *known), NoteKind.GAP)
