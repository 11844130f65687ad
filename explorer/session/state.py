"""The state of one visitor: settings, which the address keeps, and the plans that they ask for.

Values are kept in `st.session_state["values"]`. At the head of every run the address and the values are brought
together: an address that somebody changed (a pasted link, back, forward) wins, else the address follows the values.
Widgets write through `apply_edit`, before the page runs again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from explorer.address import carry, edits, pins, settings
from explorer.address.pins import EDITED_ID
from explorer.address.settings import Unreadable
from explorer.graph.modules import group_by_module
from explorer.graph.scene import Scene, build_scene
from explorer.jobs.result_cache import ResultCache
from explorer.session.pace import REPORT_INTERVAL_S
from explorer.text.option_words import page_wording as page_wording
from explorer.text.words import escape as plain
from explorer.text.words import plan_title
from planner_core.core import NoPlanFits, Plan, PlannerError
from planner_core.planning import GraphSource, Progress, Request, Result, plan_model
from planner_core.planning.analysis import Choice, choice
from planner_core.planning.pricing import Budget

CACHED_RESULTS = 24
FIRST = "overview"
"""The first page."""
MAX_EDITED = 100
FADED = "<style>[data-stale='true'] { opacity: 0.25 !important; transition: none !important; }</style>"
"""While another plan is looked for, what stands of the one before is no longer true, and fades at once."""
PATIENCE_S = 0.4
"""Planning that takes longer says what it does and can be stopped."""


def begin_page(page: str) -> None:
    """Bring the address and the session together; call once, before anything is drawn."""
    state = st.session_state
    known = {k: v for k, v in st.query_params.to_dict().items() if k in settings.SETTINGS}
    written: dict[str, str] = state.get("written", {})
    turned = state.get("page") not in (None, page) and not known
    bare = not known and (turned or state.get("bare", False))
    # a run that a widget asked for may carry an address from before the last change: then the values are newer
    changed = state.pop("changed", False)
    if "values" not in state or (known != written and not bare and not changed):
        state["values"], state["problems"] = settings.parse_query(known)
        state["stamp"], state["told"] = version() + 1, ()
        state["asked"] = state.get("asked", 0) + 1
    state["page"] = page
    wanted = _wanted()
    if turned and wanted:
        state["bare"], state["turns"], state["written"] = True, state.get("turns", 0) + 1, wanted
    elif not bare or wanted != written:
        state["bare"] = False
        _to_address(wanted)


def _wanted() -> dict[str, str]:
    """The address of the page as it should be."""
    return settings.to_query(st.session_state["values"])


def query_to_add() -> tuple[str, str]:
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
    """Set some settings; the address follows at the head of the next run. What was not set stays; where it cannot, `edit_notes` says so."""
    current = values()
    after, told_of = carry.apply_edit(current, new)
    if any(after[k] != current[k] for k in settings.REQUEST_KEYS):
        after |= {k: () for k in ("lasso", "among") if k not in new}
        st.session_state["told"] = told_of
    if after != current:
        st.session_state["stamp"] = version() + 1
    current.update(after)
    st.session_state["changed"] = True
    st.session_state["problems"] = []


def edit_notes() -> tuple[str, ...]:
    """What the last edit changed beside what was edited, a sentence each."""
    said: tuple[str, ...] = st.session_state.get("told", ())
    return said


def version() -> int:
    """A number for the settings as they stand: fields that show them are drawn anew once it is another."""
    return int(st.session_state.get("stamp", 0))


def sync_address() -> None:
    """Let the address follow the settings at once: for a part of the page that runs without the rest."""
    _to_address(_wanted())
    st.session_state["changed"] = False


def take_widget_value(key: str, widget: str) -> None:
    """Callback: the setting takes what the widget holds."""
    change(**{key: st.session_state[widget]})


def widget_key(widget: str, current: Any) -> str:
    """The key under which a widget shows `current` as its default.

    A widget keeps in the browser what it last held, also while it is not drawn. Once the setting changed elsewhere, the widget takes
    another key, and so begins anew: else the browser would send the old value back as if it had just been chosen.
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
    """Put a setting into its widget's state before the widget is drawn; returns the widget's key. For widgets that are always drawn."""
    if st.session_state.get(widget) != current:
        st.session_state[widget] = current
    return widget


