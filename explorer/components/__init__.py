"""The components of this project, drawn in the browser: the model graph, steps in time, SVG, the table and the chart of plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import streamlit as st

from explorer.static import script, style, template

UNSCALED = 660
"""Drawings up to this width, in pixels, are hardly scaled at any width of the window."""


def _register() -> Any:
    html, css, js = template("graph"), style("graph"), script("graph")
    return st.components.v2.component("shardscope_graph", html=html, css=css, js=js)


_GRAPH = _register()
_STREAMS = st.components.v2.component(
    "shardscope_streams", html=template("streams"), css=style("streams"), js=script("streams")
)
_ADDRESS = st.components.v2.component("shardscope_address", html="<i></i>", js=script("address"))
_SVG = st.components.v2.component(
    "shardscope_svg",
    html="<div class='svg'></div>",
    css=style("svg"),
    js=script("svg"),
)
_PLANS = st.components.v2.component(
    "shardscope_plans",
    html="<div class='plans'></div>",
    css=style("parts") + style("plans_table"),
    js=script("plans_table"),
)

_CHART = st.components.v2.component(
    "shardscope_plans_chart",
    html="<div class='chart'></div>",
    css=style("plans_chart"),
    js=script("plans_chart"),
)
CHART_HEIGHT = 524
"""Pixels of the chart of plans, with its legend of three lines on a phone."""


def draw_rows(data: dict[str, Any], *, key: str, on_choose: Callable[[], None]) -> None:
    """Draw a table (see plans_table.js); a click on a row puts `{"id"}` at `st.session_state[key]["chosen"]`."""
    _PLANS(key=key, data=data, on_chosen_change=on_choose)


def draw_plans_chart(data: dict[str, Any], *, key: str, on_choose: Callable[[], None]) -> None:
    """Draw plans as points (see plans_chart.js); a click on one puts `{"id"}` at `st.session_state[key]["chosen"]`."""
    _CHART(key=key, data=data, height=CHART_HEIGHT, on_chosen_change=on_choose)


def draw_streams(data: dict[str, Any], *, key: str) -> None:
    """Draw the steps of plans in time (see streams.js and `explorer.analysis.streams`)."""
    _STREAMS(key=key, data=data, height=98 + sum(34 + 24 * len(plan["lanes"]) for plan in data["plans"]))


def draw_svg(text: str, *, key: str) -> None:
    """Draw an SVG whose text was escaped where it was made.

    A drawing that no page scales keeps its room while it loads, so that nothing below jumps.
    """
    size = re.search(r'width="(\d+)" height="(\d+)"', text)
    if size is None or int(size[1]) > UNSCALED:
        _SVG(key=key, data={"svg": text}, height="content")
        return
    # The room of that height is for the time until the component's script has drawn it.
    with st.container(key=f"room_of_{key}", height=int(size[2]), border=False):
        _SVG(key=key, data={"svg": text}, height=int(size[2]))


def draw_graph(
    data: dict[str, Any],
    *,
    key: str,
    on_view: Callable[[], None],
    height: int,
) -> None:
    """Draw `data` (see graph.js).

    A click, an opened block or another overlay puts `{"selected", "open", "show"}` at `st.session_state[key]["view"]`; "open" is None
    until a block was opened or closed by hand.
    """
    _GRAPH(key=key, data={**data, "height": height}, height=height, on_view_change=on_view)


def complete_address(query: str, stamp: str) -> None:
    """Complete the bare address of a page that was just opened; does nothing for an empty `stamp`."""
    _ADDRESS(key="address", data={"query": query, "stamp": stamp}, width="content", height=1)
