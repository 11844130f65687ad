"""Plans: every plan of the search, of every method and of the usual layouts; behind a tab every candidate of a block."""

from __future__ import annotations

import streamlit as st

from explorer.address import settings
from explorer.analysis.filters import REFERENCE
from explorer.components import comparing, frame, opened
from explorer.components.plans import candidates, choice, edit_panel, methods_panel
from explorer.session import state, stated
from explorer.text import recipe, units
from planner_core.core import Plan
from planner_core.planning import Result


def page() -> None:
    """The page."""
    result = frame.open_page("plans")
    found = methods_panel.found()
    plans = {**stated.beside(state.with_pinned(state.plan_ids(result.plans)), result), **found}
    widget = state.shown("w_tab", state.value("tab"))
    st.segmented_control(
        "Part of the page",
        list(settings.TABS),
        default=state.value("tab"),
        format_func=lambda t: settings.TABS[t],
        key=widget,
        required=True,
        label_visibility="collapsed",
        on_change=state.from_widget,
        args=("tab", widget),
    )
    chosen, plan = state.chosen(plans, result)
    if state.value("tab") == "block":
        candidates.section(result, plan, next((p for p in plans.values() if p.method == REFERENCE), None))
        candidates.dropped(result)
    elif state.value("tab") == "weight":
        # What is run now was not found by the search, and edits start from a plan that was.
        searched = state.plan_ids(result.plans)
        edit_panel.panel(result, searched, chosen if chosen in searched else next(iter(searched)))
    else:
        _every(result, plans, chosen, plan)
    methods_panel.rest()


def _every(result: Result, plans: dict[str, Plan], chosen: str, plan: Plan) -> None:
    """The chart, the table, and the chosen plan in full."""
    shown = choice.current().plans(plans)
    with st.container(key="wide"):
        left, right = st.columns([3, 4], gap="medium")
    with left:
        choice.plans_chart(result, plans, shown, chosen)
    with right:
        methods_panel.panel(result)
        choice.plans_table(result, plans, shown, chosen)
        choice.filters(plans, shown)
    st.markdown(f"### {frame.text(recipe.short(plan))}")
    st.markdown(f"{frame.text(recipe.recipe(plan))}. {units.seconds(plan.cost.step_time_s)} a step.")
    for note in plan.notes:
        st.caption(frame.text(state.in_words(note)))
    choice.pinned(plans, chosen)
    opened.opened(stated.home(chosen, result), plan)
    with st.expander("How every weight lies", key="every_weight", on_change="rerun") as box:
        if box.open:
            comparing.weights({chosen: plan}, {chosen: stated.home(chosen, result)})


page()
