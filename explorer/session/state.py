"""The state of one visitor: settings, which the address keeps, and the plans that they ask for.

The settings are in `st.session_state["values"]`. At the head of every run they meet the address: an address that somebody
changed (a pasted link, back, forward) wins, otherwise the address follows the settings. Widgets write through `change`,
before the page runs again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from urllib.parse import urlencode

import streamlit as st

from explorer.address import carry, edits, pins, settings
from explorer.address.pins import EDITED_ID
from explorer.graph.modules import group_by_module
from explorer.graph.scene import Scene, build_scene
from explorer.jobs.background import BackgroundJob
from explorer.jobs.result_cache import ResultCache
from explorer.session.pace import REPORT_INTERVAL_S
from explorer.text.commands import is_uploaded_model
from explorer.text.option_words import page_wording as page_wording
from explorer.text.option_words import word_terms
from explorer.text.words import escape, plan_title
from planner_core.core import NoPlanFits, Plan, PlannerError, PlanRole, Unreadable
from planner_core.planning import FIRST_PASSES, GraphSource, Progress, Request, Result, plan_ids, plan_model
from planner_core.planning.pricing import Budget

CACHED_RESULTS = 24
FIRST = "overview"
"""The first page."""
MAX_EDITED = 100
FADED = "<style>[data-stale='true'] { opacity: 0.25 !important; transition: none !important; }</style>"
"""While a plan is searched, the figures of the plan before are no longer true: they fade at once."""
PATIENCE_S = 0.4
"""Planning that takes longer shows its progress and can be stopped."""
SOON = f"<p class='soon' style='animation-delay: {PATIENCE_S}s'>Planning …</p>"
"""Seen after that time, also before the search has reported anything: a server that has just started first reads the planner's files."""


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


# --- plans -----------------------------------------------------------------------------------------


@st.cache_resource(show_spinner=False)
def _plans() -> ResultCache[Request, Result]:
    return ResultCache(2 * CACHED_RESULTS)  # most results are kept under two requests


def plan_request(request: Request, progress: Progress | None = None) -> Result:
    """Plan a request; results are shared by all sessions, the least recently used are forgotten.

    `progress` is told each pass, and may raise to stop. The result is also kept under its own request, in which everything
    that the search chose is stated. Stages are searched behind it (`later_searches`): a visitor reads the first answer meanwhile.
    """
    waiting = (lambda: progress("another visitor's planning of the same")) if progress else (lambda: None)
    result = _plans().get(
        request,
        lambda: plan_model(request, uploaded_source(request, progress), progress, passes=FIRST_PASSES),
        waiting,
    )
    _plans().put(result.request, result)
    return result


@st.cache_resource(show_spinner=False)
def _method_plans() -> ResultCache[Request, Result]:
    return ResultCache(CACHED_RESULTS)


def plan_method(request: Request) -> Result:
    """Return the best plan of a method for the table of methods, without baselines, trade-offs and notes.

    They take half of the time. What another page asks of the same request is planned in full (see `plan_request`).
    """
    plan = partial(plan_model, request, uploaded_source(request), passes={})
    return known_method(request) or _method_plans().get(request, plan)


def known_method(request: Request) -> Result | None:
    """Return what `plan_method` gives, if it was planned before."""
    return _plans().peek(request) or _method_plans().peek(request)


def _result_of_pin(plan_id: str, pinned: Mapping[str, Any]) -> Result:
    """Return a result that has a pinned plan. The best plan of a method is known from the table of methods."""
    request = settings.build_request(pinned)
    known = known_method(request) if not pinned["edit"] else None
    return known if known and plan_id in plan_ids(known.plans) else with_edit(plan_request(request), pinned["edit"])


def replace_result(request: Request, result: Result) -> None:
    """Keep a better result of a request, for all sessions."""
    _plans().put(request, result)
    _plans().put(result.request, result)


def known_result(request: Request) -> Result | None:
    """Return the plans of a request if they were made before."""
    return _plans().peek(request)


_DRAWINGS: ResultCache[Request, Scene] = ResultCache(CACHED_RESULTS)


def model_drawing(request: Request) -> Scene:
    """Return the drawing of the request's model by its modules, laid out once."""
    return _DRAWINGS.get(request, lambda: build_scene(group_by_module(plan_request(request).coarse), brief=True))


