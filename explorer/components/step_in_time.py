"""The step of each plan in time: the streams of a GPU, or the ranks of a pipeline; as data and as a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import streamlit as st

from explorer import components
from explorer.analysis import rows, streams
from explorer.components import frame
from explorer.figures.palette import WORK
from explorer.session import shared_plans
from explorer.text import glossary, words
from planner_core.core import Graph, Plan
from planner_core.planning import Request, Result, stage_trace
from planner_core.planning.analysis import TraceWork, chrome_trace, step_work

Plans = Mapping[str, Plan]
HOW_TO_MOVE = "Drag moves, Ctrl and the wheel zoom, a click on a part of the model opens its operators."


@st.cache_resource(max_entries=16, show_spinner=False)
def _step_work(request: Request, plan_id: str, edit: tuple[str, ...], _plan: Plan, _graph: Graph) -> list[TraceWork]:
    return step_work(_plan, _graph)


def show_steps(shown: Plans, homes: Mapping[str, Result]) -> None:
    """Draw the step of each plan in time; `homes` are the results that the plans belong to."""
    titled = {words.plan_title(p): p for p in shown.values()}
    steps = {
        words.plan_title(p): _step_work(homes[n].request, n, shared_plans.edit_of(n), p, homes[n].graph)
        for n, p in shown.items()
        if not p.pipeline
    }
    alike = "All GPUs of a plan do the same, in the order in which a run issues its work. " if steps else ""
    st.markdown("**The step in time**", help=f"{alike}Exposed: {glossary.GLOSSARY['exposed']}. {HOW_TO_MOVE}")
    for title, plan in titled.items():
        if plan.pipeline:
            stages = streams.describe_stages(plan)
            st.caption(f"{frame.escape(title)}: {stages} A click shows one micro-batch on its way.")
    components.draw_streams(streams.build_streams(steps, titled, WORK), key="streams")
    with st.container(horizontal=True):
        frame.offer_data("the work of these steps", "steps", lambda: rows.work_rows(steps, titled))
        frame.offer_file(
            "Chrome trace",
            lambda: json.dumps(_make_trace(steps, titled)),
            "steps.trace.json",
            "trace",
            mime="application/json",
            type="tertiary",
            help="For Perfetto: a process a plan, a thread a stream or a rank of the pipeline",
        )


def _make_trace(steps: Mapping[str, list[TraceWork]], titled: Plans) -> dict[str, Any]:
    """Return the steps as one trace; plans with stages are processes after the others."""
    trace = chrome_trace(steps)
    for pid, plan in enumerate((p for p in titled.values() if p.pipeline), start=len(steps)):
        trace["traceEvents"] += [{**event, "pid": pid} for event in stage_trace(plan)["traceEvents"]]
    return trace
