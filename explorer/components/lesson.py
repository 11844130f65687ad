"""The picture of a lesson's step, drawn in the browser (the markup comes finished from `explorer.learn`), and the rail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from explorer.static import script, style


def _register() -> Any:
    css, js = style("lesson"), script("lesson")
    return st.components.v2.component("shardscope_lesson", html='<div class="lesson"></div>\n', css=css, js=js)


def _register_rail() -> Any:
    css, js = style("rail"), script("rail")
    return st.components.v2.component("shardscope_rail", html='<nav aria-label="Lessons"></nav>\n', css=css, js=js)


_PICTURE = _register()
_RAIL = _register_rail()


def picture(markup: str, *, num_answers: int, key: str, on_set: Callable[[], None]) -> None:
    """Draw SVG or a table. All text in it was escaped where it was made.

    When `num_answers` rises, the focus goes to the reply (`.st-key-reply`). What the learner places in the picture, options by control,
    stands at `st.session_state[key]["set"]` when `on_set` is called.
    """
    _PICTURE(key=key, data={"picture": markup, "numAnswers": num_answers}, on_set_change=on_set)


def lesson_links(links: Sequence[dict[str, Any]], *, forgotten: int, key: str, on_go: Callable[[], None]) -> None:
    """Draw links to all lessons, each {"number", "key", "title", "query", "state", "done", "answer"}; state is "here", "done" or "new".

    A click puts the number at `st.session_state[key]["go"]` and calls `on_go`. The browser keeps what is done and answered in a cookie, and
    forgets it when `forgotten` changes.
    """
    _RAIL(key=key, data={"lessons": list(links), "forgotten": forgotten}, on_go_change=on_go)
