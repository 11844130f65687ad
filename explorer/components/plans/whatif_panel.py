"""The what-if panel: sliders that re-plan as they stop, and what changes."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from explorer.address import settings
from explorer.analysis import what_if
from explorer.components import frame
from explorer.components.overview import table
from explorer.components.request_form.fields import control_label
from explorer.jobs.result_cache import ResultCache
from explorer.session import shared_plans, state
from explorer.session.pace import PacedProgress
from explorer.text import recipe, units, words
from explorer.text.option_words import page_wording
from planner_core.core import Cluster, Plan, PlannerError
from planner_core.planning import Progress, Request, Result
from planner_core.planning.pricing import predict_reserved

MAX_CACHED = 200
"""Answers kept for all sessions."""
LABELS = {
    "batch": "Batch, samples a step",
    "seq": "Tokens a sample",
    "nodes": "Nodes",
    "gpus": "GPUs in a node",
    "intra": "Inside a node, GB/s per GPU",
    "inter": "Between nodes, GB/s per GPU",
}
SLIDER_STEPS: dict[str, tuple[float, ...]] = {
    "batch": what_if.POWERS,
    "seq": (*what_if.POWERS[4:], 8192, 16384, 32768),
    "nodes": what_if.NODES,
    "gpus": what_if.GPUS,
    "intra": what_if.GB_PER_S,
    "inter": what_if.GB_PER_S,
}
CHOICES = ("dtype", "precision", "optimizer", "zero", "recompute")
EARLY_NOTE = "First figures, of a good plan on a likely mesh; the best one of all meshes is being looked for."
LAST_ANSWER_KEY = "whatif_last"
"""Where the session keeps its last answer: a plan for the next stop of a slider is near it."""
WIDE, WIDEST, SHORT_NAME = 225, 340, 24
"""Pixels of a list, of one with long names, and the letters up to which a name is short."""


@st.cache_resource(show_spinner=False)
def _answers() -> ResultCache[Request, Plan]:
    return ResultCache(MAX_CACHED)


def best_plan(request: Request, progress: Progress = lambda text: None) -> Plan:
    """Find the best plan for a request; shared by all sessions."""
    source = shared_plans.uploaded_source(request, progress)
    return _answers().get(
        request, lambda: what_if.best_plan(request, source, progress), lambda: progress("another visitor's plan")
    )


def known_plan(request: Request) -> Plan | None:
    """Return the best plan for a request if it was found before."""
    return _answers().peek(request)


def current_changes() -> dict[str, Any]:
    """Return the changed settings of the address."""
    return what_if.parse_changes(state.value("whatif"))


@st.fragment
def show_what_if(result: Result) -> None:
    """Draw the controls, and the best plan for them against the best one now."""
    if st.session_state.pop("whatif_rerun_page", False):
        st.rerun()
    changes = current_changes()
    unreadable = what_if.unreadable_changes(state.value("whatif"))
    frame.warn_missing("what-if setting", unreadable, (), "It is left out")
    _show_controls(result, changes)
    if not changes:
        return
    request = what_if.changed_request(state.values(), changes)
    # Not the chosen plan: the recommended one may be slower by less than the doubt, and its distance to the best is no effect of a change.
    before = result.searched
    try:
        early = None if known_plan(request) else _quick_plan(request, before)
        place = st.empty()  # not sooner: it clears the answer before, which stands until there is another
        # In a place of its own: what a shorter container does not replace, Streamlit leaves below it.
        note = st.empty()
        if early is not None:
            with place.container():
                _show_answer(result, early, "whatif_early")
            note.caption(EARLY_NOTE)
        with st.spinner("Planning", show_time=True):
            plan = best_plan(request, _stop_when_moved(st.empty()))
    except PlannerError as error:
        st.error(page_wording(error))
        _show_buttons(changes, False)
        return
    st.session_state[LAST_ANSWER_KEY] = plan
    note.empty()
    with place.container():
        _show_answer(result, plan, "whatif_answer")
    _show_buttons(changes, True)


def _stop_when_moved(place: DeltaGenerator) -> Progress:
    """Return a progress callback that draws nothing now and then: at an element Streamlit ends a run whose slider has moved on."""

    def draw(text: str) -> None:
        place.empty()

    return PacedProgress(draw, max_s=math.inf)


def _show_controls(result: Result, changes: dict[str, Any]) -> None:
    current = what_if.current_numbers(result.cluster, result.workload.batch, result.workload.seq)
    with st.container(horizontal=True, key="whatif", gap="medium"):
        for key, steps in SLIDER_STEPS.items():
            one_node = key == "inter" and changes.get("nodes", current["nodes"]) == 1
            one_token = key == "seq" and current["seq"] == 1
            if not one_node and not one_token:
                # the address has what leaves a node; people know what a GPU has
                size = changes.get("gpus", current["gpus"]) if key == "inter" else 1
                start = current.get(key, what_if.DEFAULT_INTER_GB_PER_S)
                _show_slider(key, steps, start, changes, alone="inter" not in current, size=size)
    more = st.expander("Numbers, optimizer, ZeRO, recomputation", expanded=bool(changes.keys() & set(CHOICES)))
    with more, st.container(horizontal=True, gap="medium"):
        for key in CHOICES:
            _show_choice(key, settings.VALUE_NAMES[key], changes)


def _quick_plan(request: Request, before: Plan) -> Plan | None:
    """Find a good plan at once, near the panel's last answer or near the best plan now."""
    for near in filter(None, (st.session_state.get(LAST_ANSWER_KEY), before)):
        if plan := what_if.quick_plan(request, near, shared_plans.uploaded_source(request)):
            return plan
    return None


