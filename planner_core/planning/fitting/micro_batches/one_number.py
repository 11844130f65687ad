"""The search of one number of micro-batches without proof: its bounds, its plan, and the meshes on which multiples of it may be better.

bounds of its meshes, of any memory -> meshes that may win -> the fastest plan of any memory, if it fits
    -> a plan of one mesh, to show -> the plan of all its meshes
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner_core.core import DeviceMesh, NoPlanFits, Plan
from planner_core.planning.fitting.mesh_search import mesh_of_quick_plan
from planner_core.planning.fitting.micro_batch_numbers import MicroBatchCandidate, build_problems
from planner_core.planning.fitting.micro_batches.first_plan import offer_first_plan
from planner_core.planning.fitting.micro_batches.state import PlannedNumber, SearchState, SearchTask
from planner_core.planning.planner import Planner
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
from planner_core.search.algebra import Incumbent


class PlanOfNumber(NamedTuple):
    """What a search without proof gives. `plan`: None if none is within the user's budget. `peak_bytes`: what that plan takes per GPU;
    without one, what the plan of least memory takes. `bound`: a lower bound on the value of every plan that fits."""

    plan: Plan | None
    peak_bytes: float
    bound: float


class SearchedNumber(NamedTuple):
    """What a search of a number gives: its plan, if it has one, and the meshes on which a multiple of it may be better."""

    plan: Plan | None
    open_meshes: Sequence[DeviceMesh]


def search_number(task: SearchTask, state: SearchState, candidate: MicroBatchCandidate) -> SearchedNumber:
    """Search one number without proof. What it finds is taken into `state`."""
    number, incumbent_value = candidate.micro_batches, state.best_fitting.value
    bounds = bound_meshes(task, state, candidate)
    candidate = replace(candidate, options=[mesh for mesh in candidate.options if state.beats_incumbent(bounds[mesh])])
    # Meshes that were left out have no plan below the incumbent's value, so it bounds them.
    state.bounds.any_memory[number] = min([incumbent_value, *(bounds[mesh] for mesh in candidate.options)])
    if not candidate.options:
        return SearchedNumber(None, ())
    # At the first number it was searched already.
    if state.states_fit and number != state.first.micro_batches:
        fastest = find_fastest_that_fits(task, state, candidate)
        if fastest is not None:
            keep_fastest(task, state, candidate, fastest)
            if state.best_of_any_memory is not None:
                return SearchedNumber(fastest[1], ())
    state.searched.append(candidate)
    plan: Plan | None = None
    if task.numbers.several:
        preview_number(task, state, candidate, bounds)
        # Below the value from before: a search below a lower one sees fewer plans, of which trade-offs are made.
        plan = _plan_and_keep(task, state, candidate, incumbent_value)
    _forget_networks(state, candidate)
    return SearchedNumber(plan, [mesh for mesh in candidate.options if state.beats_incumbent(bounds[mesh])])


def _plan_and_keep(task: SearchTask, state: SearchState, candidate: MicroBatchCandidate, below: float) -> Plan | None:
    """Plan a number below a value, and take what is known of it then into `state`. Returns its plan, if it has one."""
    number = candidate.micro_batches
    plan, state.peak_bytes[number], state.bounds.within_budget[number] = plan_number(task, candidate, below)
    if plan is not None and plan.fits and state.beats_incumbent(candidate.planner.value(plan)):
        state.best_fitting.offer(candidate.planner.value(plan), (candidate.planner, plan))
        offer_first_plan(task, state, candidate.planner, plan)
    return plan


def _forget_networks(state: SearchState, candidate: MicroBatchCandidate) -> None:
    """Free the networks that no later step reads: networks that bounded a number, and networks of a number that cannot be best."""
    best = state.best_fitting.solution
    done = [p for p in (candidate.plain, candidate.bounding) if p is not candidate.planner]
    may_win = state.beats_incumbent(state.bounds.within_budget.get(candidate.micro_batches, 0.0))
    if not may_win and not (best and best[0] is candidate.planner):
        done.append(candidate.planner)
    for planner in done:
        planner.networks.clear_problems()


def plan_number(task: SearchTask, candidate: MicroBatchCandidate, below: float = math.inf) -> PlanOfNumber:
    """Plan a number on its meshes without proof. Plans of a value above `below` are not looked for."""
    try:
        plan = task.search_meshes(candidate.planner, candidate.options, task.report_progress, below=below, prove=False)
    except NoPlanFits as error:
        return PlanOfNumber(None, error.needed_bytes, min(below, error.bound))
    # A plan that does not fit has the bound of those that do, which the search may have missed; none if nothing fits.
    without_bound = 0.0 if plan.fits else math.inf
    bound = without_bound if plan.bound is None else plan.bound
    return PlanOfNumber(plan, plan.cost.memory_bytes["peak"], min(below, bound))


def preview_number(
    task: SearchTask, state: SearchState, candidate: MicroBatchCandidate, bounds: Mapping[DeviceMesh, float]
) -> None:
    """Offer the plan of the mesh of the least bound as the first one, before the other meshes of a number are searched.

    Mostly it is the plan of all meshes, and the networks of the others take most of the time. Its search serves that of all meshes.
    """
    no_preview = state.is_first_shown or state.best_fitting.solution is not None or not state.states_fit
    if no_preview or len(candidate.options) == 1:
        return
    best = min(candidate.options, key=bounds.__getitem__)
    preview_without_recomputation(task, state, replace(candidate, options=[best]))
    _preview_mesh(task, state, candidate, best)
    if state.is_first_shown or candidate.planner.spaces:
        return
    # The sums of memory do not hold buffers. Example: on 16 384 GPUs the plan of the least bound takes 93 GB where its sum is 78, and the
    # plans of 11 of the other 13 meshes do not fit either.
    fitting = mesh_of_quick_plan(candidate.planner, candidate.options, task.report_progress)
    if fitting is not None:
        _preview_mesh(task, state, candidate, fitting)


def _preview_mesh(task: SearchTask, state: SearchState, candidate: MicroBatchCandidate, mesh: DeviceMesh) -> None:
    plan = plan_number(task, replace(candidate, options=[mesh])).plan
    if plan is not None:
        offer_first_plan(task, state, candidate.planner, plan)


def preview_without_recomputation(task: SearchTask, state: SearchState, candidate: MicroBatchCandidate) -> None:
    """Offer the best plan without recomputation as the first one, if the fastest one of any memory nearly fits.

    Its network is a third of that with recomputation. Example: the fastest plan of MiniMax-Text-01 takes 78.9 of 78.7 GB.
    """
    if candidate.plain is candidate.planner or not fastest_nearly_fits(candidate):
        return
    plan = plan_number(task, replace(candidate, planner=candidate.plain)).plan
    if plan is not None and plan.fits:
        offer_first_plan(task, state, candidate.planner, plan)


def fastest_nearly_fits(candidate: MicroBatchCandidate) -> bool:
    """Return whether on one of the meshes the fastest plan without recomputation takes at most FIRST_BUDGET_FACTOR times the budget."""
    problems = build_problems(candidate.plain, candidate.options) or ()
    fastest = (search_roughly(p, candidate.plain.objective()) for p in problems if p.unrestricted is None)
    most_bytes = FIRST_BUDGET_FACTOR * candidate.plain.budget
    return any(a is not None and memory_bytes(a) <= most_bytes for a in fastest)


def find_fastest_that_fits(
    task: SearchTask, state: SearchState, candidate: MicroBatchCandidate
) -> PlannedNumber | None:
    """Return the best plan of any memory without recomputation if it fits; else None. No plan of this number is better."""
    planner, objective = candidate.plain, candidate.plain.objective()
    problems = build_problems(planner, candidate.options) if planner is not candidate.planner else None
    if problems is None or any(p.unrestricted is not None for p in problems):  # no bound holds for the whole space
        return None
    with planner.clock("search"):
        fastest = possible_winners(problems, objective)
        if not any(rough_plan_fits(p, planner.graph, planner.budget, objective) for p in fastest):
            return None
        # A plan that fits and is as fast as any of any memory ends the search: more micro-batches and recomputation only add work.
        bound = least_value_bound(fastest, objective) * (1 + TIE)
    below = min(state.best_fitting.value, bound)
    with contextlib.suppress(NoPlanFits):
        plan = task.search_meshes(planner, candidate.options, task.report_progress, below=below, prove=False)
        if plan.fits and planner.value(plan) <= bound:
            return planner, plan
    return None


def keep_fastest(task: SearchTask, state: SearchState, candidate: MicroBatchCandidate, fastest: PlannedNumber) -> None:
    """Take the best plan of any memory of a number, which fits, in place of the best one. Recomputation would not help, nor would more
    micro-batches, if the bounds of its meshes for multiples of the number are as high as its value."""
    planner, plan = fastest
    value = planner.value(plan)
    state.best_fitting = Incumbent(value, fastest)
    holds_for_multiples = not task.numbers.several or candidate.bounding is candidate.plain
    if holds_for_multiples or not any(
        state.beats_incumbent(bound_multiples_on(state, candidate, mesh)) for mesh in candidate.options
    ):
        state.best_of_any_memory = fastest


def bound_meshes(task: SearchTask, state: SearchState, candidate: MicroBatchCandidate) -> dict[DeviceMesh, float]:
    """Return `bound_multiples_on` each mesh of a number. They are worked out once, and not where nobody needs them."""
    number, on_mesh = candidate.micro_batches, state.bounds.on_mesh
    if number not in on_mesh:
        # They tell where other numbers may be better, so there have to be others, which may fit.
        needed = state.states_fit and task.numbers.several
        on_mesh[number] = {m: bound_multiples_on(state, candidate, m) if needed else 0.0 for m in candidate.options}
    return on_mesh[number]


def bound_multiples_on(state: SearchState, candidate: MicroBatchCandidate, mesh: DeviceMesh) -> float:
    """Return a lower bound on the plans of any memory on one mesh, with a number of micro-batches or with a multiple of it."""
    incumbent, of_divisors = state.best_fitting.value, state.bounds.of_divisors_on(mesh, candidate.micro_batches)
    if of_divisors is not None and of_divisors >= incumbent:
        return of_divisors
    # A relaxation of seconds is in vain where that of a divisor is far below the incumbent. Example: Zamba2, 0.2 of 1.1 s.
    relaxed = of_divisors is None or of_divisors >= incumbent / 2
    return max(of_divisors or 0.0, bound_on_mesh(candidate.bounding, mesh, relaxed=relaxed))


def bound_on_mesh(planner: Planner, mesh: DeviceMesh, *, relaxed: bool = True) -> float:
    """Return a lower bound on the plans of any memory on one mesh; 0 if none is known. `relaxed`: also where the space is a smaller
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
        return min((bound_of_whole_space(p, objective) for p in problems), default=math.inf)
