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
    return {m: settings.request(_values(m)) for m in names}


def _values(method: str) -> dict[str, object]:
    return {**state.values(), "method": method, "objective": "time", "tool": ""}


def _wanted() -> bool:
    return bool(st.session_state.get("methods_wanted") == state.request())


def found() -> dict[str, Plan]:
    """The best plan of every other method, by the text of its pin; looked for only once they are asked for."""
    made: dict[str, Plan] = {}
    if not _wanted():
        return made
    place = st.empty()
    for k, (name, request) in enumerate(_asked().items(), start=1):
        place.progress(k / len(METHODS), f"Planning by {settings.METHODS[name]}")
        try:
            made[pins.pin("best", _values(name))] = state.plan(request).fastest
        except PlannerError as error:
            st.caption(f"{settings.METHODS[name]}: {frame.text(state.in_words(str(error)))}")
    place.empty()
    return made


def panel(result: Result) -> None:
    """The button that adds them, and what makes the comparison fair."""
    if not _wanted():
        st.button(
            "Add the plans of TAP, TAPS, ATP and Alpa-like", key="plan_methods",
            on_click=lambda: st.session_state.update(methods_wanted=state.request()),
        )  # fmt: skip
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
