"""Plans of less memory than the first answer's, by recomputation: searched while that is read, or at once for a link to one."""

from __future__ import annotations

from dataclasses import replace

from explorer.jobs.background import BackgroundJob
from explorer.session import state
from planner_core.core import PlannerError
from planner_core.planning import LESS_MEMORY, WITH_RECOMPUTATION, Progress, Request, add_less_memory

ID_START = WITH_RECOMPUTATION.replace(" ", "-")
"""How the ids of these plans in the address begin."""


def is_requested() -> bool:
    """Tell whether the address asks for one of them."""
    return any(plan_id.startswith(ID_START) for plan_id in (state.value("plan"), *state.value("compare")))


def is_pending() -> bool:
    """Tell whether there is an answer and nobody has searched."""
    known = state.known_result(state.current_request())
    return known is not None and LESS_MEMORY not in known.reasons


def search(request: Request, progress: Progress) -> None:
    """Search, for all sessions; nothing is kept where `progress` ends it."""
    result = state.plan_request(request, progress)
    try:
        result = add_less_memory(result, progress)
    except PlannerError as error:  # the first answer stands
        result = replace(result, reasons={**result.reasons, LESS_MEMORY: state.page_wording(error)})
    state.replace_result(request, result)


def start_search() -> BackgroundJob:
    """Search while the page is read; the page then finds the plans where it found the others."""
    request = state.current_request()
    return state.start_job("less memory", lambda progress: search(request, progress))
