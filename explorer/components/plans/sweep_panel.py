"""The sweep on the page: the best plan at each value of one quantity, or of two, with progress, a stop, and a way to take a value over."""

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
from planner_core.core import Plan, PlannerError
from planner_core.planning import Request, Result

MAX_CACHED = 400
"""Refusals kept for all sessions."""
ACROSS = 4
"""Small multiples beside each other."""

Panels = Mapping[str, Sequence[SweepPoint]]


@st.cache_resource(show_spinner=False)
def _refusals() -> ResultCache[Request, str]:
    return ResultCache(MAX_CACHED)


def show_sweep(result: Result) -> None:
    """The controls, the figures and the table."""
    offered = sweep.available_quantities(result)
    names = tuple(n for n in state.value("sweep") if n in offered)
    _choose_quantities(offered, names)
    if not names:
        return
    found = _compute_points(names, result)
    if len(names) > 1:
        _show_two(names, found, result)
    else:
        _show_one(names[0], found[""], sweep.current_value(names[0], result))
    _show_table(names, found)
    frame.offer_data("the sweep", "sweep", lambda: sweep.sweep_rows(names, found))


def _choose_quantities(offered: Sequence[str], names: Sequence[str]) -> None:
    """Two lists: what is swept, and for each value of what else."""
    now = [names[k] if k < len(names) else None for k in range(2)]
    keys = [state.widget_key(f"w_sweep_{k}", now[k]) for k in range(2)]

    def take() -> None:
        state.change(sweep=tuple(dict.fromkeys(n for key in keys if (n := st.session_state.get(key)))))

    lists = [("The best plan for each", "batch, GPUs, memory, links, …", offered)]
    if names:
        rest = [n for n in offered if n != names[0]]
        lists.append(("and for each", "a second one: small multiples", rest))
    with st.container(horizontal=True):
        for key, one, (label, placeholder, options) in zip(keys, now, lists, strict=False):
            st.selectbox(
                label,
                options,
                key=key,
                index=list(options).index(one) if one is not None and one in options else None,
                width=330,
                on_change=take,
                placeholder=placeholder,
                format_func=lambda n: sweep.QUANTITIES[n],
            )


def _compute_points(names: Sequence[str], result: Result) -> dict[str, list[SweepPoint]]:
    """Every point, with progress and a way to stop, after which what is known is shown."""
    wanted = sweep.sweep_panels(names, result)
    points = [(panel, name, changes) for panel, row in wanted.items() for name, changes in row]
    asked = (tuple(names), result.request)
    stopped = st.session_state.get("sweep_stopped") == asked
    place = st.empty()
    found: dict[str, list[SweepPoint]] = {panel: [] for panel in wanted}
    with place.container():
        # above the words that change, whose lines it would otherwise move with, away from under the pointer
        st.button(
            "Stop",
            key="stop_sweep",
            on_click=lambda: st.session_state.update(sweep_stopped=asked),
            help="What is found is kept",
        )
        bar = st.progress(0.0, "Planning")
    for k, (panel, name, changes) in enumerate(points):
        where = f"{k + 1} of {len(points)}, {f'{panel}, ' if panel else ''}{name}"
        found[panel].append(
            _compute_point(name, changes, PacedProgress(partial(_report, bar, k / len(points), where)), stopped)
        )
    place.empty()
    if stopped:
        _offer_rest(found)
    return found


def _report(bar: DeltaGenerator, share: float, where: str, text: str) -> None:
    bar.progress(share, f"{where}: {text}")


def _offer_rest(found: Panels) -> None:
    """After a stop: how much is known, and a way to find the rest."""
    every = [p for row in found.values() for p in row]
    known = sum(p.why != sweep.NOT_COMPUTED for p in every)
    if known == len(every):
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"Stopped: {known} of {len(every)} points are known.", width="content")
        st.button(
            "Go on", key="sweep_on", type="tertiary", on_click=lambda: st.session_state.pop("sweep_stopped", None)
        )


def _compute_point(name: str, changes: sweep.Changes, say: PacedProgress, stopped: bool) -> SweepPoint:
    """The best plan at one value, or why there is none; after a stop only what is known."""
    request = what_if.changed_request(state.values(), changes)
    late: set[Request] = st.session_state.setdefault("sweep_late", set())
    plan, why = whatif_panel.known_plan(request), _refusals().peek(request)
    if plan is None and why is None and request in late:
        why = f"not found within {MAX_POINT_S:.0f} s"
    if plan is not None or why is not None or stopped:
        return SweepPoint(name, changes, plan, "" if plan else why or sweep.NOT_COMPUTED)
    try:
        say("planning")
        return SweepPoint(name, changes, whatif_panel.best_plan(request, say))
    except PlannerError as error:
        _refusals().put(request, text := state.page_wording(str(error)))
        return SweepPoint(name, changes, None, text)
    except TimeoutError:
        late.add(request)
        return SweepPoint(name, changes, None, f"not found within {MAX_POINT_S:.0f} s")


