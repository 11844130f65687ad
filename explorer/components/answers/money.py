"""Tokens to train on and the price of a GPU hour: the control that sets them, and what all tokens take at a plan's speed."""

from __future__ import annotations

import streamlit as st

from explorer.address.settings import Unreadable, tokens_of, tokens_text
from explorer.components import frame
from explorer.session import state
from planner_core.planning.pricing import Budget


def budget() -> Budget | None:
    """The tokens to train on and the price of a GPU hour, where the address says them."""
    tokens = state.value("tokens")
    return None if tokens is None else Budget(tokens, state.value("price"))


def control() -> None:
    """The control that sets them."""
    with st.popover("Set tokens and price" if budget() is None else "Change tokens and price", type="tertiary"):
        _fields()


def _fields() -> None:
    tokens = state.value("tokens")
    widget = state.seed("w_tokens", "" if tokens is None else tokens_text(tokens))
    st.text_input(
        "Tokens to train on", key=widget, placeholder="such as 15T or 300B",
        on_change=lambda: _take_tokens(st.session_state[widget]),
    )  # fmt: skip
    if problem := st.session_state.pop("tokens_problem", ""):
        st.warning(problem)
    price = state.seed("w_price", state.value("price"))
    st.number_input(
        "Price of a GPU hour, in any currency", min_value=0.001, max_value=999_999.0, value=None, key=price,
        placeholder="such as 2", on_change=state.from_widget, args=("price", price),
    )  # fmt: skip


def _take_tokens(text: str) -> None:
    try:
        state.change(tokens=tokens_of(text) if text.strip() else None)
    except Unreadable as why:
        st.session_state["tokens_problem"] = f"“{frame.text(text[:40])}” {why}."
