"""Shardscope's explorer: the server's page, page config and navigation, nothing else.

`streamlit run` finds `app` in this file and imports it once, to serve; for each view it runs the same file as a script.
"""

from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from streamlit.starlette import App

from explorer.jobs.export import WORKERS
from explorer.static.first_paint import FirstPaint

FIRST = "overview"
PAGES = (
    (FIRST, "Overview", "The folded model, and the plans for it"),
    ("plans", "Plans", "Every method and layout, and every candidate of a block"),
    ("compare", "Compare", "Two to four plans in time, memory and traffic"),
    ("whatif", "What if", "Another batch, cluster, link or number of GPUs"),
    ("measured", "Measured", "Published runs, predicted against measured"),
    ("learn", "Learn", "Parallel training in short lessons"),
)


def view() -> None:
    """One view of a page."""
    st.set_page_config(page_title="Shardscope", page_icon="explorer/static/icon.svg", layout="wide")
    if scheme := st.context.theme.type:  # dialogs and lists lie outside of the element to which Streamlit gives it
        st.html(f"<style>:root {{ color-scheme: {scheme}; }}</style>")
    st.logo("explorer/static/wordmark.svg", size="large")
    st.navigation(
        [
            st.Page(
                f"explorer/pages/{name}.py",
                title=title,
                help=text,
                default=name == FIRST,
                url_path="" if name == FIRST else name,
            )
            for name, title, text in PAGES
        ]
        # the name in the menu, as a reader may type it
        + [st.Page("explorer/pages/to_whatif.py", title="what-if", url_path="what-if", visibility="hidden")],
        position="top",
    ).run()


if __name__ == "__main__":
    view()
else:
    scripts = Path(st.__file__).parent / "static" / "static" / "js"
    WORKERS.start()
    app = App(__file__, middleware=[Middleware(FirstPaint, scripts=scripts)])
