"""What the visitor runs now, as a plan among those that were searched: its layout, micro-batches and recomputation are stated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import streamlit as st

from explorer.address import settings, setups
from explorer.jobs.result_cache import ResultCache
from explorer.session import current_plans, shared_plans, state
from explorer.text.option_words import page_wording
from planner_core.core import Plan, PlannerError
from planner_core.planning import Request, Result, prepare_planner
from planner_core.planning.methods import check_layout

MAX_CACHED = 24


@st.cache_resource(show_spinner=False)
def _results() -> ResultCache[tuple[Request, tuple[str, ...]], Result | str]:
    return ResultCache(MAX_CACHED)


def priced_setup(result: Result) -> Result | str | None:
    """Return the stated setup as the only plan of a result, or in one sentence why it cannot be priced; None if none is stated."""
    text = state.value("setup")
    return _results().get((result.request, text), lambda: _price_setup(result, text)) if text else None


def _price_setup(result: Result, text: tuple[str, ...]) -> Result | str:
    setup, _ = setups.parse_setup(text).for_model(result.request.model)
    layout, workload = setup.layout, result.workload
    # Left open, a model's own batch would be that of each micro-batch; stated, it is that of the step.
    exported = result.request.model.startswith(settings.EXPORTED_PREFIX)
    # the tool and the mesh bound the search; what is run now need not be what they allow
    batch = None if exported else workload.batch
    usual = layout.count_micro_batches(workload.batch, workload.accumulate)
    try:
        check_layout(layout, result.cluster)
        request = replace(
            result.request,
            layout=str(layout),
            recompute=setup.recompute,
            tool=None,
            mesh=None,
            batch=batch,
            accumulate=setup.count_micro_batches(workload.batch) or usual,
            **dict(setup.options),
        )
        planner = prepare_planner(request, shared_plans.uploaded_graph(request))
        plan = planner.stated(layout)
    except PlannerError as error:
        return page_wording(error)
    return replace(result, planner=planner, plans=(plan,))


def with_extra_plans(plans: Mapping[str, Plan], result: Result) -> dict[str, Plan]:
    """Insert what is run now after the first plan; warn where the setup cannot be priced."""
    setup = priced_setup(result)
    if isinstance(setup, str):
        st.warning(f"The current setup cannot be priced. {setup}")
    if text := state.value("setup"):
        _, unused = setups.parse_setup(text).for_model(result.request.model)
        if unused:
            st.caption(f"Of the current setup {unused}.")
    first = next(iter(plans))
    extra = {setups.PLAN_ID: setup.best} if isinstance(setup, Result) else {}
    return {first: plans[first], **extra, **plans}


def result_of(plan_id: str, result: Result) -> Result:
    """Return the result that a plan belongs to: as `current_plans.result_of`, also for the stated one."""
    stated = priced_setup(result) if plan_id == setups.PLAN_ID else None
    return stated if isinstance(stated, Result) else current_plans.result_of(plan_id, result)
