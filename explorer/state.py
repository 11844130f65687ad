"""The session: settings that live in the address, and the plans they ask for.

Values are kept in `st.session_state["values"]`. At the head of every run the address and the values are brought
together: an address that somebody changed (a pasted link, back, forward) wins, else the address follows the values.
Widgets write through `change`, before the page runs again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from explorer import settings
from explorer.graph_view import Scene, scene
from planner_core.errors import PlannerError
from planner_core.pipeline import Result, plan_model
from planner_core.plan import Plan
from planner_core.planner import Request

CACHED_RESULTS = 24


def begin(page: str) -> None:
    """Bring the address and the session together; call once, before anything is drawn."""
    state = st.session_state
    known = {k: v for k, v in st.query_params.to_dict().items() if k in settings.SETTINGS}
    written: dict[str, str] = state.get("written", {})
    turned = state.get("page") not in (None, page) and not known
    bare = not known and (turned or state.get("bare", False))
    # a run that a widget asked for may carry an address from before the last change: then the values are newer
    changed = state.pop("changed", False)
    if "values" not in state or (known != written and not bare and not changed):
        state["values"], state["problems"] = settings.read(known)
        state["asked"] = state.get("asked", 0) + 1
    state["page"] = page
    wanted = settings.write(state["values"])
    if turned and wanted:
        state["bare"], state["turns"], state["written"] = True, state.get("turns", 0) + 1, wanted
    elif not bare or wanted != written:
        state["bare"] = False
        _to_address(wanted)


def completion() -> tuple[str, str]:
    """(query, stamp) that the browser should add to the bare address of a page just turned to; empty otherwise."""
    state = st.session_state
    if not state.get("bare"):
        return "", ""
    return urlencode(state["written"]), f"{state['page']}{state['turns']}"


def _to_address(wanted: Mapping[str, str]) -> None:
    for key in [k for k in st.query_params if k in settings.SETTINGS and k not in wanted]:
        del st.query_params[key]
    for key, text in wanted.items():
        if st.query_params.get(key) != text:
            st.query_params[key] = text
    st.session_state["written"] = dict(wanted)


def values() -> dict[str, Any]:
    """The settings as they stand."""
    found: dict[str, Any] = st.session_state["values"]
    return found


def value(key: str) -> Any:
    """One setting."""
    return values()[key]


def change(**new: Any) -> None:
    """Set some settings; the address follows at the head of the next run. A new model forgets what belonged to the old."""
    current = values()
    if "model" in new and new["model"] != current["model"]:
        new = {
            "batch": None,
            "seq": None,
            "layers": None,
            "node": "",
            "open": None,
            "depth": None,
            "block": "",
            "plan": "",
            "compare": (),
            **new,
        }
    if {"cluster"} & new.keys() and new["cluster"] != current["cluster"]:
        new = {"mesh": None, "memory": None, **new}
    current.update(new)
    st.session_state["changed"] = True
    st.session_state["problems"] = []


def from_widget(key: str, widget: str) -> None:
    """Callback: the setting takes what the widget holds."""
    change(**{key: st.session_state[widget]})


def seed(widget: str, current: Any) -> str:
    """Put a setting into its widget's state before the widget is drawn; returns the widget's key."""
    if st.session_state.get(widget) != current:
        st.session_state[widget] = current
    return widget


def problems() -> list[str]:
    """Sentences about the address."""
    found: list[str] = st.session_state.get("problems", [])
    return found


def asked() -> int:
    """Counts the times the address was read, so that the graph follows a link and not its own echo."""
    return int(st.session_state.get("asked", 0))


# --- plans -----------------------------------------------------------------------------------------


@st.cache_resource(max_entries=CACHED_RESULTS, show_spinner=False)
def plan(request: Request) -> Result:
    """All plans for a request; values only, shared by all sessions, the least recently used forgotten."""
    return plan_model(request, own_graph(request))


@st.cache_resource(max_entries=CACHED_RESULTS, show_spinner=False)
def drawing(request: Request) -> Scene:
    """The drawing of the request's model, laid out once."""
    return scene(plan(request).coarse)


def own_graph(request: Request) -> Any:
    """The captured graph of a user's own config, or None for a model of the zoo."""
    if not request.model.startswith("own-"):
        return None
    from explorer.own import load_own

    return load_own(request)


def request() -> Request:
    """What the settings ask for."""
    return settings.request(values())


def result() -> Result:
    """The plans of the current settings. Where they cannot be, says why in place and stops the page."""
    try:
        with st.spinner("Planning", show_time=True):
            return plan(request())
    except PlannerError as error:
        st.error(in_words(str(error)))
        st.stop()


OPTIONS = {
    "memory-gb": "memory per GPU",
    "mesh": "mesh",
    "batch": "batch",
    "seq": "sequence length",
    "layers": "layers",
    "recompute": "recomputation",
    "dtype": "number format",
    "optimizer": "optimizer",
    "zero": "weight sharding",
    "cluster": "cluster",
    "method": "method",
    "objective": "goal",
}


def in_words(text: str) -> str:
    """A sentence of the command line for the page: options by the names of their controls."""
    for option, words in OPTIONS.items():
        text = re.sub(rf"--{option}\b", words, text)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def plan_ids(plans: tuple[Plan, ...]) -> dict[str, Plan]:
    """Every plan by a name for the address: its own, numbered where two share it."""
    found: dict[str, Plan] = {}
    for p in plans:
        name = base = re.sub(r"[^a-z0-9]+", "-", p.name.lower()).strip("-") or "plan"
        k = 2
        while name in found:
            name, k = f"{base}-{k}", k + 1
        found[name] = p
    return found


def chosen(found: Mapping[str, Plan]) -> tuple[str, Plan]:
    """The plan in the address, else the best; a name that is not there is told in place."""
    name = value("plan")
    if name and name not in found:
        st.warning(
            f"There is no plan “{name[:40]}” here any more; showing the best one. Plans here: {', '.join(found)}."
        )
    name = name if name in found else next(iter(found))
    return name, found[name]
