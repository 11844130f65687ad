"""The settings of one visitor, which the address keeps, and what belongs to them: notes, widgets, jobs.

The settings are in `st.session_state["values"]`. At the head of every run they meet the address: an address that somebody
changed (a pasted link, back, forward) wins, otherwise the address follows the settings. Widgets write through `change`,
before the page runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn
from urllib.parse import urlencode

import streamlit as st

from explorer.address import carry, settings
from explorer.jobs.background import BackgroundJob
from planner_core.planning import Progress, Request
from planner_core.planning.pricing import Budget

FIRST = "overview"
"""The first page."""


def begin_page(page: str) -> None:
    """Read the address or write it, whichever is older; call once, before anything is drawn."""
    state = st.session_state
    known = {k: v for k, v in st.query_params.to_dict().items() if k in settings.SETTINGS}
    written: dict[str, str] = state.get("written", {})
    # Streamlit's navigation opens a page at its bare address, without the settings.
    turned = state.get("page") not in (None, page) and not known
    bare = not known and (turned or state.get("bare", False))
    # A run that a widget started may carry an address from before the last change: then the settings are newer.
    changed = state.pop("changed", False)
    if "values" not in state or (known != written and not bare and not changed):
        state["values"], state["problems"] = settings.parse_query(known)
        state["version"], state["edit_notes"] = version() + 1, ()
        cancel_jobs()
        state["reads"] = state.get("reads", 0) + 1
    state["page"] = page
    query = settings.to_query(state["values"])
    if turned:
        state["edit_notes"] = ()  # they were read on the page of the edit
    if turned and query:
        state["bare"], state["turns"], state["written"] = True, state.get("turns", 0) + 1, query
    elif not bare or query != written:
        state["bare"] = False
        _write_address(query)


def query_to_add() -> tuple[str, str]:
    """Return (query, stamp) that the browser should add to the bare address of a page just opened; empty otherwise."""
    state = st.session_state
    if not state.get("bare"):
        return "", ""
    return urlencode(state["written"]), f"{state['page']}{state['turns']}"


def _write_address(query: Mapping[str, str]) -> None:
    address = st.query_params.to_dict()
    new = {**{k: text for k, text in address.items() if k not in settings.SETTINGS}, **query}
    if new != address:
        # All at once: the browser makes an entry of its history of each message, and *Back* went to addresses with half of an edit.
        st.query_params.from_dict(new)
    st.session_state["written"] = dict(query)


def values() -> dict[str, Any]:
    """Return the current settings."""
    current: dict[str, Any] = st.session_state["values"]
    return current


def value(key: str) -> Any:
    """Return one setting."""
    return values()[key]


def change(**new: Any) -> None:
    """Set some settings; others stay, and `edit_notes` names those that cannot. The address follows at the head of the next run."""
    current = values()
    after, notes = carry.apply_edit(current, new)
    if any(after[k] != current[k] for k in settings.REQUEST_KEYS):
        st.session_state["edit_notes"] = notes
        cancel_jobs()
    if after != current:
        st.session_state["version"] = version() + 1
    current.update(after)
    st.session_state["changed"] = True
    st.session_state["problems"] = []


def start_job(name: str, work: Callable[[Progress], object]) -> BackgroundJob:
    """Start work of this visitor for the current settings, once; a change of the request cancels it."""
    jobs: dict[str, BackgroundJob] = st.session_state.setdefault("jobs", {})
    if name not in jobs:  # one that failed stays too: it would fail as before
        jobs[name] = BackgroundJob(work)
    return jobs[name]


def cancel_jobs() -> None:
    """Cancel what this visitor no longer waits for."""
    for job in st.session_state.pop("jobs", {}).values():
        job.cancel()


def edit_notes() -> tuple[str, ...]:
    """Return a sentence for each other setting that the last edit changed."""
    notes: tuple[str, ...] = st.session_state.get("edit_notes", ())
    return notes


def add_edit_notes(*notes: str) -> None:
    """Add sentences about an edit that was just made."""
    st.session_state["edit_notes"] = (*edit_notes(), *notes)


def version() -> int:
    """Count the changes of the settings: a field has the number in its key, so that it never keeps an old value."""
    return int(st.session_state.get("version", 0))


def sync_address() -> None:
    """Write the address at once: for a fragment, which runs without the head of the page."""
    _write_address(settings.to_query(values()))
    st.session_state["changed"] = False


def rerun_page() -> NoReturn:
    """Run the whole page again, from a fragment that runs by itself, with the settings as they are.

    The run of such a fragment may carry an address from before the last click, which `begin_page` would read as a newer one: a plan
    that was chosen just as a search ended was let go of.
    """
    st.session_state["changed"] = True
    st.rerun()


def take_widget_value(key: str, widget: str) -> None:
    """Set a setting to its widget's value; a callback."""
    change(**{key: st.session_state[widget]})


def widget_key(widget: str, current: Any) -> str:
    """Return the key under which a widget shows `current` as its default.

    The browser keeps what a widget last held, also while it is not drawn. Once the setting has changed elsewhere, the widget gets
    another key and starts over: under the old key the browser would send the old value back as if it had just been chosen.
    """
    known = st.session_state.setdefault("widgets", {})
    number, before = known.get(widget, (0, current))
    if before != current and st.session_state.get(_numbered(widget, number), before) != current:
        number += 1
    known[widget] = number, current
    return _numbered(widget, number)


def _numbered(widget: str, number: int) -> str:
    return f"{widget}~{number}" if number else widget


def set_widget(widget: str, current: Any) -> str:
    """Write a setting into the state of a widget that is always drawn; return the widget's key."""
    if st.session_state.get(widget) != current:
        st.session_state[widget] = current
    return widget


def address_problems() -> list[str]:
    """Return a sentence for each part of the address that cannot be read."""
    problems: list[str] = st.session_state.get("problems", [])
    return problems


def address_reads() -> int:
    """Count the reads of the address, so that the graph follows a link and not its own echo."""
    return int(st.session_state.get("reads", 0))


def current_request() -> Request:
    """Return what the settings ask for."""
    return settings.build_request(values())


def plain_request() -> Request:
    """Return the request with nothing left open: one micro-batch, no recomputation. Lessons show what such choices do."""
    request = current_request()
    recompute = "none" if request.recompute == "auto" else request.recompute
    return replace(request, accumulate=request.accumulate or 1, recompute=recompute)


def training_budget() -> Budget | None:
    """Return the tokens to train on and the price of a GPU hour, where the address states them."""
    tokens = value("tokens")
    return None if tokens is None else Budget(tokens, value("price"))
