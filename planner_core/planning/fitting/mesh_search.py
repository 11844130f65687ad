"""The best plan over several meshes, by one method.

    for each mesh and set of ZeRO stages: network -> a search without proof -> its bound
    most promising first: a search to the end, unless its bound is above the best plan so far

Example: with bounds of 5.0, 5.1 and 4.2 s and plans of 5.2, 5.1 and none that fits, the first one goes first, and the third one
last: its bound is low since it does not hold the price of memory.

Values that differ by rounding alone are equal here. How a sum of floats is rounded depends on the processor, and the plan must not.
The bound of the answer is the least of all bounds: a gap that one mesh leaves open stays open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from planner_core.core import (
    CHUNKS,
    RECOMPUTE,
    DeviceMesh,
    NoPlanFits,
    Note,
    NoteKind,
    Plan,
    PlanRole,
    Sentence,
    named,
    time_amount,
)
from planner_core.cost import cost_model, seconds_in_chunks
from planner_core.planning.fitting.shortage import needs_buffers, note_meshes_left_out, refuse_or_least_memory
from planner_core.planning.methods import METHODS, Method, describe_least
from planner_core.planning.planner import STATED_METHOD, MeshAnswer, Planner, with_recompute
from planner_core.planning.request import THOROUGH, Progress
from planner_core.search import (
    FIRST_BUDGET_FACTOR,
    TIE,
    Answer,
    SearchLimits,
    bound_of_walk,
    bound_of_whole_space,
    check_bound,
    describe_gap,
    exceeds_budget_by_far,
    least_sum_peak,
    memory_bytes,
    no_plan_fits,
    objective_value,
    rough_bound,
    search_roughly,
    search_within_budget,
    simulated_peak,
)
from planner_core.search.algebra import Incumbent, TooWide
from planner_core.search.network import Problem

EQUAL_VALUES_SHARE = 1e-9
"""Share by which two equal values may differ."""


MIN_WIDE_GAP = 0.01
"""A gap from which on plans that recompute all blocks alike are looked at too, also where no proof is asked for."""


MAX_MESHES_IN_VAIN = 4
"""Meshes that are searched in vain before others are searched only if their plan of the least sum fits, or needs less. A proof searches
all."""


@dataclass(slots=True)
class SearchedMeshes:
    """What a search of meshes knows so far.

    Attributes:
        best: The best answer that fits, with its value.
        least_memory: The answer of least memory, with its bytes.
        bound: Of all plans, or of those on the meshes that were searched where the others need no bound.
        number: How many meshes were searched.
    """

    best: Incumbent[MeshAnswer] = field(default_factory=Incumbent)
    least_memory: Incumbent[MeshAnswer] = field(default_factory=Incumbent)
    bound: float = math.inf
    number: int = 0

    def add(self, mesh_answer: MeshAnswer) -> None:
        """Take an answer into account."""
        answer = mesh_answer.answer
        self.least_memory.offer(answer.least_memory, mesh_answer)
        if answer.assignment is not None and is_clearly_less(answer.value, self.best.value):
            self.best.offer(answer.value, mesh_answer)
        self.bound, self.number = min(self.bound, answer.bound), self.number + 1


class MeshSearch(Protocol):
    """Gives the best plan of a planner over meshes: `choose_mesh`, or what stands in its place for a tool that takes layers by name."""

    def __call__(
        self,
        planner: Planner,
        options: Sequence[DeviceMesh],
        report_progress: Progress,
        *,
        below: float = math.inf,
        prove: bool = True,
    ) -> Plan:
        """As `choose_mesh` does."""


def choose_mesh(
    planner: Planner,
    options: Sequence[DeviceMesh],
    report_progress: Progress = lambda text: None,
    method: Method | None = None,
    below: float = float("inf"),
    prove: bool = True,
) -> Plan:
    """Return the best plan over the meshes, by the request's method or by the given `method`.

    `below`: plans of a higher value are not looked for. If there is no other, NoPlanFits is raised, or such a plan is returned.
    `prove`: if False, a better plan may exist. Raises NoPlanFits if the user gave a budget that no plan fits.
    """
    method = method or METHODS[planner.request.method]
    objective = planner.objective(method)
    ranked, wide = _ranked_problems(planner, options, method, report_progress, below)
    searched = _search_in_order(planner, ranked, objective, report_progress, below, prove=prove)
    best, least_memory, bound = searched.best.solution, searched.least_memory.solution, searched.bound
    # Problems that gave up states bound their smaller space alone, so their whole spaces are bounded by a relaxation.
    narrowed = [
        p.problem for p in ranked if p.problem.unrestricted is not None and not (best and p.problem is best.problem)
    ]
    with planner.clock("search"):
        bound = min([bound, *(bound_of_whole_space(p, objective, planner.budget) for p in narrowed)])
    if best:
        problem, answer = planner.bounded(best.problem, best.answer, objective)
        bound = min(bound, answer.bound)
        answer = replace(answer, bound=bound)  # a gap that another mesh leaves open stays open
        plan = planner.plan(problem, answer, "best", planner.request.method, objective, role=PlanRole.BEST)
        if prove and problem.unrestricted is None:
            plan = _find_missed_plan(planner, planner.value(plan), bound, ranked, method, report_progress) or plan
        plan = note_meshes_left_out(plan, wide)
        return replace(plan, notes=(*plan.notes, *_note_chunk_gain(planner, plan))) if method.chunks else plan
    if prove and method.zero and least_memory is not None and needs_buffers(least_memory.answer, planner.budget):
        return _best_without_gathers(planner, options, report_progress, method, below, least_memory, bound)
    missed = _find_missed_plan(planner, below, bound, ranked, method, report_progress) if prove else None
    return missed or refuse_or_least_memory(planner, options, below, least_memory, wide, bound)


def _search_in_order(
    planner: Planner,
    ranked: Sequence[RankedProblem],
    objective: str,
    report_progress: Progress,
    below: float,
    *,
    prove: bool,
    bounded: bool = True,
) -> SearchedMeshes:
    """Search the problems in this order. `bounded`: problems that need no search get a bound nevertheless."""
    searched = SearchedMeshes()
    for candidate in ranked:
        problem, best = candidate.problem, searched.best.solution
        incumbent = searched.best.value if best else below
        # Where nothing can fit, a mesh is searched for the plan of least memory alone: only if none is known that fits or needs less.
        if incumbent < math.inf and no_plan_fits(problem, planner.budget):
            continue
        least_memory = searched.least_memory
        needs_more = least_memory.solution is not None and least_memory.value <= problem.least_bytes
        if needs_more and exceeds_budget_by_far(problem, planner.budget):
            continue
        bound = _bound_without_search(planner, candidate, objective, incumbent, searched, bounded=bounded)
        if bound is not None:
            searched.bound = min(searched.bound, bound)
            continue
        report_progress(Sentence("search on ", problem.model.mesh.term))
        prices = best.answer.prices if best else candidate.prices
        limits = SearchLimits(incumbent, progress_callback(report_progress, problem), prove=prove, prices=prices)
        searched.add(MeshAnswer(planner.solve(problem, objective, limits, candidate.answer), problem))
    return searched


def _bound_without_search(
    planner: Planner,
    candidate: RankedProblem,
    objective: str,
    incumbent: float,
    searched: SearchedMeshes,
    *,
    bounded: bool,
) -> float | None:
    """Return a bound of the plans of a problem that needs no search, since none is below the `incumbent` value; None if it has to
    be searched.

    `bounded`: whether a bound is asked for; if not, it is infinite.
    """
    problem, budget = candidate.problem, planner.budget
    # The least of all bounds is asked for. The first meshes have the lowest bounds, so most later ones need no search.
    highest = candidate.bound if candidate.bound > incumbent else None
    # Meshes of one bound have one layout in common. A bound that holds by the walk shows that they are no better, for a third of what
    # their search takes. Example: Llama-3.1-405B on 1 024 GPUs has six such meshes.
    is_whole = problem.make_at_least is not None and problem.unrestricted is None
    if highest is None and searched.best.solution is not None and bounded and is_whole:
        of_walk = bound_of_walk(problem, budget, objective, candidate.bound_within_budget, candidate.prices, incumbent)
        return of_walk if of_walk > incumbent else None
    if highest is None and _is_searched_in_vain(planner, searched):
        # A mesh whose plan of the least sum fits, or needs less than what is known, is searched nevertheless.
        least_peak = least_sum_peak(problem, planner.graph, budget, objective)
        if least_peak < max(budget, searched.least_memory.value):
            return None
        if no_plan_fits(problem, budget):
            return math.inf
        highest = candidate.bound_within_budget
    if highest is None:
        return None
    # What is above the bound of all meshes so far changes nothing, so the walk's is not looked for beyond.
    highest, gap = min(searched.bound, highest), planner.effort.gap
    return bound_of_walk(problem, budget, objective, highest, candidate.prices, open_gap=gap) if bounded else math.inf


def _is_searched_in_vain(planner: Planner, searched: SearchedMeshes) -> bool:
    """Return whether a search of more meshes would mostly be in vain, since so many have no plan that fits. A proof searches all.

    Sums do not hold the buffers of gathered weights, so a mesh may look promising although none of its plans fits. Example: with one
    micro-batch 26 of 27 meshes of Llama-3.1-405B on 100 000 GPUs. Their plans of the least memory hold 79 to 101 GB, and sums 51 to 60.
    """
    nothing_fits = searched.best.solution is None and searched.least_memory.solution is not None
    return nothing_fits and searched.number >= MAX_MESHES_IN_VAIN and planner.effort is not THOROUGH


def _best_without_gathers(
    planner: Planner,
    options: Sequence[DeviceMesh],
    report_progress: Progress,
    method: Method,
    below: float,
    least_memory: MeshAnswer,
    bound: float,
) -> Plan:
    """Return the best plan that gathers no weights at their use, and so needs no buffers for them. If none fits, return the plan of
    least memory of all. Raises NoPlanFits as `choose_mesh` does."""
    error: NoPlanFits | None = None
    plan: Plan | None = None
    try:
        plan = choose_mesh(planner, options, report_progress, replace(method, zero=0), below, prove=False)
    except NoPlanFits as raised:
        error = raised
    if plan is not None and plan.fits:
        scope = Note("not proven: only plans that gather no weights at their use were looked at", NoteKind.SCOPE)
        return replace(plan, optimal=False, bound=min(bound, planner.value(plan)), notes=(scope, *plan.notes))
    try:
        other = refuse_or_least_memory(planner, options, below, least_memory, None, bound)
    except NoPlanFits as raised:
        raise min(error or raised, raised, key=lambda e: e.needed_bytes) from None
    smallest = other if plan is None else min(plan, other, key=lambda p: p.cost.memory_bytes["peak"])
    return replace(smallest, bound=other.bound)  # of all plans, not only of those that gather no weights


def _find_missed_plan(
    planner: Planner,
    below: float,
    bound: float,
    ranked: Sequence[RankedProblem],
    method: Method,
    report_progress: Progress,
) -> Plan | None:
    """Find the best plan whose value is less than `below` among those that recompute all blocks by one policy; None if there is none.

    Free choice of the policy for each block never makes the optimum worse. But a search within a budget that ends with a gap may miss a
    plan that the search of a smaller space finds. `bound` holds for plans of every choice.
    """
    # A gap within ties cannot hold a better plan, so nothing was missed.
    if planner.workload.recompute != "auto" or below == math.inf or below <= bound * (1 + TIE):
        return None
    if planner.effort is not THOROUGH and below <= bound * (1 + MIN_WIDE_GAP):
        return None
    best: Plan | None = None
    objective, thorough = planner.objective(method), planner.effort is THOROUGH
    # Only meshes whose bound is below the best plan can hold what was missed. A moment's work looks at the most promising.
    options = list(dict.fromkeys(p.problem.model.mesh for p in ranked if p.bound < below))
    options = options if thorough else options[:1]
    for policy in (p for p in RECOMPUTE if p != "auto"):
        other = with_recompute(planner, policy)
        # The lower the value that a search has to beat, the sooner it gives up, and the fewer plans it has seen that later searches mix.
        # Example: Llama-3-8B of two layers in 5 GB takes 66.34 ms if the limit is the value itself, else 66.27.
        limit = math.inf if thorough else below * (1 + MIN_WIDE_GAP)
        ranked_alike, _ = _ranked_problems(other, options, method, report_progress, limit)
        searched = _search_in_order(other, ranked_alike, objective, report_progress, limit, prove=True, bounded=False)
        best_of_policy = searched.best.solution
        if best_of_policy is None:
            continue
        plan = other.plan(
            best_of_policy.problem, best_of_policy.answer, "best", planner.request.method, objective, role=PlanRole.BEST
        )
        if plan.fits and planner.value(plan) < below:
            below = planner.value(plan)
            gap = Note(describe_gap(below, bound, describe_least(method.name, objective)), NoteKind.GAP)
            best = replace(plan, optimal=False, bound=bound, notes=(gap,))
    return best


def mesh_of_quick_plan(planner: Planner, options: Sequence[DeviceMesh], report_progress: Progress) -> DeviceMesh | None:
    """Return the mesh of the quickest plan that searches without proof give and whose simulated peak fits; None if none fits."""
    ranked, _ = _ranked_problems(planner, options, METHODS[planner.request.method], report_progress, math.inf)
    best, mesh = math.inf, None
    for candidate in ranked:
        a, problem = candidate.answer and candidate.answer.assignment, candidate.problem
        if a and a.seconds < best and simulated_peak(problem, planner.graph, a, planner.budget) <= planner.budget:
            best, mesh = a.seconds, problem.model.mesh
    return mesh


def with_lower_bound(planner: Planner, plan: Plan, bound: float) -> Plan:
    """Return a plan that fits with the lower `bound` of a larger space, which may take its proof away; unchanged if its own is no
    higher."""
    value = planner.value(plan)
    if plan.bound is None or bound >= min(plan.bound, value) * (1 - TIE / 10):
        return plan
    proven = value <= bound * (1 + TIE)
    notes = tuple(note for note in plan.notes if note.kind is not NoteKind.GAP)
    gap = Note(describe_gap(value, bound, describe_least(plan.method, plan.objective)), NoteKind.GAP)
    return replace(plan, optimal=proven, bound=bound, notes=notes if proven else (gap, *notes))


def check_bound_below(chosen: Plan, others: Iterable[Plan]) -> None:
    """Raise SearchFault if the bound of the chosen plan is above the value of another plan of its request."""
    if not chosen.fits or chosen.bound is None:
        return
    sizes = chosen.mesh.axis_sizes
    for plan in others:
        # The bound is of plans of one stage. Meshes of more than two axes are in it if they were searched: that of the chosen plan was.
        # What a team states on it is not in it, where operators treat all but the last axis as one.
        searched = len(plan.mesh.axis_sizes) <= 2 or (plan.mesh.axis_sizes == sizes and plan.method != STATED_METHOD)
        if plan.fits and plan.pipeline is None and searched:
            value = objective_value(chosen.objective, plan.cost.gpu_time_s, plan.cost.comm_time_s)
            check_bound(value, chosen.bound, plan.name)


def _ranked_problems(
    planner: Planner, options: Iterable[DeviceMesh], method: Method, report_progress: Progress, below: float
) -> tuple[list[RankedProblem], TooWide | None]:
    """Return the networks of all meshes, the most promising first, so that the others can be abandoned early. And the error of a mesh whose
    tables would be too large, if there is one."""
    problems: list[Problem] = []
    wide: TooWide | None = None
    for mesh in _without_mirrors(options) if method.by_volume else options:
        report_progress(Sentence("network of ", mesh.term))
        for build in planner.builders(method, mesh):
            try:
                problems.append(build())
            except TooWide as error:  # another mesh may work; it is raised only if none does
                wide = error
    objective = planner.objective(method)
    with planner.clock("search"):
        if len(problems) == 1:
            return [
                RankedProblem(problems[0], bound=rough_bound(problems[0], objective) if below < math.inf else 0.0)
            ], wide
        return rank_by_bound(problems, objective, planner.budget, report_progress, below), wide


def _without_mirrors(options: Iterable[DeviceMesh]) -> list[DeviceMesh]:
    """Return the first mesh of each set of axis sizes.

    Where a byte costs the same on every axis, 2 x 8 and 8 x 2 have the same plans at the same values. Searched twice, they
    spend the points of one proof twice: GPT-2 XL stayed unproven.
    """
    return list({tuple(sorted(mesh.axis_sizes)): mesh for mesh in reversed(list(options))}.values())[::-1]


def _note_chunk_gain(planner: Planner, plan: Plan) -> tuple[Note, ...]:
    """Return a note about what the plan would gain if its products ran in chunks, as ATP's do."""
    if plan.cost.host_wait_s:  # the GPU waits anyway, so what its work gains is not gained by the step
        return ()
    workload, step = plan.workload, plan.cost.step_time_s
    models = [
        cost_model(planner.cluster, plan.mesh, replace(workload, chunks=n)) for n in CHUNKS if n > workload.chunks
    ]
    best, n = min((seconds_in_chunks(plan.blocks, planner.graph, m), m.workload.chunks) for m in models)
    if best >= step:
        return ()
    sentence = Sentence(
        f"with its products in {n} chunks (",
        named("chunks", n),
        ") sums over GPUs run beside products: step ",
        time_amount(best),
        " instead of ",
        time_amount(step),
    )
    return (Note(sentence),)


