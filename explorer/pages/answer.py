"""Answer: what should I run? The recommendation for the model and the cluster of the sentence, in one screen."""

from __future__ import annotations

import streamlit as st

from explorer.address import settings
from explorer.components import frame
from explorer.components.answers import answer, machines, ways_out, why
from explorer.components.plans import sweep_panel
from explorer.session import state
from planner_core.planning.analysis import choice

FOLD = "explorer/pages/fold.py"


def page() -> None:
    """The page."""
    if "values" not in st.session_state and set(st.query_params) & set(settings.GRAPH_KEYS):
        st.switch_page(FOLD, query_params=st.query_params.to_dict())
    if to := st.session_state.pop("turn_to", ""):
        st.switch_page(to)
    result = frame.open_page(state.ANSWER, head=answer.purpose, short=ways_out.short)
    plans = state.plan_ids(result.plans)
    if not result.best.fits:
        ways_out.panel(result)
        return
    found = choice(result)
    run, fastest = (next(n for n, p in plans.items() if p.name == name) for name in (found.recommended, found.fastest))
    answer.recommendation(plans, run, fastest)
    answer.figures(result, plans, run)
    with st.container(key="wide"):
        left, right = st.columns([7, 3], gap="large")
    with left:
        why.why(result, plans, run, fastest)
    with right:
        answer.sure(result, plans, run, found)
    machines.panel(result)
    sweep_panel.panel(result)  # last: it takes long, and nothing waits for it


page()