def _set_change(key: str, value: Any, current: Any, alone: bool = False) -> None:
    """Write a change into the address; the current value is not a change. `alone`: the cluster has one node now."""
    changes = current_changes()
    had_changes = bool(changes)
    changes.pop(key, None)
    if value != current:
        changes[key] = value
    if alone and key == "nodes":  # several nodes need a link between them
        changes.pop("inter", None)
        changes |= {"inter": what_if.DEFAULT_INTER_GB_PER_S} if value > 1 else {}
    state.change(whatif=what_if.format_changes(changes))
    state.sync_address()
    st.session_state["whatif_rerun_page"] = bool(changes) != had_changes  # what stands below comes or goes


def _show_slider(
    key: str, steps: tuple[float, ...], start: float, changes: dict[str, Any], *, alone: bool, size: float
) -> None:
    """Draw a slider whose values are shown divided by `size`."""
    value = changes.get(key, start)
    widget = state.widget_key(f"wi_{key}", value)
    st.select_slider(
        LABELS[key],
        what_if.slider_stops((*steps, value), start),
        value=value,
        key=widget,
        format_func=lambda v: f"{round(v / size, 2):g}",
        on_change=lambda: _set_change(key, st.session_state[widget], start, alone),
    )


def _show_choice(key: str, names: Mapping[Any, str], changes: dict[str, Any]) -> None:
    current = state.value(key)
    value = changes.get(key, current)
    widget = state.widget_key(f"wi_{key}", value)
    st.selectbox(
        control_label(key),
        list(names),
        index=list(names).index(value),
        key=widget,
        width=WIDEST if max(map(len, names.values())) > SHORT_NAME else WIDE,
        format_func=names.__getitem__,
        on_change=lambda: _set_change(key, st.session_state[widget], current),
    )


def _show_answer(result: Result, after: Plan, key: str) -> None:
    """Draw the plan `after` against the best one at the settings, of `result`, whose GPU no control changes."""
    before, cluster = result.searched, result.cluster
    with st.container(horizontal=True, key=key, gap="large"):
        show_metrics(before, after)
        if after.fits:
            _show_reserved(after, cluster, result.request.memory_gb)
        old, new = (
            " · ".join(filter(None, (recipe.layout_name(p), recipe.describe_extra_work(p)))) for p in (before, after)
        )
        note = "as before" if old == new else f"before: {old}"
        st.metric("plan", new, note, delta_color="off", delta_arrow="off", width="content")
    sentences = []
    if not after.fits:
        sentences.append("It does not fit the memory.")
    if key == "whatif_answer" and after.fits and not after.optimal:
        sentences += [frame.escape(page_wording(note)) for note in after.notes]
    if sentences:
        st.markdown(" ".join(sentences))
    if result.recommended is not before and before.fits:
        st.caption(frame.escape(_describe_recommended(result)))
    show_moved_weights(before, after, key)


def _describe_recommended(result: Result) -> str:
    """Say what is compared, where that is not what the first page recommends."""
    before, recommended = result.searched, result.recommended
    steps = [units.seconds(p.cost.step_time_s) for p in (before, recommended)]
    stages = " of one pipeline stage" * bool(recommended.pipeline)
    return (
        f"The best plans{stages} are compared, {steps[0]} before; {recipe.layout_name(recommended)}, which Overview recommends, "
        f"takes {steps[1]}, and for the change it may recommend another plan too."
    )


def _show_reserved(plan: Plan, cluster: Cluster, memory_gb: float | None) -> None:
    """Draw what the allocator reserves under a plan that fits, in the words of the Overview."""
    capacity, reserved = cluster.gpu.memory_bytes, predict_reserved(plan, cluster, memory_gb)
    st.metric(
        f"reserved of {units.memory(capacity)}",
        table.reserved_range(plan, reserved, " GiB"),
        help=table.describe_reserved(reserved.short, capacity) + table.describe_mark(reserved),
        width="content",
    )


def show_metrics(before: Plan, after: Plan) -> None:
    """Draw step, communication and memory of the new plan with their change, and its throughput where its work is another."""
    for metric in what_if.metric_changes(before, after):
        rising_is_better = metric.better == metric.change.startswith("+")
        st.metric(
            metric.name,
            metric.now,
            metric.change,
            delta_color="off" if metric.better is None else "normal" if rising_is_better else "inverse",
            width="content",
            delta_arrow="off",
        )


def show_moved_weights(before: Plan, after: Plan, where: str) -> None:
    """Draw the weights that are placed otherwise."""
    moved = what_if.moved_weights(before, after)
    if not moved:
        st.caption("Every weight lies as before.")
        return
    title = (
        f"{len(moved)} placement{'s differ' if len(moved) > 1 else ' differs'} from {words.title_in_sentence(before)}"
    )
    # The key holds the place: the answer stands before the early one is gone.
    with st.expander(title, key=f"moved_{where}"):
        rows = [list(map(html.escape, row)) for row in moved[: what_if.MAX_MOVED_SHOWN]]
        frame.show_table(["weight", "before", "after"], rows, "placements that changed")
        if len(moved) > what_if.MAX_MOVED_SHOWN:
            st.caption(f"and {len(moved) - what_if.MAX_MOVED_SHOWN} more")


def _show_buttons(changes: dict[str, Any], planned: bool) -> None:
    with st.container(horizontal=True):
        if planned:
            st.button("Plan with these", type="primary", on_click=_apply, args=(changes,), key="whatif_take")
        st.button("Back to the settings", on_click=_reset, key="whatif_forget")


def _apply(changes: dict[str, Any]) -> None:
    state.change(**changes, whatif=(), plan="")
    st.session_state["whatif_rerun_page"] = True  # the whole page follows, not the fragment alone


def _reset() -> None:
    state.change(whatif=())
    state.sync_address()
    st.session_state["whatif_rerun_page"] = True
