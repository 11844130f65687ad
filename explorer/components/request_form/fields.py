"""A form of settings: fields that show the current values, edited in any number and applied together by one button."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from explorer.address import settings
from explorer.session import state
from explorer.text.option_words import page_wording
from planner_core.core import OPTIONS, PlannerError, Unreadable

Parse = Callable[[Any], dict[str, Any]]
"""Turns a field's new value into changed settings. It may raise `Unreadable`."""


def control_label(name: str) -> str:
    """Return the label of an option's control, by which refusals name it too."""
    control = OPTIONS[name].control
    return control[:1].upper() + control[1:]


class Form:
    """The fields of one form. Only edited fields are applied: a field that holds what it showed changes nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.notes: list[str] = []
        """What the parsers found besides; the page says it once the edit is made."""
        self._fields: list[tuple[str, Any, Parse]] = []
        self._complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda changes: changes

    def __enter__(self) -> Form:
        # The version in all keys: after any change of the settings, every field starts from the new value.
        self._form = st.form(f"form_{self.name}~{state.version()}", border=False)
        self._form.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None:
            key = f"plan_{self.name}~{state.version()}"
            st.form_submit_button("Plan", type="primary", on_click=self._apply, key=key)
            if problem := st.session_state.get(self._problem):
                st.warning(problem)
        self._form.__exit__(*raised)

    @property
    def _problem(self) -> str:
        """The key of the sentence why the edit was not made; with the version, so that it goes at the next one."""
        return f"problem_{self.name}~{state.version()}"

    def _key(self, field: str, value: Any, parse: Parse | None = None) -> str:
        """Register a field; return the key of its widget."""
        key = f"f_{field}~{state.version()}"
        self._fields.append((key, value, parse or (lambda new: {field: new})))
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
        """Draw a choice of one."""
        known = list(options) if value in options else [value, *options]
        st.selectbox(label, known, index=known.index(value), format_func=names, key=self._key(field, value), help=help)

    def option(self, name: str, names: Mapping[Any, str], value: Any) -> None:
        """Draw a choice of one for an option of the planner: its label and its hover are those of the table of options."""
        # a link may hold a value that is none of them, such as a mesh of other GPUs: the planner refuses it, and it is shown as it is
        shown = {value: str(value), **names}
        self.pick(control_label(name), name, value, list(names), lambda one: shown[one], OPTIONS[name].hover or None)

    def whole(self, field: str, value: int | None, *, label: str = "", empty: str | None = None) -> None:
        """Draw a field for a whole number from 1 to what the address allows; without a label it is that of the option."""
        option = OPTIONS.get(field)
        label = label or control_label(field)
        help = option.hover or None if option else None
        key = self._key(field, value)
        st.number_input(label, 1, settings.MOST[field], value=value, step=1, key=key, placeholder=empty, help=help)

    def amount(
        self,
        label: str,
        field: str,
        value: float | None,
        parse: Parse | None = None,
        *,
        empty: str | None = None,
        help: str | None = None,
    ) -> None:
        """Draw a field for a positive number; it shows three figures, and rounding alone is not an edit."""
        shown = None if value is None else float(f"{value:.3g}")
        st.number_input(
            label,
            min_value=0.001,
            max_value=999_999.0,
            value=shown,
            key=self._key(field, shown, parse),
            placeholder=empty,
            format="%.4g",
            help=help,
        )

    def line(
        self, label: str, field: str, value: str, parse: Parse, *, empty: str | None = None, help: str | None = None
    ) -> None:
        """Draw a field for a line of text."""
        st.text_input(label, value, key=self._key(field, value, parse), placeholder=empty, help=help)

    def lines(self, label: str, field: str, parse: Parse, *, empty: str) -> None:
        """Draw a field for lines of text, which is empty at first."""
        st.text_area(label, "", height=80, key=self._key(field, "", parse), placeholder=empty)

    def file(
        self, label: str, field: str, types: Sequence[str], take: Callable[[str, bytes], dict[str, Any]], help: str
    ) -> None:
        """Draw a field for a file; `take` turns its name and content into changed settings, and may raise as a parser does."""
        key = self._key(field, None, lambda given: take(given.name, given.getvalue()))
        st.file_uploader(label, type=list(types), key=key, help=help)
        st.caption("A file is read when *Plan* is pressed.")

    def complete_with(self, complete: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Set what completes the changes of all fields together."""
        self._complete = complete

    def _apply(self) -> None:
        st.session_state.pop(self._problem, None)
        changes: dict[str, Any] = {}
        try:
            for key, shown, parse in self._fields:
                # A field that was not touched is no edit, even if its value stands for another one by now: the batch that nobody
                # set grows with the cluster, and must not be set to what it was.
                if (value := st.session_state[key]) != shown:
                    changes.update(parse(value))
        except (Unreadable, PlannerError) as error:
            st.session_state[self._problem] = page_wording(error)
            return
        state.change(**self._complete(changes))
        # below the sentence and not in the popover, which the edit has closed
        state.add_edit_notes(*self.notes)
