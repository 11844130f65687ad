"""Shardscope's explorer: the server's page, page config and navigation, nothing else.

`streamlit run` finds `app` in this file and imports it once, to serve; for each view it runs the same file as a script.
"""

from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from streamlit.starlette import App

from explorer.static.first_paint import FirstPaint, markup

FIRST = "answer"
PAGES = (
    (FIRST, "What should I run? The recommendation, what it takes, and why it wins."),
    ("fold", "What repeats? The model's graph, folded into its few unique blocks."),
    ("plans", "What are my choices? Every plan by communication and memory."),
    ("compare", "Why is this one better? Two to four plans side by side."),
    ("topology", "What does my network do to it? The plan's traffic on the cluster's links."),
    ("measured", "How far are predictions off? Published runs, predicted against measured."),
    ("learn", "How does it work? Parallel training in short lessons."),
    ("export", "How do I train with it? The plan as JSON and as a script that runs."),
)


def view() -> None:
    """One view of a page."""
    st.set_page_config(page_title="Shardscope", page_icon="explorer/static/icon.svg", layout="wide")
    st.navigation(
        [
            st.Page(
                f"explorer/pages/{name}.py",
                title=name.title(),
                help=text,
                default=name == FIRST,
                url_path="" if name == FIRST else name,
            )
            for name, text in PAGES
        ]
        + [st.Page("explorer/pages/teacher.py", title="For teachers", visibility="hidden")],
        position="top",
    ).run()


if __name__ == "__main__":
    view()
else:
    scripts = Path(st.__file__).parent / "static" / "static" / "js"
    app = App(__file__, middleware=[Middleware(FirstPaint, added=markup(scripts))])
