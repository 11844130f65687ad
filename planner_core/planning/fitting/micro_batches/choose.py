"""Choose the number of micro-batches of a step, and whether blocks are recomputed. Memory decides both.

More micro-batches never make a step of the same layout faster: operators become smaller, and every collective of a micro-batch
is sent more often. But they need less memory, so that a faster layout may fit. So the least step time without a limit of memory
never falls as the number grows:

    least step time with n micro-batches  ≤  least step time with n · p micro-batches        (any memory)

This holds for each mesh. A mesh is left out from the first number on whose least step time is not below the best plan that fits.
The search ends when no mesh is left. Where a micro-batch gives each GPU a sample, ranks with samples of their own do the work of
context ranks at least as quickly. Where it does not, or a tool's layout has context ranks, the least step time is that of a larger
space (`ops.strategies_of_any_samples`): beside experts, context ranks take one sample of a rank at once, which a larger number of
micro-batches alone may give.

A search for the least communication takes the first number with a plan that fits. More micro-batches only let layouts fit that do
the same work on more GPUs. They send less and take far longer.

Example: a batch of 512 samples. With one micro-batch nothing fits. With two, the best plan that fits recomputes, and takes
9.0 s. With four it takes 8.5 s, without recomputation. With eight, even the best plan of any memory takes 8.6 s. So the answer
is four, and sixteen is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from planner_core.core import NoPlanFits, divisors
from planner_core.planning.fitting.mesh_search import MeshSearch, choose_mesh
from planner_core.planning.fitting.micro_batch_numbers import (
    GraphSource,
    MicroBatchCandidate,
    MicroBatchNumbers,
    least_sum_of_bytes,
    list_least_memory_numbers,
    micro_batches_that_fit,
    no_number_can_fit,
)
from planner_core.planning.fitting.micro_batches.first_plan import offer_first_plan, show_first_plan
from planner_core.planning.fitting.micro_batches.one_number import (
    bound_meshes,
    find_fastest_that_fits,
    keep_fastest,
    plan_number,
    search_number,
)
from planner_core.planning.fitting.micro_batches.state import (
    PlannedNumber,
    SearchState,
    SearchTask,
    ShowFirst,
    bound_by_all_numbers,
)
from planner_core.planning.fitting.shortage import least_state_bytes, states_can_fit
from planner_core.planning.planner import Planner, candidate_meshes
from planner_core.planning.request import MOMENT, THOROUGH, Effort, Progress, Request
from planner_core.search import TIE

MAX_NUMBERS_BETWEEN = 3
"""Numbers that the steps passed over and that are searched, where no proof is asked for."""
MAX_STATES_RATIO = 1.5
"""A plan that does not fit is good enough if it takes at most so many times what evenly shared weights, gradients and states take."""


def choose_micro_batches(
    request: Request,
    graph: GraphSource,
    report_progress: Progress,
    *,
    search: MeshSearch = choose_mesh,
    effort: Effort | None = None,
    earlier_planner: Planner | None = None,
    show_first: ShowFirst = lambda planner, plan: None,
) -> PlannedNumber:
    """Return the planner of the best number of micro-batches, and its plan; if nothing fits, the plan of least memory.

    Each number is searched without proof first, which saves the exact searches most of their work. The plan's bound holds for all numbers.

    Args:
        search: The search over the meshes of one number.
        effort: What proofs may take; None: a moment, or all that it takes where the request says `prove`.
        earlier_planner: An earlier planner of the same model, whose graphs are used again.
        show_first: Gets one plan as soon as a good one is known, at the latest that of the search without proof, with a bound that holds
            for all numbers; where nothing can fit, that of least memory with the first number.

    Raises:
        NoPlanFits: No plan fits the budget that the user gave.
        InputError: The request is wrong.
    """
    effort = effort or (THOROUGH if request.prove else MOMENT)
    numbers = MicroBatchNumbers.of_request(request, graph, report_progress, effort, earlier_planner)
    task = SearchTask(numbers, search, report_progress, show_first)
    state = search_without_proof(task)
    if (best := state.best_fitting.solution) is not None:
        show_first_plan(task, state, bound_by_all_numbers(task, state, *best))
    planner, plan = search_exactly(task, state)
    plan = bound_by_all_numbers(task, state, planner, plan)
    show_first_plan(task, state, plan)
    return planner, plan


def search_without_proof(task: SearchTask) -> SearchState:
    """Return what the steps find, in their order."""
    first = task.numbers.first
    meshes = candidate_meshes(first.request, first.cluster)
    state = SearchState(MicroBatchCandidate.of(first, meshes), states_fit=states_can_fit(first))
    for name, step in STEPS.items():
        state.reasons[name] = step(task, state)
    return state


def take_fastest_if_it_fits(task: SearchTask, state: SearchState) -> str:
    """Look for the best plan of any memory with the first number, which is the best of all numbers where it fits."""
    fastest = find_fastest_that_fits(task, state, state.first) if state.states_fit else None
    if fastest is None:
        return "the fastest plan of any memory does not fit, or is not known"
    keep_fastest(task, state, state.first, fastest)
    return "the fastest plan of any memory fits"


def look_whether_any_fits(task: SearchTask, state: SearchState) -> str:
    """Look whether it is known without a search that no number has a plan that fits."""
    if state.best_fitting.solution is not None:
        return "a plan fits"
    state.nothing_can_fit = not state.states_fit or no_number_can_fit(state.first, task.numbers)
    return "no plan can fit" if state.nothing_can_fit else "a plan may fit"


def search_least_memory(task: SearchTask, state: SearchState) -> str:
    """Search the plan of least memory, where nothing can fit: with the first number, and with the other number whose sum of memory is the
    least. That nothing fits is the answer, so it is shown before the other number, whose graph may have to be captured."""
    if not state.nothing_can_fit:
        return "a plan may fit"
    if search_one_axis(task, state):
        return "the plan on one axis takes little more than evenly shared states"
    plan, open_meshes = search_number(task, state, state.first)
    if plan is not None:
        offer_first_plan(task, state, state.first.planner, plan)
    if open_meshes and task.numbers.several:
        others = list_least_memory_numbers(state.first, task.numbers)
        others = [other for other in others if other.micro_batches not in state.bounds.any_memory]
        if others:
            search_number(task, state, min(others, key=least_sum_of_bytes))
    return "the first number and the one of the least sum of bytes have it"


def search_one_axis(task: SearchTask, state: SearchState) -> bool:
    """Show the plan of least memory on the mesh of one axis, where nothing can fit. Returns whether it is the answer: it is if
    other meshes and numbers, whose networks take most of the time, can exceed the memory by little less.

    Example: DeepSeek-V4 on 16 H100 says after 2.5 s and not after 5 that no plan fits.
    """
    one_axis = [mesh for mesh in state.first.options if len(mesh.axis_sizes) == 1]
    if not one_axis or len(state.first.options) == 1:
        return False
    candidate = replace(state.first, options=one_axis)
    plan, peak_bytes, _ = plan_number(task, candidate)
    if plan is None:
        return False
    offer_first_plan(task, state, candidate.planner, plan)
    # Who asks for a proof gets the least memory of all plans. Evenly shared states bound every mesh and number.
    is_thorough = state.states_fit or task.numbers.first.effort is THOROUGH
    if is_thorough or peak_bytes > MAX_STATES_RATIO * least_state_bytes(candidate.planner):
        return False
    state.searched.append(candidate)
    state.peak_bytes[candidate.micro_batches] = peak_bytes
    return True


def search_likely_number(task: SearchTask, state: SearchState) -> str:
    """Search the number first at which the fastest plans have about enough room: a good plan makes the searches of all others short."""
    is_open = state.best_of_any_memory is None and not state.nothing_can_fit
    # Bounds of other numbers are those of step times.
    if not (is_open and task.numbers.several and task.objective == "time"):
        return "no other number can win, or the first that fits does"
    samples_a_gpu = task.numbers.last / state.first.planner.cluster.num_gpus
    fitting = micro_batches_that_fit(state.first)
    state.fitting_number = fitting if fitting < math.inf else samples_a_gpu
    state.bounds.any_number = min(bound_meshes(task, state, state.first).values(), default=0.0)
    # With less than a sample for each GPU the plan is not a good one: Llama-3-70B with 16 samples on 16 H100 takes 5.1 s with one
    # micro-batch and recomputation, and 9.6 s with 16.
    nearest = order_by_ratio(divisors(task.numbers.last), min(state.fitting_number, samples_a_gpu))
    search_promising(task, state, nearest, most=1)
    return "its plan makes other searches short"


def search_rising_numbers(task: SearchTask, state: SearchState) -> str:
    """Search numbers of which each divides the next, the least first, until no mesh may be better with more of them."""
    if state.nothing_can_fit:
        return "nothing can fit"
    candidate, meshes = state.first, state.first.options
    while candidate.micro_batches != state.last_useful_number:
        if candidate.micro_batches not in state.bounds.any_memory:
            _, meshes = search_number(task, state, candidate)
        if not meshes:
            return "no mesh may be better with more micro-batches"
        if state.best_fitting.solution is not None and task.objective == "communication":
            return "the first number that fits communicates least"
        following = task.numbers.at(task.numbers.after(candidate.micro_batches))
        if following is None:
            return "the model has no smaller micro-batch"
        candidate = state.candidate(following, meshes)
    return "the fastest plan of any memory fits"


def search_numbers_between(task: SearchTask, state: SearchState) -> str:
    """Search some of the numbers that the steps passed over, or all for a proof. Example: with 240 samples on 48 GPUs five may be best."""
    if state.best_fitting.solution is None or state.fitting_number is None:
        return "nothing fits, or no other number can win"
    most = task.numbers.last if task.numbers.first.effort is THOROUGH else MAX_NUMBERS_BETWEEN
    search_promising(task, state, order_by_ratio(divisors(task.numbers.last), state.fitting_number), most)
    return "those with about enough room"


def choose_numbers_to_prove(task: SearchTask, state: SearchState) -> str:
    """Choose the numbers that are searched exactly."""
    if state.best_fitting.solution is not None:
        return "those whose bounds are below the best plan"
    if not state.searched:
        state.searched = [state.first]  # that no mesh has a plan at all is what the search says
    elif task.numbers.several:
        state.searched = [min(state.searched, key=lambda c: state.peak_bytes[c.micro_batches])]
    return "nothing fits: more work may find another plan at most at the number of the least memory"


def order_by_ratio(numbers: Iterable[int], wanted: float) -> list[int]:
    """Return numbers in the order of their ratios to the `wanted` one. Example: for 8 the numbers 4 and 16 are equally near."""
    return sorted(numbers, key=lambda number: abs(math.log(number / max(wanted, 1.0))))


def search_promising(task: SearchTask, state: SearchState, numbers: Iterable[int], most: int) -> None:
    """Search up to `most` of these numbers whose bounds are below the best plan that fits."""
    for number in numbers:
        planner = task.numbers.at(number) if most and state.may_hold_better_plan(number) else None
        if planner is not None:
            most -= 1
            divisors_searched = [c for c in state.searched if number % c.micro_batches == 0]
            nearest = max(divisors_searched, key=lambda c: c.micro_batches, default=state.first)
            search_number(task, state, state.candidate(planner, nearest.options))


def search_exactly(task: SearchTask, state: SearchState) -> PlannedNumber:
    """Return the best plan over the numbers that were searched, now with proofs. What is proven of a number raises its bound.

    Raises NoPlanFits.
    """
    refused: NoPlanFits | None = None
    best, chosen, bounds = state.best_fitting.solution, state.best_of_any_memory, state.bounds
    highest = state.best_fitting.value * (1 + TIE)
    # The number of the best plan first: its exact value makes the searches of the others short.
    for candidate in sorted(state.searched, key=lambda c: best is None or c.planner is not best[0]):
        below = min(highest, chosen[0].value(chosen[1])) if chosen and chosen[1].fits else highest
        number = candidate.micro_batches
        # A number is closed if its bound reaches what is known, or if proofs may take no more work.
        bound = bounds.within_budget.get(number)
        is_closed = bound is not None and (bound >= below * (1 - TIE) or candidate.planner.work.remaining <= 0)
        if best is not None and is_closed and (chosen is not None or candidate.planner is not best[0]):
            continue
        try:
            plan = task.search_meshes(candidate.planner, candidate.options, task.report_progress, below=below)
        except NoPlanFits as error:
            bounds.raise_within_budget(number, min(below, error.bound) if below < math.inf else 0.0)
            refused = min(refused or error, error, key=lambda e: e.needed_bytes)
            continue
        if plan.fits:
            bounds.raise_within_budget(number, plan.bound or 0.0)
        if chosen is None or is_better((candidate.planner, plan), chosen):
            chosen = candidate.planner, plan
    # An exact search below the best value may end without a plan: then the best one stands.
    if best is not None and (chosen is None or not chosen[1].fits):
        return best
    if chosen is None:
        assert refused is not None
        raise refused
    return chosen


def is_better(one: PlannedNumber, other: PlannedNumber) -> bool:
    """Return whether the first plan is better: a plan that fits is better; then the objective counts; of two that do not fit, memory."""
    (planner, plan), (other_planner, other_plan) = one, other
    if plan.fits != other_plan.fits:
        return plan.fits
    if plan.fits:
        return planner.value(plan) < other_planner.value(other_plan) * (1 - TIE)
    return plan.cost.memory_bytes["peak"] < other_plan.cost.memory_bytes["peak"]


Step = Callable[[SearchTask, SearchState], str]
"""A step of the search: it changes the state, and returns why it ended or had nothing to do."""
STEPS: Mapping[str, Step] = {
    "fastest plan": take_fastest_if_it_fits,
    "feasibility": look_whether_any_fits,
    "least memory": search_least_memory,
    "likely number": search_likely_number,
    "rising numbers": search_rising_numbers,
    "numbers between": search_numbers_between,
    "numbers to prove": choose_numbers_to_prove,
}
"""The steps before the exact search, in order. A later one relies on the plans and bounds of those before."""
