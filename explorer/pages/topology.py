"""Topology: what does my network do to it? The cluster with a plan's traffic on its links."""

from __future__ import annotations

import html
from dataclasses import replace

import streamlit as st

from explorer import components, settings, state, topology, units, words
from explorer.components import frame
from planner_core.errors import PlannerError
from planner_core.pipeline import Result
from planner_core.plan import PHASES, Plan


def phases() -> tuple[str, ...]:
    """The control: which part of the step."""
    widget = state.seed("w_phase", state.value("phase"))
    st.segmented_control(
        "Part of the step",
        list(settings.PHASES),
        format_func=lambda p: {"all": "whole step"}.get(p, p),
        key=widget,
        required=True,
        on_change=state.from_widget,
        args=("phase", widget),
    )
    chosen = state.value("phase")
    return PHASES if chosen == "all" else (chosen,)


def links(plan: Plan, result: Result, shown: tuple[str, ...]) -> None:
    """Load of every level by mesh axis."""
    cluster = result.cluster
    found = [x for x in topology.loads(plan, cluster) if x.phase in shown]
    rows = []
    for x in sorted(found, key=lambda x: (x.level, x.axis, PHASES.index(x.phase))):
        level = cluster.levels[x.level]
        rows.append(
            [
                html.escape(level.name),
                html.escape(x.axis),
                x.phase,
                units.traffic(x.num_bytes),
                f"{units.significant(level.bytes_per_s / 1e9)} GB/s",
                units.seconds(x.time_s),
            ]
        )
    if rows:
        frame.table(
            ["link", "mesh axis", "phase", "sent out of one unit", "reachable bandwidth", "time on the wire"],
            rows,
            "load of the links",
        )
    else:
        st.caption("Nothing is sent in this part of the step.")
    st.caption(
        "A unit of the first level is a GPU, of the next a node. Drawn as one ring for each group of a mesh "
        "axis; where the planner found a tree or a hierarchical algorithm cheaper, less goes between nodes."
    )


def by_volume(result: Result, best: Plan) -> None:
    """The plan that sends least beside the one that is fastest."""
    asked = state.request()
    other = "communication" if asked.objective == "time" else "time"
    try:
        there = state.plan(replace(asked, objective=other)).best
    except PlannerError:
        return
    fast, small = (best, there) if other == "communication" else (there, best)
    st.markdown("**Least time beside least communication**")
    rows = [
        [
            title,
            html.escape(words.describe(p)),
            html.escape(words.mesh_words(p.mesh)),
            units.traffic(sum(t.wire_bytes for t in p.cost.traffic)),
            units.seconds(p.cost.comm_time_s),
            units.seconds(p.cost.step_time_s),
        ]
        for title, p in (("least step time", fast), ("least communication time", small))
    ]
    frame.table(["goal", "plan", "mesh", "sent per GPU", "communication", "step"], rows, "two goals")
    loss = small.cost.step_time_s / fast.cost.step_time_s - 1
    if loss > words.MODEL_ERROR:
        st.markdown(f"Choosing by communication alone would make the step {units.percent(loss)} longer.")
    else:
        st.caption("Here both goals give the same step time within the error of the estimate.")


def page() -> None:
    """The page."""
    result = frame.open_page("topology")
    plans = state.plan_ids(result.plans)
    left, right = st.columns(2, vertical_alignment="bottom")
    with left:
        _, plan = frame.plan_choice(plans)
    with right:
        shown = phases()
    st.markdown(f"Mesh {frame.text(words.mesh_words(plan.mesh))}. {frame.text(words.describe(plan))}.")
    components.svg(topology.drawing(plan, result.cluster, shown, frame.theme()), key="cluster_drawing")
    links(plan, result, shown)
    by_volume(result, result.best)


page()
