"""What the visitor runs now, as a plan beside those that were searched: its layout, micro-batches and recomputation are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import streamlit as st

from explorer.address import settings, setups
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
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
    asked = replace(
        result.request, layout=str(stated.layout), recompute=stated.recompute, tool=None, mesh=None, batch=batch,
        accumulate=stated.accumulate or result.workload.accumulate,
    )  # fmt: skip
    try:
        planner = prepare(asked, state.own_graph(asked))
        plans = tuple(planner.stated())
    except PlannerError as error:
        return state.in_words(str(error))
    return replace(
        result, request=asked, graph=planner.graph, coarse=planner.coarse, workload=planner.workload, plans=plans
    )


def plans(result: Result) -> dict[str, Plan]:
    """Every plan of a page by its name in the address, the stated one after the first."""
    return beside(state.plan_ids(result.plans), result)


def beside(plans: Mapping[str, Plan], result: Result) -> dict[str, Plan]:
    """The plans, the stated one after the first; why it cannot be is told in place."""
    own = found(result)
    if isinstance(own, str):
        st.warning(f"Your current setup cannot be priced. {own}")
    if own is None or isinstance(own, str):
        return dict(plans)
    first = next(iter(plans))
    return {first: plans[first], setups.NAME: own.best, **plans}


def home(name: str, result: Result) -> Result:
    """What a plan is one of: as `state.home`, also for the stated one."""
    own = found(result) if name == setups.NAME else None
    return own if isinstance(own, Result) else state.home(name, result)
