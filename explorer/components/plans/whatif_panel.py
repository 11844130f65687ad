"""The what-if panel: sliders that re-plan as they stop, beside what changes."""

from __future__ import annotations

import html
from typing import Any

import streamlit as st

from explorer.address import settings
from explorer.analysis import what_if as whatif
from explorer.components import frame
from explorer.jobs.result_cache import ResultCache
from explorer.session import state
from explorer.text import recipe, words
from planner_core.core import OPTIMIZERS, RECOMPUTE, Plan, PlannerError
from planner_core.planning import Progress, Request, Result

MAX_CACHED = 200
"""Answers kept for all sessions."""
LABELS = {
    "batch": "Batch, samples a step",
    "seq": "Tokens a sample",
    "nodes": "Nodes",
    "gpus": "GPUs in a node",
    "intra": "Inside a node, GB/s per GPU",
    "inter": "Between nodes, GB/s per GPU",
    "dtype": "Numbers",
    "precision": "Precision",
    "optimizer": "Optimizer",
    "zero": "ZeRO",
    "recompute": "Recomputation",
}
SLIDER_STEPS: dict[str, tuple[float, ...]] = {
    "batch": whatif.POWERS,
    "seq": (*whatif.POWERS[4:], 8192, 16384, 32768),
    "nodes": whatif.NODES,
    "gpus": whatif.GPUS,
    "intra": whatif.GB_PER_S,
    "inter": whatif.GB_PER_S,
}
CHOICES: dict[str, dict[Any, str]] = {
    "dtype": settings.DTYPES,
    "precision": settings.PRECISION_NAMES,
    "optimizer": {o: settings.OPTIMIZER_NAMES.get(o, o) for o in OPTIMIZERS},
    "zero": settings.STAGE_NAMES,
    "recompute": {r: settings.RECOMPUTE_NAMES.get(r, r) for r in RECOMPUTE},
}
EARLY_NOTE = "A good plan on the mesh that was best before; the best one of all meshes is being looked for."
"""Under a plan that is shown before the best one is known."""
LAST_ANSWER_KEY = "whatif_last"
"""The session's last answer: a plan for the next stop of a slider is near it."""
WIDE, WIDEST, SHORT_NAME = 225, 340, 24
"""Pixels of a control, of one with long names, and the letters up to which a name is short."""
DEFAULT_INTER = 400.0
"""GB/s between nodes where a cluster of one node is given several."""


@st.cache_resource(show_spinner=False)
def _answers() -> ResultCache[Request, Plan]:
    return ResultCache(MAX_CACHED)


def best_plan(request: Request, say: Progress = lambda text: None) -> Plan:
    """The best plan for a request, shared by all sessions."""
    source = state.uploaded_source(request, say)
    return _answers().get(
        request, lambda: whatif.best_plan(request, source, say), lambda: say("another visitor's plan")
    )


def known_plan(request: Request) -> Plan | None:
    """The best plan for a request, where it was found before."""
    return _answers().peek(request)


@st.fragment
def show_what_if(result: Result, chosen: Plan) -> None:
    """The controls, and the best plan for them against the chosen one."""
    if st.session_state.pop("whatif_taken", False):
        st.rerun()
    changes = whatif.parse_changes(state.value("whatif"))
    frame.warn_missing("what-if setting", whatif.unreadable_changes(state.value("whatif")), (), "It is left out")
    stands = whatif.current_numbers(result.cluster, result.workload.batch, result.workload.seq)
    with st.container(horizontal=True, key="whatif", gap="medium"):
        for key, steps in SLIDER_STEPS.items():
            now = stands.get(key, DEFAULT_INTER)
            useless = key == "inter" and changes.get("nodes", stands["nodes"]) == 1
            if not useless and not (key == "seq" and now == 1):
                # the address has what leaves a node; people know what a GPU has
                size = changes.get("gpus", stands["gpus"]) if key == "inter" else 1
                _show_slider(key, steps, now, changes, alone="inter" not in stands, size=size)
    more = st.expander("Numbers, optimizer, ZeRO, recomputation", expanded=bool(CHOICES.keys() & changes))
    with more, st.container(horizontal=True, gap="medium"):
        for key, names in CHOICES.items():
            _show_choice(key, names, changes)
    if not changes:
        st.caption(
            "Move a slider: the best plan for it is found at once and set against the chosen plan. Nothing else changes."
        )
        return
    asked = whatif.changed_request(state.values(), changes)
    try:
        early = None if known_plan(asked) else _quick_plan(asked, chosen)
        place = st.empty()  # not sooner: it clears what stands there
        if early is not None:
            with place.container():
                _show_answer(chosen, early, "whatif_early")
                st.caption(EARLY_NOTE)
        with st.spinner("Planning", show_time=True):
            after = best_plan(asked)
    except PlannerError as error:
        st.error(state.page_wording(str(error)))
        _show_buttons(changes, False)
        return
    st.session_state[LAST_ANSWER_KEY] = after
    with place.container():
        _show_answer(chosen, after, "whatif_answer")
    _show_buttons(changes, True)


