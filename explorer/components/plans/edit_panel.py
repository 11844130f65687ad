"""Editing a plan: one weight pattern placed by hand, the rest kept or chosen anew, and what that costs at once."""

from __future__ import annotations

import streamlit as st

from explorer.address import edits, pins
from explorer.analysis import what_if as whatif
from explorer.components import frame
from explorer.components.plans import whatif_panel
from explorer.session import state
from explorer.text import glossary, recipe, words
from planner_core.core import Placements, Plan, PlannerError, parse_placement
from planner_core.planning import Editable, Result, edit

WIDE = 150
"""Pixels of a control."""


def show_edits(result: Result, plans: dict[str, Plan], chosen: str) -> None:
    """The controls, and the edited plan against the one that it comes from."""
    texts = state.value("edit")
    try:
        asked = (
            edits.parse_edits(texts) if texts else edits.Edits(chosen, st.session_state.get("edit_rest_wish", "keep"))
        )
    except PlannerError as error:
        st.error(state.page_wording(str(error)))
        st.button("Take back all edits", on_click=_clear_edits, key="edit_forget")
        return
    base = plans.get(asked.base)
    if base is not None:
        _controls(result, asked, base)
    if not texts:
        st.caption("Give one weight another placement: what it costs is told at once, and the plan joins the others.")
        return
    found = state.edited_plan(state.plan_request(result.request), texts)
    if isinstance(found, str):
        st.error(found)
    elif base is not None:
        _show_comparison(base, found)
    _show_undo(asked, isinstance(found, Plan) and chosen != pins.EDITED_ID)


def _controls(result: Result, asked: edits.Edits, base: Plan) -> None:
    known = {edit.key_of(e.weight): e for e in edit.editable(result.graph, base)}
    st.markdown(f"From **{frame.escape(recipe.layout_name(base))}**")
    with st.container(horizontal=True, key="edit", gap="medium", vertical_alignment="bottom"):
        start = next(reversed(tuple(asked.changes)), None) or _first_weight(result, known)
        key = st.selectbox(
            "Weight",
            list(known),
            index=list(known).index(start) if start in known else 0,
            key="edit_weight",
            width=380,
            format_func=lambda k: (
                f"{known[k].pattern}  ×{known[k].copies}" if known[k].copies > 1 else known[k].pattern
            ),
        )
        one = known[key]
        now = asked.changes.get(key, one.stored[0])
        now = now if len(now) == len(base.mesh.axis_sizes) else one.stored[0]
        for axis, size in enumerate(base.mesh.axis_sizes):
            if size > 1:
                _axis(asked, one, key, now, axis, f"On {base.mesh.axis_names[axis]} ({size} GPUs)")
        widget = state.widget_key("edit_rest", asked.rest)
        st.segmented_control(
            "All other weights",
            list(edits.OTHER_WEIGHTS),
            default=asked.rest,
            key=widget,
            required=True,
            format_func=lambda r: edits.OTHER_WEIGHTS[r],
            on_change=lambda: _set_rest(asked, st.session_state[widget]),
        )
    if len(one.stored) > 1:
        st.caption("Its copies lie in several ways in this plan; an edit gives all of them the same.")


def _axis(asked: edits.Edits, one: Editable, key: str, now: Placements, axis: int, label: str) -> None:
    widget, options = state.widget_key(f"edit_{key}_{axis}", str(now[axis])), _options(one, now[axis])

    def put() -> None:
        placements = tuple(parse_placement(st.session_state[widget]) if a == axis else p for a, p in enumerate(now))
        _set_edits(asked.put(key, placements, one.stored))

    help = glossary.GLOSSARY["R"] + ". " + glossary.GLOSSARY["S"]
    st.selectbox(label, options, index=options.index(str(now[axis])), key=widget, width=WIDE, on_change=put, help=help)


def _options(one: Editable, now: object) -> list[str]:
    there = edits.placement_options(one)
    return there if str(now) in there else [*there, str(now)]


def _first_weight(result: Result, known: dict[str, Editable]) -> str:
    """The first weight of the node that is selected in the graph, else the first matrix of a repeated block."""
    node = state.value("node")
    if node:
        scenes = state.model_drawing(result.request).scopes.items()
        held = {
            (scope, w)
            for scope, content in scenes
            for p in content.nodes
            if p.node.id == node
            for w, _ in p.node.weights
        }
        for key, e in known.items():
            if e.weight in held:
                return key
    return next((k for k, e in known.items() if e.copies > 1 and len(e.meta.shape) > 1), next(iter(known)))


def _show_comparison(before: Plan, after: Plan) -> None:
    with st.container(horizontal=True, key="edit_answer", gap="large"):
        whatif_panel.show_metrics(before, after)
    stood = ", ".join(f"{f.name} {f.now}" for f in whatif.metric_changes(before, before))
    st.caption(f"Before, in {frame.escape(words.plan_title(before))}: {stood}.")
    told = [f"{frame.escape(words.describe_axes(after))}."]
    if not after.fits:
        told.append("It does not fit the memory.")
    st.markdown(" ".join(told))
    for note in after.notes[1:]:
        st.caption(frame.escape(note))
    whatif_panel.show_moved_weights(before, after, "edit")


def _show_undo(asked: edits.Edits, good: bool) -> None:
    with st.container(horizontal=True, key="edit_undo"):
        for key, placements in asked.changes.items():
            label = f"{key.rpartition('/')[2]} {' '.join(map(str, placements))}"
            st.button(
                f"{frame.escape(label)} ✕",
                key=f"undo_{key}",
                type="tertiary",
                help="Take this edit back",
                on_click=_set_edits,
                args=(asked.put(key, placements, (placements,)),),
            )
    with st.container(horizontal=True):
        if good:
            st.button(
                "Choose the edited plan",
                type="primary",
                key="edit_choose",
                on_click=lambda: state.change(plan=pins.EDITED_ID),
            )
        st.button("Take back all edits", on_click=_clear_edits, key="edit_forget")


def _set_rest(asked: edits.Edits, rest: str) -> None:
    st.session_state["edit_rest_wish"] = rest
    if asked.changes:
        _set_edits(edits.Edits(asked.base, rest, asked.changes))


def _set_edits(asked: edits.Edits) -> None:
    texts = asked.write()
    state.change(edit=texts, **({} if texts else _replace_chosen()))


def _clear_edits() -> None:
    state.change(edit=(), **_replace_chosen())


def _replace_chosen() -> dict[str, str]:
    """Where the edited plan was chosen and goes, the one that it came from is chosen."""
    texts = state.value("edit")
    return {"plan": texts[0].rpartition(":")[0]} if state.value("plan") == pins.EDITED_ID and texts else {}
