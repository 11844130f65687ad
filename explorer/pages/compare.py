"""Compare: why is this one better? Two to four plans side by side."""

from __future__ import annotations

import streamlit as st

from explorer.address import pins, settings
from explorer.analysis import step_parts
from explorer.analysis.shortlist import choose_opponent
from explorer.components import comparing, frame, plan_numbers, step_in_time
from explorer.components.overview import table
from explorer.components.plans import methods_panel
from explorer.session import current_plans, current_setup, state
from explorer.text import glossary, words
from planner_core.core import Plan
from planner_core.planning import Result, plan_ids
from planner_core.planning.pricing import time_band


def choose_plans(plans: dict[str, Plan], result: Result) -> dict[str, Plan]:
    """Draw the list of plans; return those in the address, else the chosen one and what the first page measures it against."""
    requested = list(dict.fromkeys(n for n in state.value("compare") if n in plans))
    # `with_pinned` warns of the pins that it does not know.
    frame.warn_missing("plan", [n for n in state.value("compare") if pins.SEPARATOR not in n], list(plans))
    if len(requested) < 2:
        first = requested[0] if requested else current_plans.chosen_plan(plans, result)[0]
        other = choose_opponent(plans, table.list_plans(result, plans, first), first) or next(
            n for n in plans if n != first
        )
        requested = [first, other]
    current = requested[: settings.MAX_COMPARED]
    widget = state.widget_key("w_compare", current)
    with st.container(key="labelled_plans"):
        st.multiselect(
            "Plans",
            list(plans),
            default=current,
            format_func=lambda n: frame.plan_option(plans[n]),
            key=widget,
            max_selections=settings.MAX_COMPARED,
            select_all=False,  # it takes the first four of the list, whatever they are
            help=glossary.PLAN_WORDS,
            label_visibility="collapsed",
            on_change=lambda: state.change(compare=tuple(st.session_state[widget])),
        )
    return {n: plans[n] for n in current}


def page() -> None:
    """Draw the page."""
    result = frame.open_page("compare")
    plans = current_setup.with_extra_plans(current_plans.with_pinned(plan_ids(result.plans)), result)
    plans = {**plans, **methods_panel.known_plans()}
    if len(plans) < 2:
        st.info("Only one plan suits these settings. Try another cluster, mesh or batch.")
        return
    current = choose_plans(plans, result)
    first = next(iter(current))
    against = step_parts.fastest_other(current, first)
    homes = {n: current_setup.result_of(n, result) for n in current}
    st.markdown(frame.escape(words.compare_steps(current[first], current[against])))
    step_in_time.show_steps(current, homes)
    comparing.show_step_parts(current, homes, against)
    comparing.show_memory_and_traffic(current, homes)
    comparing.show_links(current)
    comparing.show_weights(current, homes)
    plan_numbers.show_numbers(current, homes)
    comparing.show_restrictions(result)
    bands = [time_band(p, homes[n].cluster) for n, p in current.items()]
    frame.link_to_measured(b.kind for b in bands if not b.why)


page()
