"""When a first plan is shown, before the search of all numbers ends. One is shown, with a bound that holds for all numbers."""

from __future__ import annotations

from planner_core.core import NoteKind, Plan
from planner_core.planning.fitting.micro_batches.state import SearchState, SearchTask, bound_by_all_numbers
from planner_core.planning.fitting.shortage import least_state_bytes
from planner_core.planning.planner import Planner

MAX_SHOWN_GAP = 0.4
"""A plan at most this share above its bound is shown before the other numbers are searched."""
RARE_FIT_STATES_SHARE = 0.99
"""If evenly shared weights, gradients and states take more than this share of the budget, a plan that fits is rare."""


def offer_first_plan(task: SearchTask, state: SearchState, planner: Planner, plan: Plan) -> None:
    """Show a plan if none was shown yet, and if it is good. Where plans that fit are rare, show one that does not fit too."""
    if state.is_first_shown:
        return
    plan = bound_by_all_numbers(task, state, planner, plan)
    if is_good(plan) if plan.fits else (state.nothing_can_fit or states_hardly_fit(planner)):
        show_first_plan(task, state, plan)


def show_first_plan(task: SearchTask, state: SearchState, plan: Plan) -> None:
    """Show a plan, unless one was shown."""
    if not state.is_first_shown:
        task.show_first(task.numbers.first, plan)
    state.is_first_shown = True


def is_good(plan: Plan) -> bool:
    """Return whether the bound of a plan that fits, for all numbers, says that it is a good one; or whether its bound cannot say so, since
    it is the relaxation of a larger space, which no search of other meshes or numbers raises.

    Elsewhere the other numbers mostly raise its bound alone. Example: Llama-3.1-405B on 512 H100 has its best plan after 3 s, with a bound
    27 % below it, and after 6 s a bound of 1.3 %.
    """
    if not plan.bound:
        return False
    is_narrowed = any(note.kind is NoteKind.SCOPE for note in plan.notes)
    return is_narrowed or plan.cost.gpu_time_s <= plan.bound * (1 + MAX_SHOWN_GAP)


def states_hardly_fit(planner: Planner) -> bool:
    """Return whether every mesh and number may be searched in vain, so that it is shown first that nothing fits so far.

    Example: of 78.7 GB the states of Kolibri-1 take 78.1 on 16 H100, and what takes least of all plans, 80.3. To find that takes 33 s, and
    the first mesh 2 s.
    """
    return least_state_bytes(planner) > RARE_FIT_STATES_SHARE * planner.budget
