"""The plans that a page shows: those of the current settings, those pinned from others, and the chosen one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import streamlit as st

from explorer.address import pins, settings
from explorer.session import shared_plans, state
from explorer.session.pace import REPORT_INTERVAL_S
from explorer.text.commands import is_uploaded_model
from explorer.text.option_words import page_wording, word_terms
from explorer.text.words import escape, plan_title
from planner_core.core import NoPlanFits, Plan, PlannerError, PlanRole, Unreadable
from planner_core.planning import Progress, Request, Result, plan_ids

FADED = "<style>[data-stale='true'] { opacity: 0.25 !important; transition: none !important; }</style>"
"""While a plan is searched, the figures of the plan before are no longer true: they fade at once."""
PATIENCE_S = 0.4
"""Planning that takes longer shows its progress and can be stopped."""
SOON = f"<p class='soon' style='animation-delay: {PATIENCE_S}s'>Planning …</p>"
"""Seen after that time, also before the search has reported anything: a server that has just started first reads the planner's files."""


def _result_of_pin(plan_id: str, pinned: Mapping[str, Any]) -> Result:
    """Return a result that has a pinned plan. The best plan of a method is known from the table of methods."""
    request = settings.build_request(pinned)
    known = shared_plans.known_method(request) if not pinned["edit"] else None
    return (
        known
        if known and plan_id in plan_ids(known.plans)
        else shared_plans.with_edit(shared_plans.plan_request(request), pinned["edit"])
    )


def current_result(short: Callable[[], None] = lambda: None) -> Result:
    """Return the plans of the current settings, with the edited one. Where there are none, say why and stop the page.

    `short` is called where nothing fits: it shows what would.
    """
    return shared_plans.with_edit(_plan_current(short), state.value("edit"))


def _plan_current(short: Callable[[], None]) -> Result:
    request = state.current_request()
    place = st.empty()
    if shared_plans.known_result(request) is not None:
        return shared_plans.plan_request(request)
    if st.session_state.get("stopped") == request:
        with place.container():
            st.info("Planning was stopped. Change the settings above, or plan these after all.")
            st.button("Plan now", on_click=lambda: st.session_state.pop("stopped", None), key="plan_now")
        st.stop()
    faded = st.empty()
    faded.html(FADED)
    place.html(SOON)
    try:
        # `changed`: the address may not have reached the browser before the click on Stop.
        result = shared_plans.plan_request(
            request, progress_with_stop(place, lambda: st.session_state.update(stopped=request, changed=True))
        )
    except PlannerError as error:
        faded.empty()
        place.error(page_wording(error))
        _offer_divisors(request)
        if isinstance(error, NoPlanFits):
            short()
        st.stop()
    place.empty()
    faded.empty()
    if is_uploaded_model(request.model):  # the sentence above can now say what the capture found
        st.rerun()
    return result


def _offer_divisors(request: Request) -> None:
    """Draw a button for each of the nearest numbers of micro-batches that divide the batch, where the set one does not."""
    batch, micro_batches = settings.batch_and_tokens(state.values())[0], request.accumulate
    if micro_batches is None or batch % micro_batches == 0:
        return
    with st.container(horizontal=True, key="divisors"):
        for number in settings.nearest_divisors(batch, micro_batches):
            words = f"{number} micro-batch{'es' * (number > 1)}"
            st.button(words, key=f"accumulate_{number}", on_click=state.change, kwargs={"accumulate": number})
        st.button("As many as are best", key="accumulate_open", on_click=state.change, kwargs={"accumulate": None})


def progress_with_stop(place: Any, stop: Callable[[], None], key: str = "stop_planning") -> Progress:
    """Return a progress callback that shows the pass in `place` once it takes long, with a button to stop.

    A click starts the script anew, and Streamlit ends this run at the next element that it draws. So a search must report
    now and then; only some of its reports are drawn.
    """
    start = time.perf_counter()
    last = start - REPORT_INTERVAL_S
    line: list[Any] = []

    def report(text: str) -> None:
        nonlocal last
        now = time.perf_counter()
        elapsed_s = now - start
        if now - last < REPORT_INTERVAL_S:
            return
        last = now
        if elapsed_s < PATIENCE_S:
            place.html(SOON)  # at a new element Streamlit ends this run where a newer edit has come
            return
        if not line:
            box = place.container(horizontal=True, vertical_alignment="center")
            box.button("Stop", on_click=stop, key=key)  # before the words, whose length would move it
            line.append(box.empty())
        line[0].markdown(f":material/hourglass_top: Planning: {word_terms(text)}, {elapsed_s:.0f} s", width="content")

    return report


def recommended_id(result: Result) -> str:
    """Return the id of the plan to run."""
    return next(n for n, p in plan_ids(result.plans).items() if p is result.recommended)


def chosen_plan(plans: Mapping[str, Plan], result: Result) -> tuple[str, Plan]:
    """Return the plan in the address, else the recommended one; warn of an id that is not known."""

    def known_id(plan_id: str) -> str:
        """Return the id under which a plan is listed: one that is pinned at these settings has that of its pin."""
        pin = pins.format_pin(plan_id, state.values())
        return pin if plan_id not in plans and pin in plans else plan_id

    plan_id, recommended = known_id(state.value("plan")), known_id(recommended_id(result))
    if plan_id and plan_id not in plans:
        st.warning(
            f"There is no plan “{escape(plan_id[:40])}” here any more; showing the recommended one. "
            f"Plans here: {', '.join(plans)}."
        )
    plan_id = plan_id if plan_id in plans else recommended
    return plan_id, plans[plan_id]


def result_of(plan_id: str, result: Result) -> Result:
    """Return the result that a plan of `with_pinned` belongs to, with the graph of the plan's own number of micro-batches.

    A pin of other settings has another graph and cluster.
    """
    if pins.SEPARATOR in plan_id:
        plan_id, pinned = pins.parse_pin(plan_id, state.values())
        result = _result_of_pin(plan_id, pinned)
    plan = plan_ids(result.plans).get(plan_id)
    return result if plan is None else result.of_plan(plan)


def with_pinned(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Add the plans that are pinned from other settings of this model, by their pins.

    A pin of the current settings takes the place of the plan's own id. The page warns of what cannot be read.
    """
    by_id = dict(plans)
    for pin in dict.fromkeys((*state.value("compare"), state.value("plan"))):
        if pins.SEPARATOR not in pin:
            continue
        try:
            plan_id, pinned = pins.parse_pin(pin, state.values())
            theirs = plan_ids(_result_of_pin(plan_id, pinned).plans)
        except (Unreadable, PlannerError) as error:
            st.warning(f"A pinned plan, “{escape(pin[:40])}”, cannot be shown: {page_wording(error)}")
            continue
        if plan_id not in theirs:
            st.warning(f"There is no plan “{escape(plan_id[:40])}” at the settings of a pin; it is left out.")
            continue
        plan = theirs[plan_id]
        difference = pins.describe_changes(pinned, state.values())
        if not difference:
            by_id.pop(plan_id, None)
        by_id[pin] = (
            replace(plan, name=f"{plan_title(plan)} ({difference})", role=PlanRole.OTHER) if difference else plan
        )
    return by_id
