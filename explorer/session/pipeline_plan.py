"""The best plan with pipeline stages: searched while the first answer is read, or at once for a link to it."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from explorer.address import settings
from explorer.jobs.background import BackgroundJob
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
from planner_core.core import load_cluster
from planner_core.planning import STAGES_PLAN_NAME, Progress, Request, Result, add_stages, may_use_stages

PLAN_ID = STAGES_PLAN_NAME
"""The plan's id in the address."""
MAX_CACHED = 48


@st.cache_resource(show_spinner=False)
def _results() -> ResultCache[Request, Result]:
    """Return by request of the page: its result after the search of stages."""
    return ResultCache(MAX_CACHED)


def is_requested() -> bool:
    """Tell whether the address asks for the plan with stages."""
    return PLAN_ID in (state.value("plan"), *state.value("compare"))


def is_pending() -> bool:
    """Tell whether stages may win and nobody has searched."""
    request = state.current_request()
    known = state.known_result(request)
    exported = request.model.startswith(settings.EXPORTED_PREFIX)
    searched = known is not None and "stages" in known.reasons
    # A tool without stages is compared with the best plan of all, which may have some.
    free = replace(request, tool=None)
    return not exported and not searched and may_use_stages(free, load_cluster(request.cluster))


def search(request: Request, progress: Progress) -> None:
    """Search, for all sessions; nothing is kept where `progress` ends it."""

    def work() -> Result:
        # without the plan that this visitor edited, which `state.current_result` adds
        result = state.plan_request(request, progress)
        return add_stages(replace(result, source=state.uploaded_source(request, progress)), progress)

    state.replace_result(request, _results().get(request, work, lambda: progress("another visitor's plan")))


def start_search() -> BackgroundJob:
    """Search while the page is read; the page then finds the plan where it found the others."""
    request = state.current_request()
    return state.start_job("stages", lambda progress: search(request, progress))
