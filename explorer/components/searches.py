"""The searches that go on while the first answer is read: less memory, pipeline stages, the proof of the best plan."""

from __future__ import annotations

import streamlit as st

from explorer.session import less_memory, pipeline_plan, proof, state
from planner_core.planning import Result


def show_searches(result: Result) -> None:
    """Start what is still to be searched, and draw a line for it; a page shows the answer as soon as there is one.

    Not on Compare: a page that is drawn anew closes the list from which a reader is choosing.
    """
    if less_memory.is_pending() or pipeline_plan.is_pending() or proof.is_pending(result):
        _follow(result)


@st.fragment(run_every=1.0)
def _follow(result: Result) -> None:
    """Draw a line for the search in the background; once it has an answer, the page shows it."""
    known = state.known_result(state.current_request())
    if known and known.reasons.keys() != result.reasons.keys():
        state.rerun_page()
    elif less_memory.is_pending():
        job, line = less_memory.start_search(), "Looking for less memory …"
    elif pipeline_plan.is_pending():
        job, line = pipeline_plan.start_search(), "Looking at pipeline stages …"
    elif proof.is_pending(result):
        job, line = proof.start(result), "Proving the best plan …"
    else:
        state.rerun_page()
    if not job.done:
        st.caption(line)
