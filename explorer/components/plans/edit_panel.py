"""Editing a plan: one weight pattern placed by hand, the rest kept or chosen again, and what that costs."""

from __future__ import annotations

import streamlit as st

from explorer.address import edits, pins
from explorer.analysis import what_if
from explorer.components import frame
from explorer.components.plans import whatif_panel
from explorer.session import shared_plans, state
from explorer.text import glossary, recipe, words
from explorer.text.option_words import page_wording
from planner_core.core import NoteKind, Placements, Plan, PlannerError, parse_placement
from planner_core.planning import Editable, Result, edit

WIDE = 150
"""Pixels of a control."""


def show_edits(result: Result, plans: dict[str, Plan], chosen: str) -> None:
    """Draw the controls, and the edited plan against the one that it comes from."""
    texts = state.value("edit")
    try:
        current = (
            edits.parse_edits(texts) if texts else edits.Edits(chosen, st.session_state.get("edit_rest_wish", "keep"))
        )
    except PlannerError as error:
        st.error(page_wording(error))
        st.button("Take back all edits", on_click=_clear_edits, key="edit_forget")
        return
    base = plans.get(current.base)
    if base is not None:
        _show_controls(result, current, base)
    if not texts:
        st.caption("Give one weight another placement: what it costs is told at once, and the plan joins the others.")
        return
    edited = shared_plans.edited_plan(shared_plans.plan_request(result.request), texts)
    if isinstance(edited, str):
        st.error(edited)
    elif base is not None:
        _show_comparison(base, edited)
    _show_undo(current, isinstance(edited, Plan) and chosen != pins.EDITED_ID)


def _show_controls(result: Result, current: edits.Edits, base: Plan) -> None:
    weights = {edit.weight_key(e.weight): e for e in edit.editable_weights(result.of_plan(base).graph, base)}
    st.markdown(f"From **{frame.escape(recipe.layout_name(base))}**")
    with st.container(horizontal=True, key="edit", gap="medium"):
        start = next(reversed(tuple(current.changes)), None) or _first_weight(result, weights)
        key = st.selectbox(
            "Weight",
            list(weights),
            index=list(weights).index(start) if start in weights else 0,
            key="edit_weight",
            width=380,
            format_func=lambda k: weights[k].pattern + (f"  ×{weights[k].copies}" if weights[k].copies > 1 else ""),
        )
        weight = weights[key]
        placements = current.changes.get(key, weight.stored[0])
        # An edit of a plan on another mesh has another number of axes.
        placements = placements if len(placements) == len(base.mesh.axis_sizes) else weight.stored[0]
        for axis, size in enumerate(base.mesh.axis_sizes):
            if size > 1:
                label = f"On {base.mesh.axis_names[axis]} ({size} GPUs)"
                _show_axis(current, weight, key, placements, axis, label)
        widget = state.widget_key("edit_rest", current.rest)
        st.segmented_control(
            "All other weights",
            list(edits.OTHER_WEIGHTS),
            default=current.rest,
            key=widget,
            required=True,
            format_func=edits.OTHER_WEIGHTS.__getitem__,
            on_change=lambda: _set_rest(current, st.session_state[widget]),
        )
    if len(weight.stored) > 1:
        st.caption("Its copies lie in several ways in this plan; an edit gives all of them the same.")


def _show_axis(current: edits.Edits, weight: Editable, key: str, placements: Placements, axis: int, label: str) -> None:
    now = str(placements[axis])
    widget, options = state.widget_key(f"edit_{key}_{axis}", now), edits.placement_options(weight)
    options = options if now in options else [*options, now]

    def place() -> None:
        chosen = parse_placement(st.session_state[widget])
        new = tuple(chosen if a == axis else p for a, p in enumerate(placements))
        _set_edits(current.put(key, new, weight.stored))

    help = glossary.GLOSSARY["R"] + ". " + glossary.GLOSSARY["S"]
    st.selectbox(label, options, index=options.index(now), key=widget, width=WIDE, on_change=place, help=help)


def _first_weight(result: Result, weights: dict[str, Editable]) -> str:
    """Return the weight of the node that is selected in the graph, else the first matrix of a repeated block."""
    node = state.value("node")
    if node:
        of_node = {
            (scope, name)
            for scope, content in shared_plans.model_drawing(result.request).scopes.items()
            for placed in content.nodes
            if placed.node.id == node
            for name, _ in placed.node.weights
        }
        for key, weight in weights.items():
            if weight.weight in of_node:
                return key
    matrices = (k for k, w in weights.items() if w.copies > 1 and len(w.meta.shape) > 1)
    return next(matrices, next(iter(weights)))


def _show_comparison(before: Plan, after: Plan) -> None:
    with st.container(horizontal=True, key="edit_answer", gap="large"):
        whatif_panel.show_metrics(before, after)
    metrics = ", ".join(f"{m.name} {m.now}" for m in what_if.metric_changes(before, before))
    st.caption(f"Before, in {frame.escape(words.title_in_sentence(before))}: {metrics}.")
    refusal = "" if after.fits else " It does not fit the memory."
    st.markdown(f"{frame.escape(words.describe_axes(after))}.{refusal}")
    for note in after.notes:
        if note.kind is not NoteKind.EDIT:  # the metrics above are those of the plan that it names
            st.caption(frame.escape(page_wording(note)))
    whatif_panel.show_moved_weights(before, after, "edit")


def _show_undo(current: edits.Edits, can_choose: bool) -> None:
    with st.container(horizontal=True, key="edit_undo"):
        for key, placements in current.changes.items():
            label = f"{key.rpartition('/')[2]} {' '.join(map(str, placements))}"
            st.button(
                f"{frame.escape(label)} ✕",
                key=f"undo_{key}",
                type="tertiary",
                help="Take this edit back",
                on_click=_set_edits,
                args=(current.put(key, placements, (placements,)),),
            )
    with st.container(horizontal=True):
        if can_choose:
            st.button(
                "Choose the edited plan",
                type="primary",
                key="edit_choose",
                on_click=lambda: state.change(plan=pins.EDITED_ID),
            )
        st.button("Take back all edits", on_click=_clear_edits, key="edit_forget")


def _set_rest(current: edits.Edits, rest: str) -> None:
    # Before the first edit the address has no place for it.
    st.session_state["edit_rest_wish"] = rest
    if current.changes:
        _set_edits(edits.Edits(current.base, rest, current.changes))


def _set_edits(new: edits.Edits) -> None:
    texts = new.write()
    state.change(edit=texts, **({} if texts else _replace_chosen()))


def _clear_edits() -> None:
    state.change(edit=(), **_replace_chosen())


def _replace_chosen() -> dict[str, str]:
    """Choose the plan that the edited one came from, if the edited one was chosen and goes."""
    texts = state.value("edit")
    return {"plan": texts[0].rpartition(":")[0]} if state.value("plan") == pins.EDITED_ID and texts else {}
