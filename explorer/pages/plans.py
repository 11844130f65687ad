"""Plans: what are my choices? All plans by communication and memory, the chosen one weight by weight."""

from __future__ import annotations

import streamlit as st

from explorer import components, glossary, state, weight_rows, words
from explorer.choosing import LETTERS, REFERENCE
from explorer.components import choice, edit_panel, frame, opened, regions_panel, whatif_panel
from planner_core.pipeline import Result
from planner_core.plan import Plan

FOLD = "explorer/pages/fold.py"


def weights(result: Result, plan: Plan) -> None:
    """Placement of every weight, by name pattern; a name opens its node in the graph."""
    drawing = state.drawing(result.request)
    one = choice.chosen_block(result)
    index = choice.picked(one) if one else None
    marked = (
        {(one.block, w): LETTERS[int(c)] for w, c in zip(one.weights, one.choice[index], strict=True)}
        if one is not None and index is not None
        else {}
    )

    def open_node() -> None:
        node = str(st.session_state["weights"].get("open") or "")
        run = weight_rows.run_of(drawing, node)
        shown = tuple(dict.fromkeys([*(state.value("open") or ()), run])) if run else state.value("open")
        if node:
            state.change(node=node, open=shown)
            st.session_state["to_fold"] = True

    table = weight_rows.table(plan, result.coarse, drawing, state.value("node"), marked)
    components.weights(table, key="weights", on_open=open_node)


def page() -> None:
    """The page."""
    if st.session_state.pop("to_fold", False):
        st.switch_page(FOLD)
    result = frame.open_page("plans")
    plans = state.plan_ids(result.plans)
    chosen, plan = state.chosen(plans)
    shown = choice.current().plans(plans)
    choice.filters(plans, shown)
    with st.container(key="wide"):
        left, right = st.columns(2, gap="large")
        with left:
            choice.plans_chart(result, plans, shown, chosen)
        with right:
            choice.candidates(result, plan, next((p for p in plans.values() if p.method == REFERENCE), None))
    choice.plans_table(plans, shown, chosen)
    choice.ties(plans)
    choice.dropped(result)
    with st.expander("What if …", expanded=bool(state.value("whatif"))):
        whatif_panel.panel(result, plan)
    st.markdown(f"### {frame.text(words.title(plan))}")
    frame.follower("Chosen plan", list(plans), "plan", chosen, lambda n: frame.option(plans[n]), help=glossary.PLAN_WORDS)
    choice.pinned(plans, chosen)
    st.markdown(f"{frame.text(words.describe(plan))}.")
    for note in plan.notes:
        st.caption(frame.text(note))
    opened.opened(result, plan)
    count = sum(len(b.params) for b in plan.blocks.values())
    with st.expander(f"Placement of every weight ({count} patterns)", expanded=True):
        weights(result, plan)
    with st.expander("Change a placement by hand", expanded=bool(state.value("edit"))):
        edit_panel.panel(result, plans, chosen)
    regions_panel.panel(result)


page()
