"""Shardscope's explorer: page config and navigation, nothing else."""

import streamlit as st

st.set_page_config(page_title="Shardscope", page_icon="explorer/static/icon.svg", layout="wide")

PAGES = (
    ("fold", "What repeats? The model's graph, folded into its few unique blocks."),
    ("plans", "What are my choices? Every plan by communication and memory."),
    ("compare", "Why is this one better? Two to four plans side by side."),
    ("topology", "What does my network do to it? The plan's traffic on the cluster's links."),
    ("learn", "How does it work? Parallel training in seventeen short lessons."),
    ("export", "How do I train with it? The plan as JSON and as a script that runs."),
)

st.navigation(
    [
        st.Page(
            f"explorer/pages/{name}.py",
            title=name.title(),
            help=text,
            default=name == "fold",
            url_path="" if name == "fold" else name,
        )
        for name, text in PAGES
    ]
    + [
        st.Page("explorer/pages/teacher.py", title="For teachers", visibility="hidden"),
        # Also reachable as /fold. No redirect to "/": it would break the Back button.
        st.Page("explorer/pages/fold.py", title="Fold", url_path="fold", visibility="hidden"),
    ],
    position="top",
).run()
