"""How many GPUs would do: the smallest machine that holds the model, and the fewest GPUs that train it in so many days."""

from __future__ import annotations

from typing import Any

import streamlit as st

from explorer.address import settings
from explorer.analysis.ways_out import Way, machines
from explorer.components import frame
from explorer.session import state
from explorer.text import recipe, units
from planner_core.core import PlannerError
from planner_core.planning import Result
from planner_core.planning.pricing import Budget, model_flops, speed_of

Found = list[tuple[Way, Result | None]]


def panel(result: Result) -> None:
    """The question, worked out when it is asked, from one GPU up."""
    box = st.expander("How many GPUs would do?", key="opened_machines", on_change="rerun")
    if not box.open:
        return
    with box:
        st.caption(
            "The same GPUs and links in other numbers, at the batch of the sentence. The smallest machine that holds the model is looked "
            "for; with tokens to train on (see “Days and money”), also the fewest GPUs for some days."
        )
        days = None
        if state.value("tokens") is not None:
            widget = state.seed("w_days", state.value("days"))
            days = st.number_input(
                "Days that it may take", min_value=0.1, max_value=1e5, value=None, key=widget, placeholder="such as 30", width=230,
                on_change=state.from_widget, args=("days", widget),
            )  # fmt: skip
        if state.value("machines") != "yes":
            st.button("Work it out", key="work_machines", on_click=state.change, kwargs={"machines": "yes"})
            return
        _told(_worked_out(result, days), days)


def _worked_out(result: Result, days: float | None) -> Found:
    """Machines and their plans, from the smallest on, until one holds the model and one is fast enough; all before a stop."""
    wanted = state.request()
    progress, found = st.empty(), Found()
    for k, way in enumerate(machines(state.values(), result.cluster)):
        if st.session_state.get("machines_stopped") == wanted:
            st.caption("Planning was stopped; larger machines were not tried.")
            break
        say = state.waiting(
            progress, lambda: st.session_state.update(machines_stopped=wanted, changed=True), key=f"stop_machine_{k}"
        )
        try:
            planned: Result | None = state.plan(settings.request({**state.values(), **way.changes}), say)
        except PlannerError:
            planned = None
        progress.empty()
        found.append((way, planned))
        if planned is not None and planned.best.fits and (days is None or _days(planned) <= days):
            break
    return found


def _days(planned: Result) -> float:
    """Days for the tokens of the address."""
    run = _run(planned)
    return float(run["days"]) if run["days"] is not None else float("inf")


def _run(planned: Result) -> dict[str, Any]:
    s = speed_of(planned.best, model_flops(planned.graph), planned.cluster)
    return dict(Budget(state.value("tokens"), state.value("price")).to_json(s, planned.cluster.num_gpus))


def _told(found: Found, days: float | None) -> None:
    """The answers in a sentence, and a row for each machine with a button that takes it."""
    fitting = [(way, planned) for way, planned in found if planned is not None and planned.best.fits]
    if not fitting:
        st.markdown(
            f"Up to {found[-1][0].words} it does not fit." if found else "No other number of these GPUs can be planned."
        )
        return
    st.markdown(f"The smallest machine of this kind that holds it: **{fitting[0][0].words}**.")
    if days is not None:
        way, planned = min(fitting, key=lambda one: _days(one[1]))
        taken = f"**{way.words}**, which take {units.significant(_days(planned))} days"
        if _days(planned) <= days:
            st.markdown(f"The fewest for {days:g} days: {taken}.")
        else:
            st.markdown(f"{days:g} days are out of reach here at this batch. The fastest: {taken}.")
    for k, (way, planned) in enumerate(fitting):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button(f"Plan on {way.words}", key=f"take_machine_{k}", on_click=state.change, kwargs=dict(way.changes))
            st.markdown(frame.text(_row(planned)), width="content")


def _row(planned: Result) -> str:
    plan = planned.best
    parts = [
        f"{units.seconds(plan.cost.step_time_s)} a step",
        f"{units.memory(plan.cost.memory_bytes['peak'])} on each GPU",
    ]
    if state.value("tokens") is not None:
        run = _run(planned)
        parts.append(
            f"{units.significant(_days(planned))} days" + (f", costs {units.count(run['cost'])}" if run["cost"] else "")
        )
    return " · ".join([*parts, recipe.layout(plan)])
