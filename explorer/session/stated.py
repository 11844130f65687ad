"""What the visitor runs now, as a plan beside those that were searched: its layout, micro-batches and recomputation are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import streamlit as st

from explorer.address import settings, setups
from explorer.jobs.result_cache import ResultCache
from explorer.session import staged, state
from planner_core.core import Plan, PlannerError
from planner_core.planning import Request, Result, prepare

KEPT = 24


@st.cache_resource(show_spinner=False)
def _kept() -> ResultCache[tuple[Request, tuple[str, ...]], Result | str]:
    return ResultCache(KEPT)


def found(result: Result) -> Result | str | None:
    """The stated setup as the only plan of a result, on a graph of its own micro-batch; or in one sentence why there is none. None
    where nothing is stated. Shared by all sessions."""
    text = state.value("setup")
    return _kept().get((result.request, text), lambda: _priced(result, text)) if text else None


def _priced(result: Result, text: tuple[str, ...]) -> Result | str:
    stated = setups.read(text)
    # a model's own batch would count for each micro-batch: said, it counts for the step
    batch = None if result.request.model.startswith(settings.EXPORTED) else result.workload.batch
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
        planner = prepare(asked, state.own_graph(asked))
        (plan,) = planner.stated()
    except PlannerError as error:
        return state.in_words(str(error))
    return staged.of_planner(result, planner, plan)


def beside(plans: Mapping[str, Plan], result: Result) -> dict[str, Plan]:
    """The plans, those with stages and what is run now after the first; why the latter cannot be is told in place."""
    own, deep = found(result), staged.found()
    if isinstance(own, str):
        st.warning(f"Your current setup cannot be priced. {own}")
    first = next(iter(plans))
    more = {setups.NAME: own.best} if isinstance(own, Result) else {}
    more |= {staged.NAME: deep.best} if deep else {}
    return {first: plans[first], **more, **plans}


def home(name: str, result: Result) -> Result:
    """What a plan is one of: as `state.home`, also for the stated one and the one with stages."""
    own = found(result) if name == setups.NAME else staged.found() if name == staged.NAME else None
    return own if isinstance(own, Result) else state.home(name, result)
