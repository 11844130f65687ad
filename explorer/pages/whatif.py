"""What if: the best plan for another batch, cluster, link or number of GPUs, as changed by hand, swept, or worse than assumed."""

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

LEFT_OUT_NOTE = (
    "Sweep and “On a worse machine” are of the settings above: “Plan with these” or “Back to the settings” shows them."
)

# A plan that loses more on every machine is not listed. (A string here would be shown on the page.)
MAX_LISTED_LOSS = 0.03


def page() -> None:
    """Draw the page."""
    result = frame.open_page("whatif")
    whatif_panel.show_what_if(result)
    # What is below is of the sentence's settings: beside a plan for changed ones it would be read as theirs.
    if not whatif_panel.current_changes():
        sweep_panel.show_sweep(result)
        _show_regrets(result)
    else:
        st.caption(LEFT_OUT_NOTE)


def _show_regrets(result: Result) -> None:
    """Draw the steps under slower links, latency, or less that is hidden, of the recommended plan and those that nearly win somewhere."""
    st.markdown("**On a worse machine**: the best step there, and what other plans lose on it")
    plans = {p.name: p for p in result.plans}
    rows = []
    shown: list[Plan] = []
    for row_of in plan_regrets(result):
        plan = plans[row_of.name]
        wins = min(row_of.lost) < MAX_LISTED_LOSS or row_of.name == result.choice.recommended
        if wins and not any(nearly_equal(plan, p) for p in shown):
            shown.append(plan)
            cells = [_lost(t, x) for t, x in zip(row_of.step_time_s, row_of.lost, strict=True)]
            rows.append([html.escape(recipe.layout_name(plan)), *cells])
    frame.show_table(["plan", *(s.title for s in SCENARIOS)], rows, "steps if the machine is worse than assumed")


def _lost(step_s: float, share: float) -> str:
    """Write what a plan loses on the best one, of which the step itself stands there."""
    step = units.seconds(step_s)
    return f"<span title='{step}'>+{units.percent(share)}</span>" if share >= 0.0005 else f"<b>{step}</b>"


page()
