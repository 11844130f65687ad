"""Plans: every plan of the search, of every method and the baselines; behind a tab every candidate of a block."""

from __future__ import annotations

import streamlit as st

from explorer.address import settings
from explorer.components import comparing, frame, plan_numbers, searches
from explorer.components.overview import table
from explorer.components.plans import candidates, choice, edit_panel, methods_panel
from explorer.session import current_plans, current_setup, state
from explorer.text import recipe, spending, words
from explorer.text.option_words import page_wording
from planner_core.core import Plan
from planner_core.planning import Result, plan_ids


def page() -> None:
    """Draw the page."""
    result = frame.open_page("plans")
    searched = plan_ids(result.plans)
    plans = {
        **current_setup.with_extra_plans(current_plans.with_pinned(searched), result),
        **methods_panel.known_plans(),
    }
    frame.choose_one("Part of the page", "tab", settings.TABS, label_visibility="collapsed")
    chosen, plan = current_plans.chosen_plan(plans, result)
    if state.value("tab") == "block":
        candidates.show_candidates(result, plan)
        candidates.describe_dropped(result)
    elif state.value("tab") == "weight":
        # What is run now was not found by the search, and edits start from a plan that was.
        edit_panel.show_edits(result, searched, chosen if chosen in searched else next(iter(searched)))
    else:
        _show_plans(result, plans, chosen, plan)
    methods_panel.plan_next()


def _show_plans(result: Result, plans: dict[str, Plan], chosen: str, plan: Plan) -> None:
    """Draw the chart, the table, and the chosen plan in full."""
    with st.container(key="wide"):
        left, right = st.columns([2, 3], gap="medium")
    with left:
        choice.show_plans_chart(result, plans, chosen)
    with right:
        methods_panel.show_methods(plans)
        choice.show_plans_table(result, plans, chosen)
        if methods_panel.is_searching():
            state.cancel_jobs()  # both at once end late: the searches behind the answer begin anew once the methods stand
        else:
            searches.show_searches(result)
    st.markdown(f"### {frame.escape(recipe.layout_name(plan))}")
    home = current_setup.result_of(chosen, result)
    speed = spending.describe_speed(plan, table.speed_of(plan, home), state.training_budget(), home.cluster.num_gpus)
    st.markdown(frame.escape(f"{words.capitalize(recipe.describe_below_name(plan))}. {speed}."))
    for note in plan.notes:
        st.caption(frame.escape(page_wording(note)))
    choice.show_pins(plans, chosen)
    homes = {chosen: home}
    plan_numbers.show_numbers({chosen: plan}, homes)
    comparing.show_weights({chosen: plan}, homes)


page()
