"""Whole-model plans: their chart and table, and pins. The candidates of a block are in `candidates`."""

from __future__ import annotations

import streamlit as st

from explorer import components
from explorer.address import pins, settings, setups
from explorer.analysis import rows as table_rows
from explorer.analysis import step_parts
from explorer.analysis.shortlist import merge_equal
from explorer.components import frame
from explorer.components.overview import table
from explorer.components.plans import methods_panel
from explorer.figures import plans_chart
from explorer.session import current_plans, current_setup, state
from explorer.text import recipe, words
from planner_core.core import Plan
from planner_core.planning import Result

AXIS_NAMES = {"communication": "communication", "exposed": "exposed communication", "step": "step time"}
Plans = dict[str, Plan]


def show_plans_chart(result: Result, plans: Plans, chosen: str) -> None:
    """Draw whole-model plans; a click chooses one."""
    widget = state.widget_key("w_axis", state.value("axis"))
    st.selectbox(
        "Across",
        list(AXIS_NAMES),
        index=list(AXIS_NAMES).index(state.value("axis")),
        format_func=AXIS_NAMES.__getitem__,
        key=widget,
        width=230,
        on_change=state.take_widget_value,
        args=("axis", widget),
        label_visibility="collapsed",
    )
    data = plans_chart.draw_plans(plans, chosen, step_parts.memory_limit_bytes(result), state.value("axis"))
    data["alt"] = f"Plans by {AXIS_NAMES[state.value('axis')]} per step and memory per GPU"
    key = "plans_chart"

    def choose() -> None:
        if (plan_id := (st.session_state[key].get("chosen") or {}).get("id")) in plans:
            state.change(plan=plan_id)

    components.draw_plans_chart(data, key=key, on_choose=choose)


def show_plans_table(result: Result, plans: Plans, chosen: str) -> None:
    """Draw a row for every plan; a click chooses, and a head sorts."""
    rows = merge_equal(plans, chosen)
    names = recipe.distinct_names({r.name: plans[r.name] for r in rows})
    table.draw_plans(result, plans, rows, names, chosen)
    homes = {n: current_setup.result_of(n, result) for n in plans}
    with st.container(horizontal=True):
        frame.offer_data("the plans", "plans", lambda: table_rows.plan_rows(plans, homes))
        methods_panel.offer_rows(result)


# --- pins ------------------------------------------------------------------------------------------------


def show_pins(plans: Plans, chosen: str) -> None:
    """Draw the pinned plans, at most four, which stay while settings of this model change."""
    pinned = list(state.value("compare"))
    known = current_plans.with_pinned(plans)
    # A stated setup is pinned by its plain name: it stands at the end of the address, not in a pin's settings.
    pin = chosen if chosen == setups.PLAN_ID else pins.format_pin(chosen, state.values())
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if pin in pinned or chosen in pinned:
            rest = [p for p in pinned if p not in (pin, chosen)]
            st.button("Unpin this plan", icon=":material/keep_off:", on_click=_set_pins, key="pin", args=(rest,))
        else:
            st.button(
                "Pin this plan",
                icon=":material/keep:",
                on_click=_set_pins,
                args=([*pinned, pin],),
                key="pin",
                disabled=len(pinned) >= settings.MAX_COMPARED,
                help=f"Keep it beside others on Compare, up to {settings.MAX_COMPARED}, also when you change the settings",
            )
        for k, text in enumerate(pinned):
            if text in known:
                label = f"{frame.escape(words.plan_title(known[text]))} ✕"
                rest = [p for p in pinned if p != text]
                st.button(label, key=f"unpin_{k}", type="tertiary", help="Unpin", on_click=_set_pins, args=(rest,))
        if len(pinned) > 1:
            st.page_link("explorer/pages/compare.py", label="Compare them", icon=":material/compare_arrows:")


def _set_pins(pinned: list[str]) -> None:
    state.change(compare=tuple(pinned))
