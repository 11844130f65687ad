"""The picture of a lesson's step, drawn in the browser; the markup comes finished from `explorer.learn`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

HERE = Path(__file__).resolve().parent


def _register() -> Any:
    css, js = ((HERE / name).read_text(encoding="utf-8") for name in ("lesson.css", "lesson.js"))
    return st.components.v2.component("shardscope_lesson", html='<div class="lesson"></div>\n', css=css, js=js)


_PICTURE = _register()


def picture(markup: str, *, key: str) -> None:
    """Draw SVG or a table. All text in it was escaped where it was made."""
    _PICTURE(key=key, data={"picture": markup})
