"""A page that a background search runs again keeps what was chosen meanwhile."""

from __future__ import annotations

from tests.support.app_test import AppTest


def _choose_just_as_a_search_ends() -> None:
    import streamlit as st

    from explorer.session import state

    state.begin_page("overview")
    if not st.session_state.get("searched"):
        st.session_state["searched"] = True
        state.change(plan="fsdp")
        state.sync_address()
        del st.query_params["plan"]  # the browser has not heard of it yet
        state.rerun_page()
    st.text(state.value("plan"))


def test_a_plan_chosen_just_as_a_search_ends_stays_chosen() -> None:
    at = AppTest.from_function(_choose_just_as_a_search_ends).run()
    assert not at.exception and [t.value for t in at.text] == ["fsdp"]
    assert at.query_params["plan"] == "fsdp"