def address_problems() -> list[str]:
    """Sentences about the address."""
    found: list[str] = st.session_state.get("problems", [])
    return found


def address_reads() -> int:
    """Counts the times the address was read, so that the graph follows a link and not its own echo."""
    return int(st.session_state.get("asked", 0))


# --- plans -----------------------------------------------------------------------------------------


@st.cache_resource(show_spinner=False)
def _plans() -> ResultCache[Request, Result]:
    return ResultCache(2 * CACHED_RESULTS)  # most stand under two requests


def plan_request(request: Request, say: Progress | None = None) -> Result:
    """All plans for a request; values only, shared by all sessions, the least recently used forgotten. `say` is told
    each pass, and may raise to stop. They stand also under the request of the result, where what the search chose is settled."""
    waiting = (lambda: say("another visitor's planning of the same")) if say else (lambda: None)
    found = _plans().get(request, lambda: plan_model(request, uploaded_source(request, say), say), waiting)
    _plans().put(found.request, found)
    return found


def known_result(request: Request) -> Result | None:
    """All plans for a request, where they were made before."""
    return _plans().peek(request)


@st.cache_resource(max_entries=CACHED_RESULTS, show_spinner=False)
def model_drawing(request: Request) -> Scene:
    """The drawing of the request's model by its modules, laid out once."""
    return build_scene(group_by_module(plan_request(request).coarse), brief=True)


def uploaded_graph(request: Request, say: Progress | None = None) -> Any:
    """The captured graph of a user's own config, or None for a model of the zoo. `say` as in `plan_request`."""
    if not request.model.startswith("own-"):
        return None
    from explorer.jobs.upload import load_graph

    return load_graph(request, say)


def uploaded_source(request: Request, say: Progress | None = None) -> GraphSource:
    """As `uploaded_graph`, for a number of micro-batches that is still open."""
    return (lambda asked: uploaded_graph(asked, say)) if request.model.startswith("own-") else None


def current_request() -> Request:
    """What the settings ask for."""
    return settings.build_request(values())


def plain_request() -> Request:
    """What the settings ask for with nothing left open: one micro-batch and no recomputation unless they say otherwise. For lessons,
    which show what such a choice does."""
    asked = current_request()
    recompute = "none" if asked.recompute == "auto" else asked.recompute
    return replace(asked, accumulate=asked.accumulate or 1, recompute=recompute)


@st.cache_resource(show_spinner=False)
def _edited_plans() -> ResultCache[tuple[Request, tuple[str, ...]], Plan | str]:
    return ResultCache(MAX_EDITED)


def edited_plan(found: Result, edit: tuple[str, ...]) -> Plan | str:
    """The plan with these edits (see `edits`), shared by all sessions; or in one sentence why there is none."""

    def make() -> Plan | str:
        try:
            return edits.build_edited_plan(found, plan_ids(found.plans), edit)
        except PlannerError as error:
            return page_wording(str(error))

    return _edited_plans().get((found.request, edit), make)


def with_edit(found: Result, edit: tuple[str, ...]) -> Result:
    """The plans with the edited one as the last of them, where there is one."""
    more = edited_plan(found, edit) if edit else ""
    return found if isinstance(more, str) else replace(found, plans=(*found.plans, more))


def edit_of(plan_id: str) -> tuple[str, ...]:
    """The edits that a plan of the page comes from: none but for the edited one."""
    return value("edit") if plan_id == EDITED_ID else ()


def current_result(short: Callable[[], None] = lambda: None) -> Result:
    """The plans of the current settings, the edited one among them. Where they cannot be, says why in place and stops
    the page; where nothing fits, after `short` said what would."""
    return with_edit(_planned(short), value("edit"))


def _planned(short: Callable[[], None]) -> Result:
    wanted = current_request()
    place = st.empty()
    if _plans().peek(wanted) is not None:
        return plan_request(wanted)
    if st.session_state.get("stopped") == wanted:
        with place.container():
            st.info("Planning was stopped. Change the settings above, or plan these after all.")
            st.button("Plan now", on_click=lambda: st.session_state.pop("stopped", None), key="plan_now")
        st.stop()
    faded = st.empty()
    faded.html(FADED)
    try:
        # the address may not have reached the browser before the click: then the settings are newer
        found = plan_request(
            wanted, progress_with_stop(place, lambda: st.session_state.update(stopped=wanted, changed=True))
        )
    except PlannerError as error:
        faded.empty()
        place.error(page_wording(str(error)))
        if isinstance(error, NoPlanFits):
            short()
        st.stop()
    place.empty()
    faded.empty()
    if wanted.model.startswith("own-"):  # the sentence above can now say what was found
        st.rerun()
    return found


