"""Components of our own: the model graph drawn as SVG in the browser, and two small helpers of the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import streamlit as st

from explorer.static import script, style, template

HEIGHT = 800
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
_WEIGHTS = st.components.v2.component(
    "shardscope_weights",
    html="<div class='weights'></div>",
    css=style("weights"),
    js=script("weights"),
)
_CODE = st.components.v2.component(
    "shardscope_code", html="<div class='code' tabindex='0' role='region'></div>", css=style("code"), js=script("code")
)


def streams(data: dict[str, Any], *, key: str) -> None:
    """Draw the steps of plans in time (see streams.js and `explorer.analysis.streams`)."""
    lanes, plans = len(data["streams"]), len(data["plans"])
    _STREAMS(key=key, data=data, height=120 + plans * (34 + 24 * lanes))


def weights(data: dict[str, Any], *, key: str, on_open: Callable[[], None]) -> None:
    """A table of weights (see weights.js); a click on a name puts the node's id at `st.session_state[key]["open"]`."""
    _WEIGHTS(key=key, data=data, on_open_change=on_open)


def code(data: dict[str, Any], *, key: str) -> None:
    """Show generated code whose lines are linked with the nodes of a graph on the page (see code.js)."""
    _CODE(key=key, data=data, height=data["height"])


def svg(text: str, *, key: str) -> None:
    """Show a drawing of ours; what stands in it has been escaped by who drew it. One that no page scales keeps its room free
    while it loads, so that nothing below jumps."""
    size = re.search(r'width="(\d+)" height="(\d+)"', text)
    if size is None or int(size[1]) > UNSCALED:
        _SVG(key=key, data={"svg": text}, height="content")
        return
    with st.container(
        key=f"room_of_{key}", height=int(size[2]), border=False
    ):  # the component's own room comes with its script
        _SVG(key=key, data={"svg": text}, height=int(size[2]))


def graph(
    data: dict[str, Any],
    *,
    key: str,
    on_view: Callable[[], None],
    height: int = HEIGHT,
) -> None:
    """Draw `data` (see graph.js). A click, an opened block or another overlay puts `{"selected", "open", "show"}` at
    `st.session_state[key]["view"]`; "open" is None until a block was opened or closed by hand."""
    _GRAPH(key=key, data={**data, "height": height}, height=height, on_view_change=on_view)


def address(query: str, stamp: str) -> None:
    """Complete the bare address of a page that was just turned to; does nothing for an empty `stamp`."""
    _ADDRESS(key="address", data={"query": query, "stamp": stamp}, width="content", height=1)
