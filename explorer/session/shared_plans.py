"""Plans by request, shared by all sessions: of the search, of a method, and of an edit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st

from explorer.address import edits
from explorer.address.pins import EDITED_ID
from explorer.graph.modules import group_by_module
from explorer.graph.scene import Scene, build_scene
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
from explorer.text.commands import is_uploaded_model
from explorer.text.option_words import page_wording
from planner_core.core import Plan, PlannerError
from planner_core.planning import FIRST_PASSES, GraphSource, Progress, Request, Result, plan_ids, plan_model

CACHED_RESULTS = 24
MAX_EDITED = 100


@st.cache_resource(show_spinner=False)
def _plans() -> ResultCache[Request, Result]:
    return ResultCache(2 * CACHED_RESULTS)  # most results are kept under two requests


def plan_request(request: Request, progress: Progress | None = None) -> Result:
    """Plan a request; results are shared by all sessions, the least recently used are forgotten.

    `progress` is told each pass, and may raise to stop. The result is also kept under its own request, in which everything
    that the search chose is stated. Stages are searched behind it (`later_searches`): a visitor reads the first answer meanwhile.
    """
    waiting = (lambda: progress("another visitor's planning of the same")) if progress else (lambda: None)
    result = _plans().get(
        request,
        lambda: plan_model(request, uploaded_source(request, progress), progress, passes=FIRST_PASSES),
        waiting,
    )
    _plans().put(result.request, result)
    return result


@st.cache_resource(show_spinner=False)
def _method_plans() -> ResultCache[Request, Result]:
    return ResultCache(CACHED_RESULTS)


def plan_method(request: Request) -> Result:
    """Return the best plan of a method for the table of methods, without baselines, trade-offs and notes.

    They take half of the time. What another page asks of the same request is planned in full (see `plan_request`).
    """
    plan = partial(plan_model, request, uploaded_source(request), passes={})
    return known_method(request) or _method_plans().get(request, plan)


def known_method(request: Request) -> Result | None:
    """Return what `plan_method` gives, if it was planned before."""
    return _plans().peek(request) or _method_plans().peek(request)


def replace_result(request: Request, result: Result) -> None:
    """Keep a better result of a request, for all sessions."""
    _plans().put(request, result)
    _plans().put(result.request, result)


def known_result(request: Request) -> Result | None:
    """Return the plans of a request if they were made before."""
    return _plans().peek(request)


_DRAWINGS: ResultCache[Request, Scene] = ResultCache(CACHED_RESULTS)


def model_drawing(request: Request) -> Scene:
    """Return the drawing of the request's model by its modules, laid out once."""
    return _DRAWINGS.get(request, lambda: build_scene(group_by_module(plan_request(request).coarse), brief=True))


def uploaded_graph(request: Request, progress: Progress | None = None) -> Any:
    """Return the captured graph of an uploaded model, or None for a model of the zoo."""
    if not is_uploaded_model(request.model):
        return None
    from explorer.jobs.upload import load_graph

    return load_graph(request, progress)


def uploaded_source(request: Request, progress: Progress | None = None) -> GraphSource:
    """Return a function that captures an uploaded model for the number of micro-batches that the search tries."""
    return (lambda one: uploaded_graph(one, progress)) if is_uploaded_model(request.model) else None


@st.cache_resource(show_spinner=False)
def _edited_plans() -> ResultCache[tuple[Request, tuple[str, ...]], Plan | str]:
    return ResultCache(MAX_EDITED)


def edited_plan(result: Result, edit: tuple[str, ...]) -> Plan | str:
    """Return the plan with these edits (see `edits`), shared by all sessions; or in one sentence why there is none."""

    def build() -> Plan | str:
        try:
            return edits.build_edited_plan(result, plan_ids(result.plans), edit)
        except PlannerError as error:
            return page_wording(error)

    return _edited_plans().get((result.request, edit), build)


def with_edit(result: Result, edit: tuple[str, ...]) -> Result:
    """Add the edited plan as the last one, if there is one."""
    edited = edited_plan(result, edit) if edit else ""
    return result if isinstance(edited, str) else replace(result, plans=(*result.plans, edited))


def edit_of(plan_id: str) -> tuple[str, ...]:
    """Return the edits that a plan comes from; no plan but the edited one has any."""
    return state.value("edit") if plan_id == EDITED_ID else ()


PlanKey = tuple[Request, str, tuple[str, ...], float, float]


def plan_key(request: Request, plan_id: str, plan: Plan) -> PlanKey:
    """Return the key of a plan in a cache.

    Its id alone is none: a proof, or stages, that are found behind the first answer put another plan under it.
    """
    return request, plan_id, edit_of(plan_id), plan.cost.step_time_s, plan.cost.memory_bytes["peak"]


def known_plan_ids(request: Request) -> tuple[str, ...]:
    """Return the ids of a request's plans; none where it was not planned yet, or cannot be."""
    result = _plans().peek(request)
    return tuple(plan_ids(result.plans)) if result else ()
