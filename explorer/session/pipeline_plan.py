"""The best plan with pipeline stages beside those of one stage: looked for while the first answer is read, or at once for a link to it."""

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
"""The plan's name in the address."""
MAX_CACHED = 48


@st.cache_resource(show_spinner=False)
def _results() -> ResultCache[Request, tuple[Result, ...]]:
    """By request: the plan as the only one of a result, on a graph of its own micro-batch; empty where stages win nothing."""
    return ResultCache(MAX_CACHED)


def known_result() -> Result | None:
    """The plan with stages for the settings as they stand, if one is known to be quicker."""
    known = _results().peek(state.current_request()) or ()
    return known[0] if known else None


def is_requested() -> bool:
    """Whether the address asks for it."""
    return PLAN_ID in (state.value("plan"), *state.value("compare"))


def is_pending() -> bool:
    """Whether stages may win and nobody has looked."""
    asked = state.current_request()
    exported = asked.model.startswith(settings.EXPORTED_PREFIX)
    return not exported and may_use_stages(asked, load_cluster(asked.cluster)) and _results().peek(asked) is None


def search(result: Result, asked: Request, say: Progress) -> None:
    """Search, for all sessions; nothing is kept where `say` ends it."""
    _results().get(asked, lambda: _searched(result, asked, say), lambda: say("another visitor's plan"))


def _searched(result: Result, asked: Request, say: Progress) -> tuple[Result, ...]:
    try:
        best = find_staged_plan(asked, result.fastest, say, state.uploaded_source(asked, say))
    except PlannerError:  # the answer of one stage stands without it
        best = None
    return () if best is None else (result_of_planner(result, best.planner, best.plan),)


def result_of_planner(result: Result, planner: Planner, plan: Plan) -> Result:
    """What a plan is one of that another planner made for the same page: on a graph of its own micro-batch."""
    return replace(
        result,
        request=planner.request,
        graph=planner.graph,
        coarse=planner.coarse,
        workload=planner.workload,
        plans=(plan,),
    )


def start_search(result: Result) -> BackgroundJob:
    """Look while the page is read. What this visitor asked for before is given up."""
    asked = state.current_request()
    before: tuple[Request, BackgroundJob] | None = st.session_state.get("ahead")
    if before and before[0] == asked:  # also one that failed: it would fail as before
        return before[1]
    if before:
        before[1].give_up()
    job = BackgroundJob(lambda say: search(result, asked, say))
    st.session_state["ahead"] = asked, job
    return job
