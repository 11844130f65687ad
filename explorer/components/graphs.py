"""The model's graph, drawn by its modules and coloured by what a plan does."""

from __future__ import annotations

from typing import Any

import streamlit as st

from explorer import components
from explorer.components import frame
from explorer.figures.palette import DEVICES
from explorer.graph import loads, overlay
from explorer.graph import scene as graph_view
from explorer.graph import scene_json as graph_json
from explorer.graph.stripes import node_stages, node_stripes
from explorer.jobs.result_cache import ResultCache
from explorer.session import current_setup, shared_plans, state
from planner_core.core import Plan
from planner_core.planning import Request, Result

_CANVASES: ResultCache[tuple[Request, shared_plans.PlanKey, str], dict[str, Any]] = ResultCache(128)
_SCENES: ResultCache[Request, dict[str, Any]] = ResultCache(24)


def graph_data(result: Result, plan_id: str, plan: Plan, show: str) -> dict[str, Any]:
    """Return what the component draws: the same object for every run that changes neither model nor plan."""
    home = current_setup.result_of(plan_id, result)
    key = result.request, shared_plans.plan_key(home.request, plan_id, plan), show
    return _CANVASES.get(key, lambda: _draw_canvas(result.request, show, plan, home))


def _draw_canvas(request: Request, show: str, plan: Plan, home: Result) -> dict[str, Any]:
    """Draw the graph: `request` is drawn, `home` is what the plan answers."""
    drawing = shared_plans.model_drawing(request)
    more: dict[str, Any] = {"messages": {}}
    if show in ("memory", "flops"):
        more |= loads.to_json(loads.node_loads(plan, drawing, home.graph))
    if show in ("forward", "backward"):
        more["messages"] = overlay.node_messages(plan, drawing, home.graph)
    return {
        "key": f"{hash(request)}",
        "scene": _SCENES.get(request, lambda: graph_json.to_json(drawing)),
        "devices": DEVICES,
        "overlay": {
            "split": node_stripes(plan, drawing),
            "stages": node_stages(plan, drawing),
            **more,
            "words": overlay.overlay_legends(plan),
        },
        "bare": overlay.nodes_without_rule(drawing, home.unknown_ops),
    }


MIN_SCALE = 0.72
"""A drawing is not scaled below this to be seen whole."""


def default_open(drawing: graph_view.Scene, width: float, height: float) -> list[str]:
    """Return the runs that are open at first: all, if the whole drawing is then readable in the frame; else none."""
    top = drawing.scopes[""]
    runs = [(f"run:{k}", drawing.scopes[run.block]) for k, run in enumerate(drawing.runs)]
    tall = top.height + sum(inside.height for _, inside in runs)
    wide = max([top.width, *(inside.width + 48 for _, inside in runs)])
    fits = min(width / wide, height / tall) if wide and tall else 1.0
    return [name for name, _ in runs] if fits >= MIN_SCALE else []


def take_view() -> None:
    """Take a click on a node, opened blocks or another overlay from the component; a callback."""
    view = st.session_state["graph"].get("view") or {}
    if view.get("open") is not None:
        state.change(open=tuple(map(str, view["open"])))
    state.change(node=str(view.get("selected") or ""), show=str(view.get("show", "split")))


def show_graph(result: Result, plan_id: str, plan: Plan, width: float, height: int) -> None:
    """Draw the graph by its modules, coloured by what a plan does."""
    drawing = shared_plans.model_drawing(result.request)
    frame.warn_missing(
        "block to open", state.value("open") or (), [f"run:{k}" for k in range(len(drawing.runs))], "It is left out"
    )
    opened = state.value("open")
    components.draw_graph(
        {
            **graph_data(result, plan_id, plan, state.value("show")),
            "selected": state.value("node"),
            "asked": state.address_reads(),
            "open": default_open(drawing, width, height - 90) if opened is None else list(opened),
            "show": state.value("show"),
        },
        key="graph",
        on_view=take_view,
        height=height,
    )