def is_clearly_less(value: float, than: float) -> bool:
    """Return whether a value is less than another by more than rounding."""
    return value < than * (1 - EQUAL_VALUES_SHARE)


def _round_for_order(value: float) -> float:
    """Return a value to sort by, without what rounding changes."""
    return float(f"{value:.9g}")


@dataclass(frozen=True, slots=True)
class RankedProblem:
    """A problem, and what a search without proof says of it.

    Attributes:
        answer: The answer of that search; None if it was abandoned or not begun.
        bound: A lower bound on the value of every plan whose sum of memory is at most FIRST_BUDGET_FACTOR times the budget.
        prices: The prices of memory that gave the bounds.
        bound_within_budget: A lower bound on the value of every plan whose sum of memory is within the budget.
    """

    problem: Problem
    answer: Answer | None = None
    bound: float = 0.0
    prices: tuple[float, float] = (0.0, 0.0)
    bound_within_budget: float = 0.0


def rank_by_bound(
    problems: Sequence[Problem], objective: str, budget: float, report_progress: Progress, below: float
) -> list[RankedProblem]:
    """Return the problems in the order of their bounds, with what a search without proof says of them.

    Problems in which no plan was found that fits go last, since a plan of another one may make their searches short. Last of all are those
    in which nothing can fit, the least memory first.
    """
    searches: list[tuple[bool, float, RankedProblem]] = []
    near = [p for p in problems if not no_plan_fits(p, budget)]
    fit = [a.seconds * (1 + TIE) for p in near if (a := search_roughly(p, objective)) and memory_bytes(a) <= budget]
    # A rough plan that fits lets every search below stop at its value.
    incumbent, prices = min([below, *fit]), (0.0, 0.0)
    for problem in sorted(near, key=lambda p: _round_for_order(rough_bound(p, objective))):
        if is_clearly_less(incumbent, bound := rough_bound(problem, objective)):
            searches.append((False, bound, RankedProblem(problem, bound=bound, bound_within_budget=bound)))
            continue
        stop = progress_callback(report_progress, problem)
        limits = SearchLimits(incumbent, stop, prove=False, bound_only=True, prices=prices)
        answer = search_within_budget(problem, objective=objective, budget=budget, limits=limits)
        nothing_fits = answer.smallest is not None
        is_abandoned = answer.assignment is None and not nothing_fits
        # What fits by the walk may have a sum above the budget. The Lagrange bound falls by the price of each byte more: at 2 s a GB,
        # 80 GB and a factor of 1.05 by 2 * 0.05 * 80 = 8 s.
        within_budget = rough_bound(problem, objective) if nothing_fits else answer.bound
        bound = within_budget - sum(answer.prices) * (FIRST_BUDGET_FACTOR - 1) * budget
        ranked = RankedProblem(problem, None if is_abandoned else answer, bound, answer.prices, within_budget)
        searches.append((nothing_fits, within_budget, ranked))
        incumbent = answer.value if is_clearly_less(answer.value, incumbent) else incumbent
        prices = answer.prices if any(answer.prices) else prices
    # They come last, since a plan that fits makes a search for the least memory needless.
    far = sorted((p for p in problems if no_plan_fits(p, budget)), key=lambda p: p.least_bytes)
    in_order = sorted(searches, key=lambda search: (search[0], _round_for_order(search[1])))
    return [ranked for *_, ranked in in_order] + [RankedProblem(p) for p in far]


def progress_callback(report_progress: Progress, problem: Problem) -> Callable[[], bool]:
    """Callback for long searches: it reports progress, and the progress function may raise to cancel."""

    def stop() -> bool:
        report_progress(Sentence("search on ", problem.model.mesh.term))
        return False

    return stop
