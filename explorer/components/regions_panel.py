"""The map of regions on the page: worked out on demand, with progress and a stop, shared by all sessions once it is there."""

from __future__ import annotations

from typing import Any

import streamlit as st

from explorer import regions, settings, state, units, whatif, words
from explorer.components import frame
from explorer.shelf import Shelf
from planner_core import sensitivity
from planner_core.pipeline import Result
from planner_core.planner import Request
from planner_core.sensitivity import Axis, Cell, Crossover

CELLS, MAPS = 5000, 64
"""Cells and whole maps kept for all sessions."""
NAMES = {"inter": "bandwidth between nodes", "intra": "bandwidth inside a node", "batch": "batch", "nodes": "number of nodes"}
SWEEP_SHARE = 0.6
"""Share of the progress bar for the grid; the rest is for the crossovers."""

Map = tuple[tuple[Cell, ...], tuple[Crossover, ...]]


@st.cache_resource(show_spinner=False)
def _cells() -> Shelf[tuple[Request, float, float], Cell]:
    return Shelf(CELLS)


@st.cache_resource(show_spinner=False)
def _maps() -> Shelf[tuple[Request, Axis, Axis], Map]:
    return Shelf(MAPS)


def panel(result: Result) -> None:
    """The controls, the map and its crossovers in words."""
    swept = [k for k in settings.SWEPT if k != "inter" or len(result.cluster.levels) > 1]
    if len(result.cluster.levels) != 2:
        swept.remove("nodes")
    x, y = _axes(result, swept)
    asked = state.request()
    key = (asked, x, y)
    running = st.session_state.get("map_wanted") == key
    # once asked for it stays open, also after a stop
    shown = st.session_state.get("map_open", False) or _maps().peek(key) is not None
    with st.expander("How the choice changes with bandwidth, batch and GPU count", expanded=shown):
        _choose(swept, x, y)
        st.caption(
            "The best plan at every point of a grid, everything else as it stands. Where two kinds meet they take equally "
            f"long, so near a border either will do: the estimate's error is {units.percent(words.MODEL_ERROR)}."
        )
        found = _maps().peek(key)
        if found is None and not running:
            st.button("Work out the map", on_click=_want, args=(key,), key="map_start")
            return
        found = found or _work_out(key)
        _show(x, y, found, _here(result, x, y))


def _axes(result: Result, swept: list[str]) -> tuple[Axis, Axis]:
    names = [n for n in state.value("map") if n in swept]
    names = [*names, *(n for n in swept if n not in names)][:2]
    x, y = (regions.axis_of(n, state.values(), result.cluster, result.workload.batch) for n in names)
    return x, y


def _choose(swept: list[str], x: Axis, y: Axis) -> None:
    with st.container(horizontal=True):
        for label, own, other in (("Across", x, y), ("Upward", y, x)):
            widget = state.seed(f"w_map_{label}", own.name)
            st.selectbox(
                label, swept, key=widget, format_func=lambda n: NAMES[n], width=260,
                on_change=_turn, args=(widget, label == "Across", own.name, other.name),
            )  # fmt: skip


def _turn(widget: str, across: bool, own: str, other: str) -> None:
    new = st.session_state[widget]
    other = own if new == other else other  # the two change places
    state.change(map=(new, other) if across else (other, new))


def _want(key: Any) -> None:
    st.session_state["map_wanted"], st.session_state["map_open"] = key, True


def _here(result: Result, x: Axis, y: Axis) -> tuple[float, float]:
    stands = whatif.standing(result.cluster, result.workload.batch, result.workload.seq)
    a, b = (min(n.values, key=lambda v: abs(v - stands.get(n.name, v))) for n in (x, y))
    return a, b


def _work_out(key: tuple[Request, Axis, Axis]) -> Map:
    """The map, cell by cell; a click on Stop ends this run of the script at the next one, and what is known is kept."""
    place = st.empty()
    with place.container():
        bar = st.progress(0.0, "Planning")
        st.button("Stop", on_click=lambda: st.session_state.pop("map_wanted", None), key="map_stop")

    def waiting() -> None:
        bar.progress(0.0, "Another visitor's map of the same")

    found = _maps().get(key, lambda: _compute(*key, bar), waiting)
    place.empty()
    st.session_state.pop("map_wanted", None)
    return found


def _compute(asked: Request, x: Axis, y: Axis, bar: Any) -> Map:
    values = dict(state.values())
    share = [0.0]

    def say(text: str) -> None:
        bar.progress(share[0], f"Planning: {text}")

    def look(a: float, b: float) -> Cell:
        request = whatif.request(values, regions.changes(x, a, y, b))
        find = lambda: whatif.best(request, state.own_graph(request), say)  # noqa: E731
        return _cells().get((request, a, b), lambda: sensitivity.cell(a, b, find, regions.sort_of))

    cells = []
    for found in sensitivity.sweep(x, y, look):
        cells.append(found)
        share[0] = SWEEP_SHARE * len(cells) / (len(x.values) * len(y.values))
    borders = []
    pairs = sensitivity.changes(cells)
    for k, (left, right) in enumerate(pairs):
        share[0] = SWEEP_SHARE + (1 - SWEEP_SHARE) * k / len(pairs)
        borders.append(sensitivity.crossover(left, right, x.step, look))
    return tuple(cells), tuple(borders)


def _show(x: Axis, y: Axis, found: Map, here: tuple[float, float]) -> None:
    cells, borders = found
    letters = regions.names(cells)
    left, right = st.columns([3, 2], gap="large")
    with left:

        def pick() -> None:
            points = st.session_state["map_chart"]["selection"]["points"]
            data = points[0].get("customdata") if points else None
            if data:
                a, b = (float(v) for v in str(data[0] if isinstance(data, list) else data).split(","))
                state.change(whatif=whatif.write(regions.changes(x, a, y, b)))

        st.plotly_chart(
            regions.figure(x, y, cells, here, frame.theme()), theme=None, key="map_chart", config=frame.CHART,
            on_select=pick, selection_mode="points", alt="Which kind of plan is best as two quantities vary",
        )  # fmt: skip
        st.caption("A click on a tile opens it in “What if …” above.")
    with right:
        sentences = regions.told(x, y, borders, letters)
        st.markdown("**Where the choice changes**")
        st.markdown("\n".join(f"- {frame.text(s)}" for s in sentences) or "Nowhere: one kind of plan is best throughout.")