def uploaded_graph(request: Request, progress: Progress | None = None) -> Any:
    """Return the captured graph of an uploaded model, or None for a model of the zoo."""
    if not is_uploaded_model(request.model):
        return None
    from explorer.jobs.upload import load_graph

    return load_graph(request, progress)


def uploaded_source(request: Request, progress: Progress | None = None) -> GraphSource:
    """Return a function that captures an uploaded model for the number of micro-batches that the search tries."""
    return (lambda one: uploaded_graph(one, progress)) if is_uploaded_model(request.model) else None


def current_request() -> Request:
    """Return what the settings ask for."""
    return settings.build_request(values())


def plain_request() -> Request:
    """Return the request with nothing left open: one micro-batch, no recomputation. Lessons show what such choices do."""
    request = current_request()
    recompute = "none" if request.recompute == "auto" else request.recompute
    return replace(request, accumulate=request.accumulate or 1, recompute=recompute)


@st.cache_resource(show_spinner=False)
def _edited_plans() -> ResultCache[tuple[Request, tuple[str, ...]], Plan | str]:
    return ResultCache(MAX_EDITED)


def edited_plan(result: Result, edit: tuple[str, ...]) -> Plan | str:
    """Return the plan with these edits (see `edits`), shared by all sessions; or in one sentence why there is none."""

    def build() -> Plan | str:
        try:
            return edits.build_edited_plan(result, plan_ids(result.plans), edit)
        except PlannerError as error:
            return page_wording(error)

    return _edited_plans().get((result.request, edit), build)


def with_edit(result: Result, edit: tuple[str, ...]) -> Result:
    """Add the edited plan as the last one, if there is one."""
    edited = edited_plan(result, edit) if edit else ""
    return result if isinstance(edited, str) else replace(result, plans=(*result.plans, edited))


def edit_of(plan_id: str) -> tuple[str, ...]:
    """Return the edits that a plan comes from; no plan but the edited one has any."""
    return value("edit") if plan_id == EDITED_ID else ()


PlanKey = tuple[Request, str, tuple[str, ...], float, float]


def plan_key(request: Request, plan_id: str, plan: Plan) -> PlanKey:
    """Return the key of a plan in a cache.

    Its id alone is none: a proof, or stages, that are found behind the first answer put another plan under it.
    """
    return request, plan_id, edit_of(plan_id), plan.cost.step_time_s, plan.cost.memory_bytes["peak"]


def current_result(short: Callable[[], None] = lambda: None) -> Result:
    """Return the plans of the current settings, with the edited one. Where there are none, say why and stop the page.

    `short` is called where nothing fits: it shows what would.
    """
    return with_edit(_plan_current(short), value("edit"))


def _plan_current(short: Callable[[], None]) -> Result:
    request = current_request()
    place = st.empty()
    if _plans().peek(request) is not None:
        return plan_request(request)
    if st.session_state.get("stopped") == request:
        with place.container():
            st.info("Planning was stopped. Change the settings above, or plan these after all.")
            st.button("Plan now", on_click=lambda: st.session_state.pop("stopped", None), key="plan_now")
        st.stop()
    faded = st.empty()
    faded.html(FADED)
    place.html(SOON)
    try:
        # `changed`: the address may not have reached the browser before the click on Stop.
        result = plan_request(
            request, progress_with_stop(place, lambda: st.session_state.update(stopped=request, changed=True))
        )
    except PlannerError as error:
        faded.empty()
        place.error(page_wording(error))
        _offer_divisors(request)
        if isinstance(error, NoPlanFits):
            short()
        st.stop()
    place.empty()
    faded.empty()
    if is_uploaded_model(request.model):  # the sentence above can now say what the capture found
        st.rerun()
    return result


def _offer_divisors(request: Request) -> None:
    """Draw a button for each of the nearest numbers of micro-batches that divide the batch, where the set one does not."""
    batch, micro_batches = settings.batch_and_tokens(values())[0], request.accumulate
    if micro_batches is None or batch % micro_batches == 0:
        return
    with st.container(horizontal=True, key="divisors"):
        for number in settings.nearest_divisors(batch, micro_batches):
            words = f"{number} micro-batch{'es' * (number > 1)}"
            st.button(words, key=f"accumulate_{number}", on_click=change, kwargs={"accumulate": number})
        st.button("As many as are best", key="accumulate_open", on_click=change, kwargs={"accumulate": None})


