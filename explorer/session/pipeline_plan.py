"""The best plan with pipeline stages: searched while the first answer is read, or at once for a link to it."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from explorer.address import settings
from explorer.jobs.background import BackgroundJob
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
from planner_core.core import Plan, PlannerError, load_cluster
from planner_core.planning import STAGES_PLAN_NAME, Planner, Progress, Request, Result, find_staged_plan, may_use_stages

PLAN_ID = STAGES_PLAN_NAME
"""The plan's id in the address."""
MAX_CACHED = 48


@st.cache_resource(show_spinner=False)
def _results() -> ResultCache[Request, tuple[Result, ...]]:
    """By request: the plan as the only one of a result, on a graph of its own micro-batch; empty where stages win nothing."""
    return ResultCache(MAX_CACHED)


def known_result() -> Result | None:
    """Return the plan with stages for the current settings, if one is known to be quicker."""
    known = _results().peek(state.current_request()) or ()
    return known[0] if known else None


def is_requested() -> bool:
    """Tell whether the address asks for the plan with stages."""
    return PLAN_ID in (state.value("plan"), *state.value("compare"))


def is_pending() -> bool:
    """Tell whether stages may win and nobody has searched."""
    request = state.current_request()
    exported = request.model.startswith(settings.EXPORTED_PREFIX)
    return not exported and may_use_stages(request, load_cluster(request.cluster)) and _results().peek(request) is None


def search(result: Result, request: Request, progress: Progress) -> None:
    """Search, for all sessions; nothing is kept where `progress` ends it."""
    _results().get(request, lambda: _search(result, request, progress), lambda: progress("another visitor's plan"))


def _search(result: Result, request: Request, progress: Progress) -> tuple[Result, ...]:
    try:
        best = find_staged_plan(request, result.fastest, progress, state.uploaded_source(request, progress))
    except PlannerError:  # the answer of one stage stands without it
        best = None
    return () if best is None else (result_of_planner(result, best.planner, best.plan),)


def result_of_planner(result: Result, planner: Planner, plan: Plan) -> Result:
    """Return a result with one plan of another planner, whose graph has its own micro-batch."""
    return replace(result.of_planner(planner), plans=(plan,))


def start_search(result: Result) -> BackgroundJob:
    """Search while the page is read."""
    request = state.current_request()
    return state.start_job("stages", lambda progress: search(result, request, progress))
