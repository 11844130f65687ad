"""The sweep on the page: one quantity, the best plan at each of its values, with progress, a stop, and a way to take a value over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import streamlit as st

from explorer.analysis import sweep, what_if
from explorer.analysis.sweep import Point
from explorer.components import frame
from explorer.components.plans.whatif_panel import best
from explorer.figures import scaling
from explorer.session import state
from explorer.text import recipe, units
from planner_core.core import Plan, PlannerError
from planner_core.planning import Result

POINT_S = 30.0
"""After so many seconds the search at one value is given up."""


def panel(result: Result) -> None:
    """The control, the figures and the table."""
    names = sweep.offered(result)
    name = state.value("sweep") if state.value("sweep") in names else ""
    with st.expander("How the answer changes with batch, GPUs, memory, links, …", expanded=bool(name)):
        widget = state.seed("w_sweep", name or None)
        st.selectbox(
            "The best plan for each", names, key=widget, index=None, format_func=lambda n: sweep.QUANTITIES[n], width=360,
            placeholder="batch, GPUs, memory, links, …", on_change=lambda: state.change(sweep=st.session_state[widget] or ""),
        )  # fmt: skip
        if not name:
            st.caption("Everything else stays as it stands. A few seconds for each value; what has been found is kept.")
            return
        _show(name, _work_out(name, result), result)


def _work_out(name: str, result: Result) -> list[Point]:
    """Every value, with progress and a way to stop; what is done stays in the cache of answers."""
    place = st.empty()
    found: list[Point] = []
    wanted = sweep.values(name, result)
    with place.container():
        # above the words that change, whose lines it would otherwise move with, away from under the pointer
        st.button("Stop", key="stop_sweep", on_click=state.change, kwargs={"sweep": ""}, help="What is found is kept")
        bar = st.progress(0.0, "Planning")
    for k, (shown, changes) in enumerate(wanted):
        found.append(
            _point(shown, changes, lambda text, k=k, shown=shown: bar.progress(k / len(wanted), f"{shown}: {text}"))
        )
    place.empty()
    return found


def _point(name: str, changes: sweep.Changes, tell: Any) -> Point:
    began, said = time.monotonic(), 0.0

    def say(text: str) -> None:
        nonlocal said
        now = time.monotonic()
        if now - began > POINT_S:
            raise TimeoutError
        if now - said > state.SAY_S:  # where a click on Stop has come in, Streamlit ends the run here
            said = now
            tell(text)

    try:
        say("planning")
        return Point(name, changes, best(what_if.request(state.values(), changes), say)[0])
    except PlannerError as error:
        return Point(name, changes, None, state.in_words(str(error)))
    except TimeoutError:
        return Point(name, changes, None, f"not found within {POINT_S:.0f} s")


def _show(name: str, points: Sequence[Point], result: Result) -> None:
    limits = {p.name: sweep.limit_bytes(p.plan, what_if.request(state.values(), p.changes)) for p in points if p.plan}
    figures = scaling.sweep(sweep.QUANTITIES[name], points, limits, sweep.here(name, result), frame.theme())
    with st.container(key="wide_sweep"):
        columns = st.columns(len(figures), gap="medium")
    for k, (title, figure) in enumerate(figures.items()):
        with columns[k]:
            st.markdown(f"**{title}**")
            st.plotly_chart(
                figure, theme=None, config=frame.CHART, key=f"sweep_{name}_{k}",
                alt=f"{title} of the best plan by {sweep.QUANTITIES[name]}",
            )  # fmt: skip
    st.markdown(frame.text(sweep.told(points)))
    _table(name, points)
    frame.data("the sweep", "sweep", lambda: sweep.rows(name, points))


def _table(name: str, points: Sequence[Point]) -> None:
    """The points, which keys reach; a row takes its value over into the sentence."""
    key = f"sweep_rows_{name}"

    def pick() -> None:
        chosen = st.session_state[key]["selection"]["rows"]
        if chosen:
            state.change(**points[chosen[0]].changes, plan="")

    st.dataframe(
        [_row(name, p) for p in points], hide_index=True, on_select=pick, selection_mode="single-row", key=key,
        alt=f"The best plan by {sweep.QUANTITIES[name]}",
    )  # fmt: skip
    st.caption("Choose a row to plan it: its value comes into the sentence above.")


def _row(name: str, p: Point) -> dict[str, object]:
    what = {sweep.QUANTITIES[name]: p.name}
    if p.plan is None:
        return {**what, "step": "–", "tokens/s": "–", "memory": "–", "best plan": p.why}
    return {
        **what, "step": units.seconds(p.plan.cost.step_time_s), "tokens/s": units.count(p.tokens_per_s),
        "memory": units.memory(p.plan.cost.memory_bytes["peak"]), "best plan": _plan(p.plan),
    }  # fmt: skip


def _plan(plan: Plan) -> str:
    return recipe.recipe(plan) + ("" if plan.fits else " (does not fit)")
