"""Compare: why is this one better? Two to four plans side by side."""

from __future__ import annotations

import streamlit as st

from explorer.address import pins, settings
from explorer.analysis import answer
from explorer.components import comparing, frame, opened, report, step_in_time
from explorer.session import state, stated
from explorer.text import glossary, words
from planner_core.core import Plan
from planner_core.planning import Result
from planner_core.planning.pricing import band_of


def chosen_plans(plans: dict[str, Plan], result: Result) -> dict[str, Plan]:
    """The plans in the address, else the chosen one beside its strongest rival or what there is."""
    asked = list(dict.fromkeys(n for n in state.value("compare") if n in plans))
    frame.absent(
        "plan", [n for n in state.value("compare") if pins.MARK not in n], list(plans)
    )  # of pins `with_pinned` tells
    if len(asked) < 2:
        first = asked[0] if asked else state.chosen(plans, result)[0]
        asked = [first, *(answer.rivals(plans, first) or [n for n in plans if n != first])[:1]]
    return {n: plans[n] for n in asked[: settings.MAX_COMPARED]}


def choose(plans: dict[str, Plan], current: dict[str, Plan]) -> None:
    """The control: two to four plans."""
    now = list(current)
    widget = state.shown("w_compare", now)
    st.multiselect(
        "Plans",
        list(plans),
        default=now,
        format_func=lambda n: frame.option(plans[n]),
        key=widget,
        max_selections=settings.MAX_COMPARED,
        help=glossary.PLAN_WORDS,
        label_visibility="collapsed",
        on_change=lambda: state.change(compare=tuple(st.session_state[widget])),
    )


def page() -> None:
    """The page."""
    result = frame.open_page("compare")
    plans = stated.beside(state.with_pinned(state.plan_ids(result.plans)), result)
    if len(plans) < 2:
        st.info("Only one plan suits these settings. Try another cluster, mesh or batch.")
        return
    current = chosen_plans(plans, result)
    names = list(current)
    against = answer.fastest(current, names[0])
    homes = {n: stated.home(n, result) for n in current}
    with st.container(key="labelled_plans"):
        choose(plans, current)
    st.markdown(frame.text(words.headline(current[names[0]], current[against])))
    step_in_time.step(current, homes)
    comparing.why(current, homes, against)
    comparing.speeds(current, homes)
    comparing.memory_and_traffic(current, homes)
    comparing.who_to_whom(current)
    comparing.weights(current, homes)
    opened.elsewhere(current, homes)
    comparing.restrictions(result)
    report.download(current, homes)
    bands = [band_of(p, homes[n].cluster) for n, p in current.items()]
    frame.how_sure(of_kind=tuple(dict.fromkeys(frame.slug(b.kind) for b in bands if not b.why)))


page()