def progress_with_stop(place: Any, stop: Callable[[], None], key: str = "stop_planning") -> Progress:
    """A `say` for planning: tells the pass in `place` once it takes long, with a button to stop.

    A click starts the script anew, and Streamlit ends this run at the next thing it is told; so what computes must say
    something now and then. It is passed on only so often.
    """
    start = time.perf_counter()
    last = start - REPORT_INTERVAL_S
    line: list[Any] = []

    def say(text: str) -> None:
        nonlocal last
        now = time.perf_counter()
        taken = now - start
        if taken < PATIENCE_S or now - last < REPORT_INTERVAL_S:
            return
        last = now
        if not line:
            box = place.container(horizontal=True, vertical_alignment="center")
            box.button("Stop", on_click=stop, key=key)  # before the words, whose length would move it
            line.append(box.empty())
        told = text.replace(" world", " GPUs as one axis")
        line[0].markdown(f":material/hourglass_top: Planning: {told}, {taken:.0f} s", width="content")

    return say


def training_budget() -> Budget | None:
    """The tokens to train on and the price of a GPU hour, where the address says them."""
    tokens = value("tokens")
    return None if tokens is None else Budget(tokens, value("price"))


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


def known_plan_ids(request: Request) -> tuple[str, ...]:
    """The plans that are there for a request, by `plan_ids`; none where it was not planned yet, or cannot be."""
    ready = _plans().peek(request)
    return tuple(plan_ids(ready.plans)) if ready else ()


@st.cache_resource(max_entries=4 * CACHED_RESULTS, show_spinner=False)
def choice_of(request: Request, _result: Result) -> Choice:
    """Which plan is recommended, which is the fastest, and which tie with it."""
    return choice(_result)


def recommended_id(result: Result) -> str:
    """The name in the address of the plan to run."""
    return next(n for n, p in plan_ids(result.plans).items() if p.name == choice_of(result.request, result).recommended)


def chosen_plan(found: Mapping[str, Plan], result: Result) -> tuple[str, Plan]:
    """The plan in the address, else the recommended one; a name that is not there is told in place."""

    def standing(plan: str) -> str:
        """A plan that is pinned at these settings stands under its pin."""
        pinned = pins.format_pin(plan, values())
        return pinned if plan not in found and pinned in found else plan

    name, first = standing(value("plan")), standing(recommended_id(result))
    if name and name not in found:
        st.warning(
            f"There is no plan “{plain(name[:40])}” here any more; showing the recommended one. Plans here: {', '.join(found)}."
        )
    name = name if name in found else first
    return name, found[name]


def result_of(name: str, result: Result) -> Result:
    """What a plan of `with_pinned` is one of: its graph and cluster are other ones where it was pinned at other settings."""
    if pins.SEPARATOR not in name:
        return result
    _, asked = pins.parse_pin(name, values())
    return with_edit(plan_request(settings.build_request(asked)), asked["edit"])


def with_pinned(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """The plans, and those that are pinned from other settings of this model, by the text of their pin. A pin of the
    settings as they stand takes the place of the plan's own name. What cannot be read is told in place."""
    found = dict(plans)
    for text in dict.fromkeys((*value("compare"), value("plan"))):
        if pins.SEPARATOR not in text:
            continue
        try:
            name, asked = pins.parse_pin(text, values())
            there = plan_ids(with_edit(plan_request(settings.build_request(asked)), asked["edit"]).plans)
        except (Unreadable, PlannerError) as why:
            st.warning(f"A pinned plan, “{plain(text[:40])}”, cannot be shown: {page_wording(str(why))}")
            continue
        if name not in there:
            st.warning(f"There is no plan “{plain(name[:40])}” at the settings of a pin; it is left out.")
            continue
        note = pins.describe_changes(asked, values())
        if not note:
            found.pop(name, None)
        found[text] = replace(there[name], name=f"{plan_title(there[name])} ({note})") if note else there[name]
    return found
