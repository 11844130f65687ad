"""A sweep on the page: the best plan at each value of one quantity, or of two, with progress and a stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from explorer.address import settings
from explorer.analysis import sweep, what_if
from explorer.analysis.sweep import SweepPoint
from explorer.components import frame
from explorer.components.plans import whatif_panel
from explorer.figures import scaling
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
from explorer.session.pace import MAX_POINT_S, PacedProgress
from explorer.text import recipe, units
from planner_core.core import PlannerError
from planner_core.planning import Request, Result

MAX_CACHED = 400
"""Refusals kept for all sessions."""
ACROSS = 4
"""Small multiples in a row."""
MAX_TABLE_HEIGHT = 480
"""Pixels of the table of a sweep of two quantities, which has up to a hundred rows."""
UNKNOWN = 1e30
"""By what a point without figures is sorted: JSON has no infinity."""
TOO_LONG = f"not found within {MAX_POINT_S:.0f} s"

Panels = Mapping[str, Sequence[SweepPoint]]


@st.cache_resource(show_spinner=False)
def _refusals() -> ResultCache[Request, str]:
    return ResultCache(MAX_CACHED)


def show_sweep(result: Result) -> None:
    """Draw the controls, the figures and the table."""
    available = sweep.available_quantities(result)
    quantities = tuple(n for n in state.value("sweep") if n in available)
    _choose_quantities(available, quantities)
    if not quantities:
        return
    panels = _compute_points(quantities, result)
    if len(quantities) > 1:
        _show_two(quantities, panels, result)
    else:
        _show_one(quantities[0], panels[""], sweep.current_value(quantities[0], result))
    _show_table(quantities, panels)
    frame.offer_data("the sweep", "sweep", lambda: sweep.sweep_rows(quantities, panels))


def _choose_quantities(available: Sequence[str], quantities: Sequence[str]) -> None:
    """Draw two lists: what is swept, and for each value of what else."""
    current = [quantities[k] if k < len(quantities) else None for k in range(2)]
    keys = [state.widget_key(f"w_sweep_{k}", current[k]) for k in range(2)]

    def choose() -> None:
        state.change(sweep=tuple(dict.fromkeys(n for key in keys if (n := st.session_state.get(key)))))

    lists = [("The best plan for each", "batch, GPUs, memory, links, …", available)]
    if quantities:
        rest = [n for n in available if n != quantities[0]]
        lists.append(("and for each", "a second one: small multiples", rest))
    with st.container(horizontal=True):
        for key, value, (label, placeholder, options) in zip(keys, current, lists, strict=False):
            st.selectbox(
                label,
                options,
                key=key,
                index=list(options).index(value) if value is not None and value in options else None,
                width=330,
                on_change=choose,
                placeholder=placeholder,
                format_func=lambda n: sweep.QUANTITIES[n],
            )


def _compute_points(quantities: Sequence[str], result: Result) -> dict[str, list[SweepPoint]]:
    """Plan every point, with progress and a button to stop, after which what is known is shown."""
    wanted = sweep.sweep_panels(quantities, result)
    points = [(panel, name, changes) for panel, row in wanted.items() for name, changes in row]
    sweep_id = (tuple(quantities), result.request)
    stopped = st.session_state.get("sweep_stopped") == sweep_id
    place = st.empty()
    panels: dict[str, list[SweepPoint]] = {panel: [] for panel in wanted}
    with place.container():
        # Above the words that change: below them the button would move away from under the pointer.
        st.button(
            "Stop",
            key="stop_sweep",
            on_click=lambda: st.session_state.update(sweep_stopped=sweep_id),
            help="What is found is kept",
        )
        bar = st.progress(0.0, "Planning")
    for k, (panel, name, changes) in enumerate(points):
        where = f"{k + 1} of {len(points)}, {f'{panel}, ' if panel else ''}{name}"
        progress = PacedProgress(partial(_report, bar, k / len(points), where))
        panels[panel].append(_compute_point(name, changes, progress, stopped))
    place.empty()
    if stopped:
        _offer_rest(panels)
    return panels


def _report(bar: DeltaGenerator, share: float, where: str, text: str) -> None:
    bar.progress(share, f"{where}: {text}")


def _offer_rest(panels: Panels) -> None:
    """Say after a stop how much is known, with a button to compute the rest."""
    points = [p for row in panels.values() for p in row]
    known = sum(p.why != sweep.NOT_COMPUTED for p in points)
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
    if plan is not None or why is not None or stopped:
        return SweepPoint(name, changes, plan, "" if plan else why or sweep.NOT_COMPUTED)
    try:
        progress("planning")
        return SweepPoint(name, changes, whatif_panel.best_plan(request, progress))
    except PlannerError as error:
        _refusals().put(request, text := state.page_wording(error))
        return SweepPoint(name, changes, None, text)
    except TimeoutError:
        late.add(request)
        return SweepPoint(name, changes, None, TOO_LONG)


def _show_one(quantity: str, points: Sequence[SweepPoint], current: str) -> None:
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


def _show_two(quantities: Sequence[str], panels: Panels, result: Result) -> None:
    """Draw a figure for each value of the second quantity, all with the same axes, and where the layout changes."""
    frame.choose_one("Drawn", "measure", settings.MEASURES)
    measure = state.value("measure")
    first, second = (sweep.QUANTITIES[n] for n in quantities)
    current = (sweep.current_value(quantities[0], result), sweep.current_value(quantities[1], result))
    figures = scaling.small_multiples(first, panels, measure, current, frame.theme())
    title, _ = scaling.measure_values(measure, panels)
    st.markdown(f"**{title}** of the best plan, a picture for each value of “{second}”. All have the same axes.")
    order = list(figures)
    for row in range(0, len(order), ACROSS):
        with st.container(key=f"wide_sweep_{row}"):
            columns = st.columns(ACROSS, gap="small")
        for column, name in zip(columns, order[row : row + ACROSS], strict=False):
            with column:
                heading = name if quantities[1] in scaling.UNORDERED else f"{second}: {name}"
                st.markdown(f"**{frame.escape(heading)}**")
                alt = f"{title} of the best plan by {first}; {second}: {name}"
                frame.show_chart(figures[name], f"sweep_{'_'.join(quantities)}_{name}", alt)
                st.caption(frame.escape(sweep.describe_layouts(panels[name])))


def _show_table(quantities: Sequence[str], panels: Panels) -> None:
    """Draw the points as a table, which keys reach; a row takes its value over into the sentence."""
    points = {f"{panel}:{p.name}": (panel, p) for panel, row in panels.items() for p in row}
    title = " and ".join(sweep.QUANTITIES[n] for n in quantities)
    with st.container(height=MAX_TABLE_HEIGHT if len(quantities) > 1 else "content", border=False):
        frame.choose_row(
            f"sweep_rows_{'_'.join(quantities)}",
            f"The best plan by {title}",
            [title, "step", "tokens/s", "memory per GPU"],
            [{"id": row_id, **_table_row(panel, p)} for row_id, (panel, p) in points.items()],
            lambda row_id: state.change(**points[row_id][1].changes, plan=""),
        )
    st.caption("Choose a row to plan it: what it changes comes into the sentence above.")


def _table_row(panel: str, point: SweepPoint) -> dict[str, object]:
    """Return a point as a row that can be chosen; one without a plan says why, and is sorted behind all others."""
    plan, name = point.plan, ", ".join(filter(None, (point.name, panel)))
    if plan is None:
        cells = [{"figure": "–", "below": "", "order": UNKNOWN}] * 3
        return {"name": name, "what": point.why, "fits": False, "cells": cells}
    peak = plan.cost.memory_bytes["peak"]
    figures = (
        (units.seconds(plan.cost.step_time_s), plan.cost.step_time_s),
        (units.count(point.tokens_per_s), -point.tokens_per_s),
        (units.memory(peak), peak),
    )
    layout = ", ".join(filter(None, (recipe.layout_name(plan), recipe.describe_extra_work(plan))))
    return {
        "name": name,
        "what": layout + ("" if plan.fits else ", does not fit"),
        "fits": plan.fits,
        "cells": [{"figure": figure, "below": "", "order": order} for figure, order in figures],
    }
