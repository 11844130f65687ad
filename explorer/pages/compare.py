"""Compare: why is this one better? Two to four plans side by side."""

from __future__ import annotations

import streamlit as st

from explorer.address import pins, settings
from explorer.analysis import answer
from explorer.components import comparing, frame, opened, report
from explorer.session import state, stated
from explorer.text import glossary, words
from planner_core.core import Plan


def chosen_plans(plans: dict[str, Plan]) -> dict[str, Plan]:
    """The plans in the address, else the chosen one beside its strongest rival or what there is."""
    asked = list(dict.fromkeys(n for n in state.value("compare") if n in plans))
    frame.absent(
        "plan", [n for n in state.value("compare") if pins.MARK not in n], list(plans)
    )  # of pins `with_pinned` tells
    if len(asked) < 2:
        first = asked[0] if asked else (state.value("plan") if state.value("plan") in plans else next(iter(plans)))
        asked = [first, *(answer.rivals(plans, first) or [n for n in plans if n != first])[:1]]
    return {n: plans[n] for n in asked[: settings.MAX_COMPARED]}


def choose(plans: dict[str, Plan], current: dict[str, Plan]) -> None:
    """The control: two to four plans."""
    widget = state.seed("w_compare", list(current))
    st.multiselect(
        "Plans",
        list(plans),
        format_func=lambda n: frame.option(plans[n]),
        key=widget,
        max_selections=settings.MAX_COMPARED,
        help=glossary.PLAN_WORDS,
        on_change=lambda: state.change(compare=tuple(st.session_state[widget])),
    )


def page() -> None:
    """The page."""
    result = frame.open_page("compare")
    plans = stated.beside(state.with_pinned(state.plan_ids(result.plans)), result)
    if len(plans) < 2:
        st.info(
            "Only one plan suits these settings, so there is nothing to compare it with. Try another cluster, mesh or batch."
        )
        return
    current = chosen_plans(plans)
    names = list(current)
    against = answer.fastest(current, names[0])
    st.markdown(f"### {frame.text(words.headline(current[names[0]], current[against]))}")
    homes = {n: stated.home(n, result) for n in current}
    comparing.why(current, homes, against)
    comparing.speeds(current, homes)
    with st.container(key="labelled_plans"):
        choose(plans, current)
    st.markdown(
        "  \n".join(f"**{frame.text(words.title(p))}**: {frame.text(words.describe(p))}." for p in current.values())
    )
    opened.elsewhere(current, homes)
    comparing.step(current, homes)
    comparing.memory_and_traffic(result, current, homes)
    comparing.who_to_whom(current)
    comparing.weights(current, homes)
    comparing.restrictions(result)
    report.download(current, homes)
    st.caption(
        "Times are estimates from published peaks and fitted rates; plans that their scatter does not tell apart are told as ties."
    )
    frame.how_sure()


page()
