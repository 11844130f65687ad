"""The button that downloads the report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import streamlit as st

from explorer.analysis.step_parts import memory_limit_bytes
from explorer.components import frame
from explorer.figures import report_page
from explorer.session import state
from planner_core.core import Plan
from planner_core.planning import Result


def offer_report(shown: Mapping[str, Plan], homes: Mapping[str, Result]) -> None:
    """Offer the report of these plans, made when the button is pressed; the first plan is what it is about."""
    st.markdown(
        "**Report**",
        help="One HTML file: plans, step in time, memory, traffic, placements, assumptions and the command that makes it "
        "again. It needs no network and prints on paper.",
    )
    budget = state.training_budget()  # read now: when the button is pressed there is no session to read
    frame.offer_file(
        "Download report",
        lambda: report_page.build_report(
            shown,
            homes[next(iter(shown))],
            datetime.now().astimezone(),
            {n: homes[n].graph for n in shown},
            {n: memory_limit_bytes(homes[n]) for n in shown},
            budget,
        ),
        report_page.file_name(shown),
        "download_report",
        mime="text/html",
        icon=":material/description:",
    )
