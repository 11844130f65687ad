"""Compare: why is this one better? Two to four plans side by side."""

from __future__ import annotations

import streamlit as st

from explorer.address import pins, settings
from explorer.analysis import step_parts
from explorer.components import comparing, frame, plan_numbers, report, step_in_time
from explorer.session import current_setup, state
from explorer.text import glossary, words
from planner_core.core import Plan
from planner_core.planning import Result
from planner_core.planning.pricing import time_band


def chosen_plans(plans: dict[str, Plan], result: Result) -> dict[str, Plan]:
    """The plans in the address, else the chosen one beside its strongest rival or what there is."""
    asked = list(dict.fromkeys(n for n in state.value("compare") if n in plans))
    frame.warn_missing(
        "plan", [n for n in state.value("compare") if pins.SEPARATOR not in n], list(plans)
    )  # of pins `with_pinned` tells
    if len(asked) < 2:
        first = asked[0] if asked else state.chosen_plan(plans, result)[0]
        asked = [first, *(step_parts.rank_rivals(plans, first) or [n for n in plans if n != first])[:1]]
    return {n: plans[n] for n in asked[: settings.MAX_COMPARED]}


def choose(plans: dict[str, Plan], current: dict[str, Plan]) -> None:
    """The control: two to four plans."""
    now = list(current)
    widget = state.widget_key("w_compare", now)
    st.multiselect(
        "Plans",
        list(plans),
        default=now,
        format_func=lambda n: frame.plan_option(plans[n]),
        key=widget,
        max_selections=settings.MAX_COMPARED,
        help=glossary.PLAN_WORDS,
        label_visibility="collapsed",
        on_change=lambda: state.change(compare=tuple(st.session_state[widget])),
    )


def page() -> None:
    """The page."""
    result = frame.open_page("compare")
    plans = current_setup.with_extra_plans(state.with_pinned(state.plan_ids(result.plans)), result)
    if len(plans) < 2:
        st.info("Only one plan suits these settings. Try another cluster, mesh or batch.")
        return
    current = chosen_plans(plans, result)
    names = list(current)
    against = step_parts.fastest_other(current, names[0])
    homes = {n: current_setup.result_of(n, result) for n in current}
    with st.container(key="labelled_plans"):
        choose(plans, current)
    st.markdown(frame.escape(words.compare_steps(current[names[0]], current[against])))
    step_in_time.show_steps(current, homes)
    comparing.explain(current, homes, against)
    comparing.show_speeds(current, homes)
    comparing.show_memory_and_traffic(current, homes)
    comparing.show_traffic_matrices(current)
    comparing.show_weights(current, homes)
    plan_numbers.show_numbers_of(current, homes)
    comparing.show_restrictions(result)
    report.offer_report(current, homes)
    bands = [time_band(p, homes[n].cluster) for n, p in current.items()]
    frame.link_to_measured(of_kind=tuple(dict.fromkeys(frame.slug(b.kind) for b in bands if not b.why)))


page()
