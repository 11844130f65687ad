"""A form of settings: fields that show what stands, edited as many as one likes, and taken together by one button."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from explorer.address.amounts import Unreadable
from explorer.session import state
from planner_core.core import PlannerError

Take = Callable[[Any], dict[str, Any]]
"""What a field's new value changes of the settings. It may raise `Unreadable`."""


class Form:
    """The fields of one form. Only what somebody edited is taken over: a field that still holds what it showed changes nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._shown: list[tuple[str, Any, Take]] = []
        self._then: Callable[[dict[str, Any]], dict[str, Any]] = lambda new: new

    def __enter__(self) -> Form:
        # after any change of the settings every field begins anew, from what then stands
        self._form = st.form(f"form_{self.name}~{state.version()}", border=False)
        self._form.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None:
            st.form_submit_button(
                "Plan", type="primary", on_click=self._take, key=f"plan_{self.name}~{state.version()}"
            )
            if problem := st.session_state.get(f"problem_{self.name}"):
                st.warning(problem)
        self._form.__exit__(*raised)

    def _key(self, field: str, value: Any, take: Take | None) -> str:
        key = f"f_{field}~{state.version()}"
        self._shown.append((key, value, take or (lambda new: {field: new})))
        return key

    def pick(
        self,
        label: str,
        field: str,
        value: Any,
        options: Sequence[Any],
        names: Callable[[Any], str],
        help: str | None = None,
    ) -> None:
        """A choice of one."""
        known = list(options) if value in options else [value, *options]
        st.selectbox(
            label, known, index=known.index(value), format_func=names, key=self._key(field, value, None), help=help
        )

    def whole(
        self, label: str, field: str, value: int | None, most: int, *, empty: str | None = None, help: str | None = None
    ) -> None:
        """A whole number from 1."""
        key = self._key(field, value, None)
        st.number_input(label, 1, most, value=value, step=1, key=key, placeholder=empty, help=help)

    def amount(
        self,
        label: str,
        field: str,
        value: float | None,
        take: Take | None = None,
        *,
        empty: str | None = None,
        help: str | None = None,
    ) -> None:
        """A positive number with three figures; one that was only rounded for showing is not an edit."""
        near = None if value is None else float(f"{value:.3g}")
        key = self._key(field, near, take)
        st.number_input(
            label,
            min_value=0.001,
            max_value=999_999.0,
            value=near,
            key=key,
            placeholder=empty,
            format="%.4g",
            help=help,
        )

    def line(
        self, label: str, field: str, value: str, take: Take, *, empty: str | None = None, help: str | None = None
    ) -> None:
        """A line of text."""
        st.text_input(label, value, key=self._key(field, value, take), placeholder=empty, help=help)

    def then(self, settle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """What follows from all edits together."""
        self._then = settle

    def _take(self) -> None:
        st.session_state.pop(f"problem_{self.name}", None)
        new: dict[str, Any] = {}
        try:
            for key, value, take in self._shown:
                if (given := st.session_state[key]) != value:
                    new.update(take(given))
        except (Unreadable, PlannerError) as why:
            st.session_state[f"problem_{self.name}"] = state.page_wording(str(why))
            return
        state.change(**self._then(new))
