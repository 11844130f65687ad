"""A sweep on the page: the best plan at each value of a quantity, with progress and a stop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from explorer.analysis import sweep, what_if
from explorer.analysis.sweep import SweepPoint
from explorer.components import frame
from explorer.components.plans import whatif_panel
from explorer.figures import scaling
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
from explorer.session.pace import MAX_POINT_S, PacedProgress
from explorer.text import recipe, units
from explorer.text.option_words import page_wording
from planner_core.core import PlannerError
from planner_core.planning import Request, Result
from planner_core.planning.pricing import name_throughput

MAX_CACHED = 400
"""Refusals kept for all sessions."""
UNKNOWN = 1e30
"""By what a point without figures is sorted: JSON has no infinity."""
TOO_LONG = f"not found within {MAX_POINT_S:.0f} s"


@st.cache_resource(show_spinner=False)
def _refusals() -> ResultCache[Request, str]:
    return ResultCache(MAX_CACHED)


def show_sweep(result: Result) -> None:
    """Draw the controls, the figures and the table."""
    available = sweep.available_quantities(result)
    quantity = state.value("sweep")
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown("**Sweep**", width="content")
        _choose_quantity(available, quantity if quantity in available else None)
    if quantity not in available:
        return
    points = _compute_points(quantity, result)
    _show_figures(quantity, points, sweep.current_value(quantity, result))
    _show_table(quantity, points)
    frame.offer_data("the sweep", "sweep", lambda: sweep.sweep_rows(quantity, points))


def _choose_quantity(available: Sequence[str], current: str | None) -> None:
    """Draw the list of what can be swept."""
    key = state.widget_key("w_sweep", current)
    st.selectbox(
        "The best plan for each",
        available,
        key=key,
        index=list(available).index(current) if current is not None else None,
        width=330,
        on_change=lambda: state.change(sweep=st.session_state[key] or ""),
        placeholder="batch, GPUs, links, …",
        format_func=lambda n: sweep.QUANTITIES[n],
        label_visibility="collapsed",
    )


def _compute_points(quantity: str, result: Result) -> list[SweepPoint]:
    """Plan every point, with progress and a button to stop, after which what is known is shown."""
    wanted = sweep.sweep_values(quantity, result)
    sweep_id = (quantity, result.request)
    stopped = st.session_state.get("sweep_stopped") == sweep_id
    place = st.empty()
    points: list[SweepPoint] = []
    with place.container():
        # Above the words that change: below them the button would move away from under the pointer.
        st.button(
            "Stop",
            key="stop_sweep",
            on_click=lambda: st.session_state.update(sweep_stopped=sweep_id),
            help="What is found is kept",
        )
        bar = st.progress(0.0, "Planning")
    for k, (name, changes) in enumerate(wanted):
        where = f"{k + 1} of {len(wanted)}, {name}"
        progress = PacedProgress(partial(_report, bar, k / len(wanted), where))
        points.append(_compute_point(name, changes, progress, stopped))
    place.empty()
    if stopped:
        _offer_rest(points)
    return points


def _report(bar: DeltaGenerator, share: float, where: str, text: str) -> None:
    bar.progress(share, f"{where}: {text}")


def _offer_rest(points: Sequence[SweepPoint]) -> None:
    """Say after a stop how much is known, with a button to compute the rest."""
    known = sum(p.is_known for p in points)
    if known == len(points):
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"Stopped: {known} of {len(points)} points are known.", width="content")
        resume = partial(st.session_state.pop, "sweep_stopped", None)
        st.button("Go on", key="sweep_on", type="tertiary", on_click=resume)


def _compute_point(name: str, changes: sweep.Changes, progress: PacedProgress, stopped: bool) -> SweepPoint:
    """Find the best plan at one value, or why there is none; after a stop return only what is known."""
    request = what_if.changed_request(state.values(), changes)
    late: set[Request] = st.session_state.setdefault("sweep_late", set())
    plan, why = whatif_panel.known_plan(request), _refusals().peek(request)
    if plan is None and why is None and request in late:
        why = TOO_LONG
    is_known = plan is not None or why is not None
    if is_known or stopped:
        return SweepPoint(name, changes, plan, "" if plan else why or sweep.NOT_COMPUTED, is_known)
    try:
        progress("planning")
        return SweepPoint(name, changes, whatif_panel.best_plan(request, progress))
    except PlannerError as error:
        _refusals().put(request, text := page_wording(error))
        return SweepPoint(name, changes, None, text)
    except TimeoutError:
        late.add(request)
        return SweepPoint(name, changes, None, TOO_LONG)


def _show_figures(quantity: str, points: Sequence[SweepPoint], current: str) -> None:
    limits = {
        p.name: sweep.memory_limit_bytes(p.plan, what_if.changed_request(state.values(), p.changes))
        for p in points
        if p.plan
    }
    figures = scaling.sweep_figures(sweep.QUANTITIES[quantity], points, limits, current, frame.theme())
    with st.container(key="wide_sweep"):
        columns = st.columns(len(figures), gap="medium")
    for k, (title, figure) in enumerate(figures.items()):
        with columns[k]:
            st.markdown(f"**{title}**")
            alt = f"{title} of the best plan by {sweep.QUANTITIES[quantity]}"
            frame.show_chart(figure, f"sweep_{quantity}_{k}", alt)


def _show_table(quantity: str, points: Sequence[SweepPoint]) -> None:
    """Draw the points as a table, which keys reach; a row takes its value over into the sentence."""
    changes = {p.name: p.changes for p in points}
    title = sweep.QUANTITIES[quantity]
    rate = next((name_throughput(p.plan) for p in points if p.plan), "tokens/s")
    frame.choose_row(
        f"sweep_rows_{quantity}",
        f"The best plan by {title}",
        [title, "step", rate, "memory per GPU"],
        [_table_row(p) for p in points],
        lambda name: state.change(**changes[name], plan=""),
    )
    st.caption("Choose a row to plan it.")


def _table_row(point: SweepPoint) -> dict[str, object]:
    """Return a point as a row that can be chosen; one without a plan says why, and is sorted behind all others."""
    plan, name = point.plan, {"id": point.name, "name": point.name}
    if plan is None:
        cells = [{"figure": "–", "below": "", "order": UNKNOWN}] * 3
        return {**name, "what": point.why, "fits": False, "cells": cells}
    peak = plan.cost.memory_bytes["peak"]
    figures = (
        (units.seconds(plan.cost.step_time_s), plan.cost.step_time_s),
        (units.count(point.tokens_per_s), -point.tokens_per_s),
        (units.memory(peak), peak),
    )
    layout = ", ".join(filter(None, (recipe.layout_name(plan), recipe.describe_extra_work(plan))))
    return {
        **name,
        "what": layout + ("" if plan.fits else ", does not fit"),
        "fits": plan.fits,
        "cells": [{"figure": figure, "below": "", "order": order} for figure, order in figures],
    }