def _quick_plan(asked: Request, chosen: Plan) -> Plan | None:
    """A good plan at once, near the panel's last answer or near the chosen plan."""
    for near in filter(None, (st.session_state.get(LAST_ANSWER_KEY), chosen)):
        if found := whatif.quick_plan(asked, near, state.uploaded_source(asked)):
            return found
    return None


def _set_change(key: str, value: Any, stands: Any, alone: bool = False) -> None:
    """Note a change in the address; a value that stands already is not a change. Several nodes need a link between them."""
    changes = whatif.parse_changes(state.value("whatif"))
    changes.pop(key, None)
    if value != stands:
        changes[key] = value
    if alone and key == "nodes":
        changes.pop("inter", None)
        changes |= {"inter": DEFAULT_INTER} if value > 1 else {}
    state.change(whatif=whatif.format_changes(changes))
    state.sync_address()


def _show_slider(
    key: str, steps: tuple[float, ...], now: float, changes: dict[str, Any], *, alone: bool, size: float
) -> None:
    """A slider whose values are shown divided by `size`."""
    current = changes.get(key, now)
    widget = state.widget_key(f"wi_{key}", current)
    st.select_slider(
        LABELS[key],
        whatif.slider_stops((*steps, current), now),
        value=current,
        key=widget,
        width=WIDE,
        format_func=lambda v: f"{round(v / size, 2):g}",
        on_change=lambda: _set_change(key, st.session_state[widget], now, alone),
    )


def _show_choice(key: str, names: dict[Any, str], changes: dict[str, Any]) -> None:
    now = state.value(key)
    current = changes.get(key, now)
    widget = state.widget_key(f"wi_{key}", current)
    width = WIDEST if max(map(len, names.values())) > SHORT_NAME else WIDE
    st.selectbox(
        LABELS[key],
        list(names),
        index=list(names).index(current),
        key=widget,
        width=width,
        format_func=lambda v: names[v],
        on_change=lambda: _set_change(key, st.session_state[widget], now),
    )


def _show_answer(before: Plan, after: Plan, key: str) -> None:
    with st.container(horizontal=True, key=key, gap="large"):
        show_metrics(before, after)
        old, new = (
            " · ".join(filter(None, (recipe.layout_name(p), recipe.describe_extra_work(p)))) for p in (before, after)
        )
        note = "as before" if old == new else f"before: {old}"
        st.metric("plan", new, note, delta_color="off", delta_arrow="off", width="content")
    told = []
    if not after.fits:
        told.append("It does not fit the memory.")
    if key == "whatif_answer":
        told += [
            f"{frame.escape(note[:1].upper() + note[1:])}." for note in after.notes if after.fits and not after.optimal
        ]
    speed = whatif.compare_sample_rates(before, after)
    told += [f"{frame.escape(speed)}."] if speed else []
    if told:
        st.markdown(" ".join(told))
    show_moved_weights(before, after, key)


def show_metrics(before: Plan, after: Plan) -> None:
    """Step, communication and memory of the new plan with their change."""
    for one in whatif.metric_changes(before, after):
        st.metric(
            one.name,
            one.now,
            one.change,
            delta_color="off" if one.better is None else "inverse",
            width="content",
            delta_arrow="off",
        )


def show_moved_weights(before: Plan, after: Plan, where: str) -> None:
    """The weights that lie otherwise."""
    found = whatif.moved_weights(before, after)
    if found:
        title = f"{len(found)} placement{'s differ' if len(found) > 1 else ' differs'} from {words.plan_title(before)}"
        with st.expander(title, key=f"moved_{where}"):  # the answer stands before the early one is gone
            rows = [[html.escape(w), html.escape(a), html.escape(b)] for w, a, b in found[: whatif.MAX_MOVED_SHOWN]]
            frame.show_table(["weight", "before", "after"], rows, "placements that changed")
            if len(found) > whatif.MAX_MOVED_SHOWN:
                st.caption(f"and {len(found) - whatif.MAX_MOVED_SHOWN} more")
    else:
        st.caption("Every weight lies as before.")


def _show_buttons(changes: dict[str, Any], good: bool) -> None:
    with st.container(horizontal=True):
        if good:
            st.button("Plan with these", type="primary", on_click=_apply, args=(changes,), key="whatif_take")
        st.button("Back to the settings", on_click=_reset, key="whatif_forget")


def _apply(changes: dict[str, Any]) -> None:
    state.change(**changes, whatif=(), plan="")
    st.session_state["whatif_taken"] = True


def _reset() -> None:
    state.change(whatif=())
    state.sync_address()
