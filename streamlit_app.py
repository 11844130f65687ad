"""Shardscope's explorer: page config and navigation, nothing else."""

import time

import streamlit as st

from explorer.static import style_file

STYLES = ("app", "answer", "learn")
SETTLE_S = 0.15
st.set_page_config(page_title="Shardscope", page_icon="explorer/static/icon.svg", layout="wide")
for name in STYLES:
    st.html(style_file(name))
# Streamlit applies these styles a moment after what follows them is drawn. The page waits once a visit, so that nothing is drawn without
# them: the layout shift is 0.02 and not 0.6 (python -m bench.pages shift). No configuration of Streamlit's loads a style sheet before.
if "styled" not in st.session_state:
    st.session_state["styled"] = True
    time.sleep(SETTLE_S)

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
