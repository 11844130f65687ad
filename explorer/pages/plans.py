"""Plans: what are my choices? All plans by communication and memory, the chosen one weight by weight."""

from __future__ import annotations

import streamlit as st

from explorer.analysis.filters import REFERENCE
from explorer.components import frame, opened
from explorer.components.plans import (
    candidates,
    changes,
    choice,
    edit_panel,
    first_picture,
    methods_panel,
    regions_panel,
    sweep_panel,
    whatif_panel,
)
from explorer.session import state, stated
from explorer.text import glossary, words

FOLD = "explorer/pages/fold.py"


def page() -> None:
    """The page."""
    if st.session_state.pop("to_fold", False):
        st.switch_page(FOLD)
    result = frame.open_page("plans")
    first_picture.begin()
    plans = stated.plans(result)
    chosen, plan = state.chosen(plans)
    shown = choice.current().plans(plans)
    choice.filters(plans, shown)
    differing = changes.found(result, plans, chosen)
    with st.container(key="wide"):
        left, right = st.columns(2, gap="large")
        with left:
            choice.plans_chart(result, plans, shown, chosen, candidates.alike(result, plans))
            changes.line(result, plans, chosen, differing)
        with right:
            among = [shown[n] for n in state.value("among") if n in shown]
            candidates.section(result, plan, next((p for p in plans.values() if p.method == REFERENCE), None), among)
    choice.plans_table(result, plans, shown, chosen)
    choice.ties(plans)
    frame.how_sure()
    candidates.dropped(result)
    with st.expander("What if …", expanded=bool(state.value("whatif"))):
        whatif_panel.panel(result, plan)
    st.markdown(f"### {frame.text(words.title(plan))}")
    frame.follower(
        "Chosen plan", list(plans), "plan", chosen, lambda n: frame.option(plans[n]), help=glossary.PLAN_WORDS
    )
    choice.pinned(plans, chosen)
    st.markdown(f"{frame.text(words.describe(plan))}.")
    for note in plan.notes:
        st.caption(frame.text(state.in_words(note)))
    opened.opened(stated.home(chosen, result), plan)
    count = sum(len(b.params) for b in plan.blocks.values())
    with st.expander(f"Placement of every weight ({count} patterns)", expanded=True):
        changes.weights(result, plans, chosen, differing)
    with st.expander("Change a placement by hand", expanded=bool(state.value("edit"))):
        # What is run now was not found by the search, and edits start from a plan that was.
        searched = state.plan_ids(result.plans)
        edit_panel.panel(result, searched, chosen if chosen in searched else next(iter(searched)))
    first_picture.rest()
    methods_panel.panel(result)
    regions_panel.panel(result)
    sweep_panel.panel(result)  # last: it takes long, and nothing waits for it


page()
