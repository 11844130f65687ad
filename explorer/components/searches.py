"""The searches that go on while the first answer is read: less memory, pipeline stages, the proof of the best plan."""

from __future__ import annotations

import streamlit as st

from explorer.session import later_searches, shared_plans, state
from planner_core.planning import Result


def show_searches(result: Result) -> None:
    """Start what is still to be searched, and draw a line for it; a page shows the answer as soon as there is one.

    Not on Compare: a page that is drawn anew closes the list from which a reader is choosing.
    """
    if any(search.is_pending() for search in later_searches.SEARCHES):
        _follow(result)


@st.fragment(run_every=1.0)
def _follow(result: Result) -> None:
    """Draw a line for the search in the background; once it has an answer, the page shows it."""
    known = shared_plans.known_result(state.current_request())
    search = next((one for one in later_searches.SEARCHES if one.is_pending()), None)
    if search is None or (known and known.reasons.keys() != result.reasons.keys()):
        state.rerun_page()
    if not search.start().done:
        st.caption(search.line)
