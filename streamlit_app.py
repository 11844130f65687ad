"""Shardscope's explorer: page config and navigation, nothing else."""

import streamlit as st

st.set_page_config(page_title="Shardscope", page_icon="explorer/components/icon.svg", layout="wide")

# Learn goes between Topology and Export.
st.navigation(
    [
        st.Page("explorer/pages/fold.py", title="Fold", default=True, help="What repeats? The model's graph, folded into its few unique blocks."),
        st.Page("explorer/pages/plans.py", title="Plans", help="What are my choices? Every plan by communication and memory."),
        st.Page("explorer/pages/compare.py", title="Compare", help="Why is this one better? Two to four plans side by side."),
        st.Page("explorer/pages/topology.py", title="Topology", help="What does my network do to it? The plan's traffic on the cluster's links."),
        st.Page("explorer/pages/export.py", title="Export", help="How do I train with it? The plan as JSON and as a script that runs."),
    ],
    position="top",
).run()