def _show_one(name: str, points: Sequence[SweepPoint], here: str) -> None:
    limits = {
        p.name: sweep.memory_limit_bytes(p.plan, what_if.changed_request(state.values(), p.changes))
        for p in points
        if p.plan
    }
    figures = scaling.sweep_figures(sweep.QUANTITIES[name], points, limits, here, frame.theme())
    with st.container(key="wide_sweep"):
        columns = st.columns(len(figures), gap="medium")
    for k, (title, figure) in enumerate(figures.items()):
        with columns[k]:
            st.markdown(f"**{title}**")
            st.plotly_chart(
                figure,
                theme=None,
                config=frame.CHART,
                key=f"sweep_{name}_{k}",
                alt=f"{title} of the best plan by {sweep.QUANTITIES[name]}",
            )
    st.markdown(frame.escape(sweep.describe_layouts(points)))


def _show_two(names: Sequence[str], found: Panels, result: Result) -> None:
    """A figure for each value of the second quantity, all with the same axes, and below each where the layout changes."""
    widget = state.widget_key("w_measure", state.value("measure"))
    st.segmented_control(
        "Drawn",
        list(settings.MEASURES),
        default=state.value("measure"),
        format_func=lambda m: settings.MEASURES[m],
        key=widget,
        required=True,
        on_change=state.take_widget_value,
        args=("measure", widget),
    )
    measure = state.value("measure")
    first, second = (sweep.QUANTITIES[n] for n in names)
    here = (sweep.current_value(names[0], result), sweep.current_value(names[1], result))
    figures = scaling.small_multiples(first, found, measure, here, frame.theme())
    title, _ = scaling.measure_values(measure, found)
    st.markdown(f"**{title}** of the best plan, a picture for each value of “{second}”. All have the same axes.")
    order = list(figures)
    for row in range(0, len(order), ACROSS):
        with st.container(key=f"wide_sweep_{row}"):
            columns = st.columns(ACROSS, gap="small")
        for column, name in zip(columns, order[row : row + ACROSS], strict=False):
            with column:
                st.markdown(f"**{frame.escape(name if names[1] in scaling.UNORDERED else f'{second}: {name}')}**")
                st.plotly_chart(
                    figures[name],
                    theme=None,
                    config=frame.CHART,
                    key=f"sweep_{'_'.join(names)}_{name}",
                    alt=f"{title} of the best plan by {first}; {second}: {name}",
                )
                st.caption(frame.escape(sweep.describe_layouts(found[name])))


def _show_table(names: Sequence[str], found: Panels) -> None:
    """The points, which keys reach; a row takes its value over into the sentence."""
    key = f"sweep_rows_{'_'.join(names)}"
    points = [(panel, p) for panel, row in found.items() for p in row]

    def pick() -> None:
        chosen = st.session_state[key]["selection"]["rows"]
        if chosen:
            state.change(**points[chosen[0]][1].changes, plan="")

    title = " and ".join(sweep.QUANTITIES[n] for n in names)
    st.dataframe(
        [_table_row(names, panel, p) for panel, p in points],
        hide_index=True,
        on_select=pick,
        selection_mode="single-row",
        key=key,
        height="auto" if len(names) < 2 else 360,
        alt=f"The best plan by {title}",
    )
    st.caption("Choose a row to plan it: what it changes comes into the sentence above.")


def _table_row(names: Sequence[str], panel: str, p: SweepPoint) -> dict[str, object]:
    what = dict(zip((sweep.QUANTITIES[n] for n in names), (p.name, panel), strict=False))
    if p.plan is None:
        return {**what, "step": "–", "tokens/s": "–", "memory": "–", "best plan": p.why}
    return {
        **what,
        "step": units.seconds(p.plan.cost.step_time_s),
        "tokens/s": units.count(p.tokens_per_s),
        "memory": units.memory(p.plan.cost.memory_bytes["peak"]),
        "best plan": _plan(p.plan),
    }


def _plan(plan: Plan) -> str:
    return recipe.describe_plan(plan) + ("" if plan.fits else " (does not fit)")
