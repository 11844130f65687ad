"""The plans of the papers' methods, each by its own search, which join the others once they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import streamlit as st

from explorer.address import pins, settings
from explorer.analysis import rows
from explorer.components import frame
from explorer.session import shared_plans, state
from explorer.text.option_words import page_wording
from explorer.text.tables import Row
from planner_core.core import Plan, PlannerError
from planner_core.cost import IDLE, axis_roles
from planner_core.planning import METHODS, Request, Result
from planner_core.planning.analysis import count_spaces

FAIRNESS_NOTE = (
    "TAP, TAPS, ATP and Alpa-like make traffic least, not the step: without ZeRO, "
    "with the best plan’s micro-batches and recomputation."
)
IDLE_NOTE = " Along an idle axis all GPUs do the same work: a method may repeat work to send less."


def _requests() -> dict[str, Request]:
    """Return the request of every other method; the quicker searches, which try fewer meshes, come first."""
    names = [m for m in METHODS if m != state.value("method")]
    return {m: settings.build_request(_settings_for(m)) for m in reversed(names)}


def _settings_for(method: str) -> dict[str, object]:
    return {**state.values(), "method": method, "objective": "time", "tool": ""}


def _is_wanted() -> bool:
    """Tell whether the visitor asked for the methods, as the address says."""
    return bool(state.value("methods"))


def known_plans() -> dict[str, Plan]:
    """Return the best plan of every other method that is known by now, by its pin; none until they are asked for."""
    if not _is_wanted():
        return {}
    results = {name: shared_plans.known_method(request) for name, request in _requests().items()}
    return {pins.format_pin("best", _settings_for(name)): r.searched for name, r in results.items() if r}


def _failed() -> dict[Request, str]:
    """Return why a method has no plan, for each request of this visitor that failed."""
    failed: dict[Request, str] = st.session_state.setdefault("methods_failed", {})
    return failed


def is_searching() -> bool:
    """Tell whether a method that the visitor asked for is still to be planned."""
    return _is_wanted() and any(r not in _failed() and not shared_plans.known_method(r) for r in _requests().values())


def plan_next() -> None:
    """Plan by the next method that is not known, then run the page again. Call it last, when the page stands."""
    if not _is_wanted():
        return
    failed = _failed()
    for name, request in _requests().items():
        if request in failed:
            st.caption(f"{settings.METHODS[name]}: {frame.escape(failed[request])}")
        elif not shared_plans.known_method(request):
            with st.spinner(f"Searching {settings.METHODS[name]}", show_time=True):
                try:
                    shared_plans.plan_method(request)
                except PlannerError as error:
                    failed[request] = page_wording(error)
            st.rerun()


def describe_fairness(plans: Iterable[Plan]) -> str:
    """Say what makes the comparison fair, and what an idle axis is where a plan has one."""
    return FAIRNESS_NOTE + (IDLE_NOTE if any(IDLE in axis_roles(p) for p in plans) else "")


def show_methods(plans: Mapping[str, Plan]) -> None:
    """Draw the button that adds them to the plans of the page, then what makes the comparison fair."""
    if not _is_wanted():
        st.button(
            "Add TAP, TAPS, ATP and Alpa-like",
            key="plan_methods",
            on_click=state.change,
            kwargs={"methods": "all"},
        )
        return
    # Where the button was: the search itself is drawn last, below what the window shows.
    failed = st.session_state.get("methods_failed", {})
    waiting = [
        n for n, request in _requests().items() if request not in failed and not shared_plans.known_method(request)
    ]
    if waiting:
        st.caption(f"Searching {', then '.join(settings.METHODS[n] for n in waiting)} …")
    st.caption(describe_fairness(plans.values()))


def offer_rows(result: Result) -> None:
    """Offer what each method searched and found as data, once they are asked for."""
    if _is_wanted():
        requests = _requests()  # read now: the button's rows are made when the run has ended
        frame.offer_data("the methods", "methods", lambda: _method_rows(result, requests), label="Methods’ searches")


def _method_rows(result: Result, requests: dict[str, Request]) -> list[Row]:
    results: dict[str, Result | str] = {result.request.method: result}
    for name, request in requests.items():
        try:
            results[name] = shared_plans.plan_method(request)
        except PlannerError as error:
            results[name] = page_wording(error)
    sizes = {m: n for r in results.values() if isinstance(r, Result) for m, n in count_spaces(r).items()}
    return list(rows.method_rows(rows.compare_methods(results, sizes)))
