"""The proof of the best plan: its gap is closed in the background, while the first answer is read."""

from __future__ import annotations

import streamlit as st

from explorer.jobs.background import BackgroundJob
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
from planner_core.core import PlannerError
from planner_core.planning import Progress, Request, Result, prove

MAX_CACHED = 48


@st.cache_resource(show_spinner=False)
def _results() -> ResultCache[Request, Result]:
    """Return by request of the page: the result with its gap closed as far as it can be."""
    return ResultCache(MAX_CACHED)


def is_pending(result: Result) -> bool:
    """Tell whether a proof is missing and was not tried."""
    fastest = result.searched
    # A plan that does not fit has no gap in time; a method's plan is bounded within its own space alone.
    missing = fastest.fits and not fastest.optimal and fastest.method == "exact"
    return missing and _results().peek(state.current_request()) is None


def start(result: Result) -> BackgroundJob:
    """Prove while the page is read; the page then finds the proven result where it found the first one."""
    request = state.current_request()
    return state.start_job("proof", lambda progress: close_gap(result, request, progress))


def close_gap(result: Result, request: Request, progress: Progress) -> None:
    """Prove for all sessions; nothing is kept where `progress` ends it."""

    def work() -> Result:
        # not the result of the page, which has the plan that this visitor edited
        first = state.known_result(request) or result
        try:
            return prove(first, progress)
        except PlannerError:  # the first answer stands
            return first

    proven = _results().get(request, work, lambda: progress("another visitor's proof"))
    state.replace_result(request, proven)
