"""The plans of the papers' methods, each by its own search, beside the others once they are asked for."""

from __future__ import annotations

import streamlit as st

from explorer.address import pins, settings
from explorer.analysis import rows
from explorer.components import frame
from explorer.session import state
from explorer.text.tables import Row
from planner_core.core import Plan, PlannerError
from planner_core.planning import METHODS, Request, Result
from planner_core.planning.analysis import space_sizes

FAIR = (
    "TAP, TAPS and ATP make bytes or communication least, not the step, and choose neither micro-batches nor recomputation. TAP gives "
    "the batch no axis: where its plan sends nothing, all GPUs do the same work."
)


def _asked() -> dict[str, Request]:
    names = [m for m in METHODS if m != state.value("method")]
    # the quicker searches first, which try fewer meshes
    return {m: settings.request(_values(m)) for m in reversed(names)}


def _values(method: str) -> dict[str, object]:
    return {**state.values(), "method": method, "objective": "time", "tool": ""}


def _wanted() -> bool:
    return bool(st.session_state.get("methods_wanted") == state.request())


def found() -> dict[str, Plan]:
    """The best plan of every other method that is known by now, by the text of its pin; none until they are asked for."""
    if not _wanted():
        return {}
    known = {name: state.known(request) for name, request in _asked().items()}
    return {pins.pin("best", _values(name)): ready.fastest for name, ready in known.items() if ready}


def rest() -> None:
    """Plan by the next method that is not known, and show its row before the one after it; call once the page stands."""
    if not _wanted():
        return
    failed: dict[Request, str] = st.session_state.setdefault("methods_failed", {})
    for name, request in _asked().items():
        if request in failed:
            st.caption(f"{settings.METHODS[name]}: {frame.text(failed[request])}")
            continue
        if state.known(request):
            continue
        with st.spinner(f"Planning by {settings.METHODS[name]}", show_time=True):
            try:
                state.plan(request)
            except PlannerError as error:
                failed[request] = state.in_words(str(error))
        st.rerun()


def panel(result: Result) -> None:
    """The button that adds them, and what makes the comparison fair."""
    if not _wanted():
        st.button(
            "Add the plans of TAP, TAPS, ATP and Alpa-like",
            key="plan_methods",
            on_click=lambda: st.session_state.update(methods_wanted=state.request()),
        )
        return
    st.caption(FAIR)
    asked = _asked()
    frame.data("the methods", "methods", lambda: _rows(result, asked))


def _rows(result: Result, asked: dict[str, Request]) -> list[Row]:
    results: dict[str, Result | str] = {result.request.method: result}
    for name, request in asked.items():
        try:
            results[name] = state.plan(request)
        except PlannerError as error:
            results[name] = state.in_words(str(error))
    sizes = {m: n for one in results.values() if isinstance(one, Result) for m, n in space_sizes(one).items()}
    return list(rows.methods(rows.compared(results, sizes)))
