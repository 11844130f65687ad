"""What if: the best plan for another batch, cluster, link or number of GPUs, one change at a time or swept."""

from __future__ import annotations

import html

import streamlit as st

from explorer.analysis.shortlist import nearly_equal
from explorer.components import frame
from explorer.components.plans import sweep_panel, whatif_panel
from explorer.text import recipe, units
from planner_core.core import Plan
from planner_core.planning import Result
from planner_core.planning.analysis import SCENARIOS, plan_regrets


def page() -> None:
    """Draw the page."""
    result = frame.open_page("whatif")
    st.markdown(f"**One change**, against the best plan now: {frame.escape(recipe.layout_name(result.searched))}")
    whatif_panel.show_what_if(result)
    st.markdown("**A sweep**: the best plan for each value of")
    sweep_panel.show_sweep(result)
    st.markdown("**A machine worse than assumed**: what each plan loses there on the best one")
    _regret(result)


def _regret(result: Result) -> None:
    """Draw the step of each plan that fits under slower links, latency, or less that is hidden."""
    plans = {p.name: p for p in result.plans}
    rows = []
    shown: list[Plan] = []
    for row_of in plan_regrets(result):
        if any(nearly_equal(plans[row_of.name], p) for p in shown):
            continue
        shown.append(plans[row_of.name])
        cells = [_lost(t, x) for t, x in zip(row_of.step_time_s, row_of.lost, strict=True)]
        rows.append([html.escape(recipe.layout_name(plans[row_of.name])), *cells])
    frame.show_table(["plan", *(s.title for s in SCENARIOS)], rows, "steps if the machine is worse than assumed")


def _lost(step_s: float, share: float) -> str:
    """Write what a plan loses on the best one, of which the step itself stands there."""
    step = units.seconds(step_s)
    return f"<span title='{step}'>+{units.percent(share)}</span>" if share >= 0.0005 else f"<b>{step}</b>"


page()