def progress_with_stop(place: Any, stop: Callable[[], None], key: str = "stop_planning") -> Progress:
    """Return a progress callback that shows the pass in `place` once it takes long, with a button to stop.

    A click starts the script anew, and Streamlit ends this run at the next element that it draws. So a search must report
    now and then; only some of its reports are drawn.
    """
    start = time.perf_counter()
    last = start - REPORT_INTERVAL_S
    line: list[Any] = []

    def report(text: str) -> None:
        nonlocal last
        now = time.perf_counter()
        elapsed_s = now - start
        if now - last < REPORT_INTERVAL_S:
            return
        last = now
        if elapsed_s < PATIENCE_S:
            place.html(SOON)  # at a new element Streamlit ends this run where a newer edit has come
            return
        if not line:
            box = place.container(horizontal=True, vertical_alignment="center")
            box.button("Stop", on_click=stop, key=key)  # before the words, whose length would move it
            line.append(box.empty())
        line[0].markdown(f":material/hourglass_top: Planning: {word_terms(text)}, {elapsed_s:.0f} s", width="content")

    return report


def training_budget() -> Budget | None:
    """Return the tokens to train on and the price of a GPU hour, where the address states them."""
    tokens = value("tokens")
    return None if tokens is None else Budget(tokens, value("price"))


def known_plan_ids(request: Request) -> tuple[str, ...]:
    """Return the ids of a request's plans; none where it was not planned yet, or cannot be."""
    result = _plans().peek(request)
    return tuple(plan_ids(result.plans)) if result else ()


def recommended_id(result: Result) -> str:
    """Return the id of the plan to run."""
    return next(n for n, p in plan_ids(result.plans).items() if p is result.recommended)


def chosen_plan(plans: Mapping[str, Plan], result: Result) -> tuple[str, Plan]:
    """Return the plan in the address, else the recommended one; warn of an id that is not known."""

    def known_id(plan_id: str) -> str:
        """Return the id under which a plan is listed: one that is pinned at these settings has that of its pin."""
        pin = pins.format_pin(plan_id, values())
        return pin if plan_id not in plans and pin in plans else plan_id

    plan_id, recommended = known_id(value("plan")), known_id(recommended_id(result))
    if plan_id and plan_id not in plans:
        st.warning(
            f"There is no plan “{escape(plan_id[:40])}” here any more; showing the recommended one. "
            f"Plans here: {', '.join(plans)}."
        )
    plan_id = plan_id if plan_id in plans else recommended
    return plan_id, plans[plan_id]


def result_of(plan_id: str, result: Result) -> Result:
    """Return the result that a plan of `with_pinned` belongs to, with the graph of the plan's own number of micro-batches.

    A pin of other settings has another graph and cluster.
    """
    if pins.SEPARATOR in plan_id:
        plan_id, pinned = pins.parse_pin(plan_id, values())
        result = _result_of_pin(plan_id, pinned)
    plan = plan_ids(result.plans).get(plan_id)
    return result if plan is None else result.of_plan(plan)


def with_pinned(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Add the plans that are pinned from other settings of this model, by their pins.

    A pin of the current settings takes the place of the plan's own id. The page warns of what cannot be read.
    """
    by_id = dict(plans)
    for pin in dict.fromkeys((*value("compare"), value("plan"))):
        if pins.SEPARATOR not in pin:
            continue
        try:
            plan_id, pinned = pins.parse_pin(pin, values())
            theirs = plan_ids(_result_of_pin(plan_id, pinned).plans)
        except (Unreadable, PlannerError) as error:
            st.warning(f"A pinned plan, “{escape(pin[:40])}”, cannot be shown: {page_wording(error)}")
            continue
        if plan_id not in theirs:
            st.warning(f"There is no plan “{escape(plan_id[:40])}” at the settings of a pin; it is left out.")
            continue
        plan = theirs[plan_id]
        difference = pins.describe_changes(pinned, values())
        if not difference:
            by_id.pop(plan_id, None)
        by_id[pin] = (
            replace(plan, name=f"{plan_title(plan)} ({difference})", role=PlanRole.OTHER) if difference else plan
        )
    return by_id
