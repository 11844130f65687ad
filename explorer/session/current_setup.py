"""What the visitor runs now, as a plan beside those that were searched: its layout, micro-batches and recomputation are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import streamlit as st

from explorer.address import settings, setups
from explorer.jobs.result_cache import ResultCache
from explorer.session import pipeline_plan, state
from planner_core.core import Plan, PlannerError
from planner_core.planning import Request, Result, prepare

MAX_CACHED = 24


@st.cache_resource(show_spinner=False)
def _results() -> ResultCache[tuple[Request, tuple[str, ...]], Result | str]:
    return ResultCache(MAX_CACHED)


def priced_setup(result: Result) -> Result | str | None:
    """The stated setup as the only plan of a result, on a graph of its own micro-batch; or in one sentence why there is none. None
    where nothing is stated. Shared by all sessions."""
    text = state.value("setup")
    return _results().get((result.request, text), lambda: _price(result, text)) if text else None


def _price(result: Result, text: tuple[str, ...]) -> Result | str:
    stated = setups.parse_setup(text)
    # a model's own batch would count for each micro-batch: said, it counts for the step
    batch = None if result.request.model.startswith(settings.EXPORTED_PREFIX) else result.workload.batch
    layout, whole = stated.layout, result.workload
    # stages are of use with many micro-batches: as many as there are samples, where no number is stated
    usual = max(1, whole.batch // layout.data) if layout.pp > 1 else whole.accumulate
    asked = replace(
        result.request,
        layout=str(layout),
        recompute=stated.recompute,
        tool=None,
        mesh=None,
        batch=batch,
        accumulate=stated.accumulate or usual,
    )
    try:
        planner = prepare(asked, state.uploaded_graph(asked))
        (plan,) = planner.stated()
    except PlannerError as error:
        return state.page_wording(str(error))
    return pipeline_plan.result_of_planner(result, planner, plan)


def with_extra_plans(plans: Mapping[str, Plan], result: Result) -> dict[str, Plan]:
    """The plans, those with stages and what is run now after the first; why the latter cannot be is told in place."""
    own, deep = priced_setup(result), pipeline_plan.known_result()
    if isinstance(own, str):
        st.warning(f"Your current setup cannot be priced. {own}")
    first = next(iter(plans))
    more = {setups.PLAN_ID: own.best} if isinstance(own, Result) else {}
    more |= {pipeline_plan.PLAN_ID: deep.best} if deep else {}
    return {first: plans[first], **more, **plans}


def result_of(name: str, result: Result) -> Result:
    """What a plan is one of: as `state.result_of`, also for the stated one and the one with stages."""
    own = (
        priced_setup(result)
        if name == setups.PLAN_ID
        else pipeline_plan.known_result()
        if name == pipeline_plan.PLAN_ID
        else None
    )
    return own if isinstance(own, Result) else state.result_of(name, result)
