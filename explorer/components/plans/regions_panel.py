"""The map of regions on the page: worked out on demand, with progress and a stop, shared by all sessions once it is there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from explorer.address import settings
from explorer.analysis import other_links as linked
from explorer.analysis import what_if as whatif
from explorer.components import frame
from explorer.figures import regions
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
from explorer.session.pace import Pace
from explorer.text import units, words
from planner_core.core import Cluster, Graph, Plan, load_cluster
from planner_core.planning import Request, Result, prepare
from planner_core.planning.analysis import Crossover, MapAxis, RegionCell, sensitivity

CELLS, MAPS = 1000, 64
"""Cells and whole maps kept for all sessions."""
NAMES = {
    "inter": "bandwidth between nodes",
    "intra": "bandwidth inside a node",
    "batch": "batch",
    "nodes": "number of nodes",
}
SWEEP_SHARE = 0.6
"""Share of the progress bar for the grid; the rest is for the crossovers."""

Map = tuple[tuple[RegionCell, ...], tuple[Crossover, ...], int]
"""Cells, borders, and how many searches they took."""


@st.cache_resource(show_spinner=False)
def _cells() -> ResultCache[tuple[Request, float, float], tuple[RegionCell, Plan | None]]:
    return ResultCache(CELLS)


@st.cache_resource(show_spinner=False)
def _maps() -> ResultCache[tuple[Request, MapAxis, MapAxis], Map]:
    return ResultCache(MAPS)


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
            "long, so near a border either will do: two predicted steps like that of the best plan are a tie where they differ by "
            f"less than {units.percent(words.doubt(result.best, result.best))}."
        )
        found = _maps().peek(key)
        place = st.empty()
        if found is None and not running:
            place.button("Work out the map", on_click=_want, args=(key,), key="map_start")
            return
        found = found or _work_out(key, place)
        _show(x, y, found, _here(result, x, y))


def _axes(result: Result, swept: list[str]) -> tuple[MapAxis, MapAxis]:
    names = [n for n in state.value("map") if n in swept]
    names = [*names, *(n for n in swept if n not in names)][:2]
    x, y = (regions.axis_of(n, state.values(), result.cluster, result.workload.batch) for n in names)
    return x, y


def _choose(swept: list[str], x: MapAxis, y: MapAxis) -> None:
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


def _here(result: Result, x: MapAxis, y: MapAxis) -> tuple[float, float]:
    stands = whatif.standing(result.cluster, result.workload.batch, result.workload.seq)
    a, b = (min(n.values, key=lambda v: abs(v - stands.get(n.name, v))) for n in (x, y))
    return a, b


def _work_out(key: tuple[Request, MapAxis, MapAxis], place: Any) -> Map:
    """The map, cell by cell; a click on Stop ends this run of the script within a search, and what is known is kept."""
    with place.container():
        # above the words that change, whose lines it would otherwise move with, away from under the pointer
        st.button("Stop", on_click=lambda: st.session_state.pop("map_wanted", None), key="map_stop")
        bar = st.progress(0.0, "Planning")
        drawn = st.empty()
        st.caption("■ searched · □ inferred from its neighbours · · still to come")

    def waiting() -> None:
        bar.progress(0.0, "Another visitor's map of the same")

    found = _maps().get(key, lambda: _Work(*key, bar, drawn).map(), waiting)
    place.empty()
    st.session_state.pop("map_wanted", None)
    return found


class _Work:
    """One map under way: what is known of it, and how it is told."""

    def __init__(self, asked: Request, x: MapAxis, y: MapAxis, bar: Any, place: Any) -> None:
        self.x, self.y, self.bar, self.place = x, y, bar, place
        self.values = dict(state.values())
        # elsewhere the best plan is not the one of the least step time, and a price says nothing
        self.infers = asked.method == "exact" and asked.objective == "time"
        self.plans: dict[tuple[float, float], Plan] = {}
        self.graphs: dict[int, Graph] = {}
        self.times: dict[tuple[float, float], Callable[[Cluster], float]] = {}
        self.cells: list[RegionCell] = []
        self.searches = 0
        self.share, self.what = 0.0, ""
        self.say = Pace(self.tell)

    def map(self) -> Map:
        """Every cell, then the borders."""
        for cell in sensitivity.sweep(self.x, self.y, self.look, self.priced if self.infers else None):
            self.cells.append(cell)
            self.share = SWEEP_SHARE * len(self.cells) / (len(self.x.values) * len(self.y.values))
            self.what = f"{len(self.cells)} of {len(self.x.values) * len(self.y.values)} points known"
            self._draw()
        borders = []
        pairs = sensitivity.changes(self.cells)
        for k, (left, right) in enumerate(pairs):
            self.share = SWEEP_SHARE + (1 - SWEEP_SHARE) * k / len(pairs)
            self.what = f"border {k + 1} of {len(pairs)}"
            priced = self.priced if self.infers and self.x.links else None
            borders.append(sensitivity.crossover(left, right, self.x.step, self.look, priced))
        return tuple(self.cells), tuple(borders), self.searches

    def _draw(self) -> None:
        with self.place:  # one element in place of another: what stands below does not jump
            frame.table(*regions.so_far(self.x, self.y, self.cells), "points of the map")

    def tell(self, text: str) -> None:
        """Show the text of the work under way, beside the share that is done."""
        self.bar.progress(self.share, f"Planning: {self.what}; {text}" if self.what else f"Planning: {text}")

    def request(self, a: float, b: float) -> Request:
        """The request at a point."""
        return whatif.request(self.values, regions.changes(self.x, a, self.y, b))

    def look(self, a: float, b: float) -> RegionCell:
        """The cell at a point, searched, or known from a map before."""
        request = self.request(a, b)

        def make() -> tuple[RegionCell, Plan | None]:
            plan: list[Plan] = []

            def find() -> Plan:
                plan.append(whatif.best(request, state.own_source(request), self.say))
                return plan[0]

            return sensitivity.cell(a, b, find, regions.sort_of), plan[0] if plan else None

        self.say.begin()
        self.searches += 1
        try:
            cell, plan = _cells().get((request, a, b), make, lambda: self.say("another visitor's search"))
        except TimeoutError:
            return RegionCell(a, b, sensitivity.UNKNOWN)
        if plan is not None:
            self.plans[a, b] = plan
        return cell

    def priced(self, cell: RegionCell, a: float, b: float) -> float:
        """Seconds that the plan of a searched cell takes on the links of another point."""
        here, there = (cell.x, cell.y), self.request(a, b).cluster
        assert isinstance(there, str)
        if here not in self.plans:
            return math.inf
        if here not in self.times:
            plan = self.plans[here]
            self.times[here] = linked.step_times(plan, self._graph(plan, self.request(*here)))
        return self.times[here](load_cluster(there))

    def _graph(self, plan: Plan, request: Request) -> Graph:
        """The graph that a plan was made for; one for each micro-batch."""
        count = int(plan.workload["accumulate"])
        batch = int(plan.workload["batch"]) // count
        if batch not in self.graphs:
            asked = replace(request, batch=batch, accumulate=1)
            self.graphs[batch] = prepare(asked, state.own_graph(asked)).graph
        return self.graphs[batch]


def _show(x: MapAxis, y: MapAxis, found: Map, here: tuple[float, float]) -> None:
    cells, borders, searches = found
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
        st.caption("A click on a tile opens it in “What if …” above, where it can be planned with all its numbers.")
        st.caption(regions.counted(cells, searches))
    with right:
        sentences = regions.told(x, y, borders, letters)
        st.markdown("**Where the choice changes**")
        st.markdown(
            "\n".join(f"- {frame.text(s)}" for s in sentences) or "Nowhere: one kind of plan is best throughout."
        )
    _rows(x, y, cells)


def _rows(x: MapAxis, y: MapAxis, cells: Sequence[RegionCell]) -> None:
    """The tiles as a table, which keys reach; a row does what a click on its tile does."""
    key = f"map_rows_{x.name}_{y.name}"

    def pick() -> None:
        rows = st.session_state[key]["selection"]["rows"]
        if rows:
            cell = cells[rows[0]]
            state.change(whatif=whatif.write(regions.changes(x, cell.x, y, cell.y)))

    box = st.expander("Every point as a table", key="map_table", on_change="rerun")
    if box.open:
        with box:
            st.dataframe(
                [regions.row(x, y, c) for c in cells], hide_index=True, height=260, on_select=pick, selection_mode="single-row",
                key=key, alt="Every point of the map: a row opens it in What if",
            )  # fmt: skip
