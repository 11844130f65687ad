"""The best plan with pipeline stages beside those of one stage: looked for while the first answer is read, or at once for a link to it."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from explorer.address import settings
from explorer.jobs.ahead import Job
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
from planner_core.core import Plan, PlannerError, load_cluster
from planner_core.planning import STAGES, Planner, Progress, Request, Result, may_win, with_stages

NAME = STAGES
"""The plan's name in the address."""
KEPT = 48


@st.cache_resource(show_spinner=False)
def _kept() -> ResultCache[Request, tuple[Result, ...]]:
    """By request: the plan as the only one of a result, on a graph of its own micro-batch; empty where stages win nothing."""
    return ResultCache(KEPT)


def found() -> Result | None:
    """The plan with stages for the settings as they stand, if one is known to be quicker."""
    known = _kept().peek(state.request()) or ()
    return known[0] if known else None


def named() -> bool:
    """Whether the address asks for it."""
    return NAME in (state.value("plan"), *state.value("compare"))


def open_question() -> bool:
    """Whether stages may win and nobody has looked."""
    asked = state.request()
    exported = asked.model.startswith(settings.EXPORTED)
    return not exported and may_win(asked, load_cluster(asked.cluster)) and _kept().peek(asked) is None


def look(result: Result, asked: Request, say: Progress) -> None:
    """Search, for all sessions; nothing is kept where `say` ends it."""
    _kept().get(asked, lambda: _searched(result, asked, say), lambda: say("another visitor's plan"))


def _searched(result: Result, asked: Request, say: Progress) -> tuple[Result, ...]:
    try:
        best = with_stages(asked, result.fastest, say, state.own_source(asked, say))
    except PlannerError:  # the answer of one stage stands without it
        best = None
    return () if best is None else (of_planner(result, best.planner, best.plan),)


def of_planner(result: Result, planner: Planner, plan: Plan) -> Result:
    """What a plan is one of that another planner made for the same page: on a graph of its own micro-batch."""
    return replace(
        result,
        request=planner.request,
        graph=planner.graph,
        coarse=planner.coarse,
        workload=planner.workload,
        plans=(plan,),
    )


def begin(result: Result) -> Job:
    """Look while the page is read. What this visitor asked for before is given up."""
    asked = state.request()
    before: tuple[Request, Job] | None = st.session_state.get("ahead")
    if before and before[0] == asked:  # also one that failed: it would fail as before
        return before[1]
    if before:
        before[1].give_up()
    job = Job(lambda say: look(result, asked, say))
    st.session_state["ahead"] = asked, job
    return job
