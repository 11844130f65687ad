"""Fold: what repeats? The graph in its unique blocks, the selected node, and Algorithm 1 replayed."""

from __future__ import annotations

import html
import math
from typing import Any

import streamlit as st

from explorer import components, graph_json, graph_view, overlay, state, units, words
from explorer.components import frame
from explorer.palette import DEVICES
from explorer.standalone import folded_html
from planner_core import fold
from planner_core.pipeline import Result
from planner_core.plan import Plan
from planner_core.planner import Request


@st.cache_resource(max_entries=64, show_spinner=False)
def canvas(request: Request, plan_id: str) -> dict[str, Any]:
    """What the component draws: the same object for every rerun that changes neither model nor plan."""
    result, drawing = state.plan(request), state.drawing(request)
    plan = state.plan_ids(result.plans)[plan_id]
    return {
        "key": f"{hash(request)}:{plan_id}",
        "scene": graph_json.to_json(drawing),
        "devices": DEVICES,
        "overlay": {
            "placement": overlay.placements(plan, drawing),
            "axes": f"bars: {words.mesh_words(plan.mesh)}",
            "messages": overlay.communication(plan, drawing, result.graph, result.cluster, result.workload),
            "plan": f"communication of {words.title(plan)} on {words.mesh_words(plan.mesh)}, one copy of each block",
        },
    }


def default_open(drawing: graph_view.Scene) -> list[str]:
    """At first the block with the most copies is open."""
    runs = sorted(range(len(drawing.runs)), key=lambda k: -len(drawing.runs[k].calls))
    return [f"run:{k}" for k in runs[:1]]


def viewed() -> None:
    """Callback: a node was clicked, blocks were opened, or another overlay was chosen."""
    view = st.session_state["graph"].get("view") or {}
    new = {"node": str(view.get("selected") or ""), "show": str(view.get("show", "graph"))}
    if view.get("open") is not None:
        state.change(open=tuple(map(str, view["open"])))
    state.change(**new)


def draw(result: Result, plan_id: str) -> None:
    """The graph."""
    drawing = state.drawing(result.request)
    opened = state.value("open")
    components.graph(
        {
            **canvas(result.request, plan_id),
            "selected": state.value("node"),
            "asked": state.asked(),
            "open": default_open(drawing) if opened is None else list(opened),
            "show": state.value("show"),
        },
        key="graph",
        on_view=viewed,
    )


def panel(result: Result, plan: Plan) -> None:
    """The selected node."""
    drawing = state.drawing(result.request)
    names = drawing.node_ids()
    current = state.value("node")
    if current and current not in names:
        st.warning(f"There is no node “{frame.text(current[:60])}” in this model; choose another.")
        current = ""
    labels = {i: _node_label(drawing, i) for i in names}
    frame.follower(
        "Selected", names, "node", current, lambda i: labels.get(i, i), placeholder="Click a node, or choose one here"
    )
    node = drawing.node(current) if current else None
    if node is None:
        overview(result, drawing)
    elif node.kind == "block":
        block_panel(result, drawing, node)
    else:
        node_panel(result, drawing, node, plan)


def _node_label(drawing: graph_view.Scene, node_id: str) -> str:
    node = drawing.node(node_id)
    scope = node_id.rpartition(":")[0] if node and node.kind != "block" else ""
    return f"{node.label} ({drawing.titles.get(scope, scope)})" if node and scope else (node.label if node else node_id)


def overview(result: Result, drawing: graph_view.Scene) -> None:
    """What repeats, when nothing is selected."""
    rows = []
    for name, block in result.coarse.blocks.items():
        repeats = result.graph.num_repeats[name]
        rows.append(
            [html.escape(drawing.titles[name]), f"{repeats}", f"{len(block.groups)}", f"{len(block.block.ops)}"]
        )
    if rows:
        st.markdown("**What repeats**")
        frame.table(["block", "copies", "nodes", "ops"], rows, "repeated blocks")
    top = result.coarse.top
    st.caption(
        f"{len(top.groups)} nodes stand outside repeated blocks. A node is an operation with the ones that must "
        "share its placement."
    )
    st.caption(
        "Click a node for its shapes, work and choices; + opens a block. Click into the graph to zoom with the wheel."
    )


def block_panel(result: Result, drawing: graph_view.Scene, node: graph_view.Node) -> None:
    """A run of equal blocks."""
    run = drawing.runs[node.call]
    block = result.coarse.blocks[run.block]
    st.markdown(f"**{frame.text(node.label)}**")
    st.caption(
        f"{len(run.calls)} equal copies of {run.block}, from `{run.calls[0].prefix}` to `{run.calls[-1].prefix}`: "
        "the same operations, shapes and weights, checked op by op."
    )
    for scored in result.candidates:
        if scored.block == run.block:
            st.caption(
                f"{len(scored.weights)} weight matrices, each whole, split by rows or by columns: "
                f"{units.whole(scored.space)} candidates, all scored."
            )
    _meta_rows("arrives", node.inputs)
    _meta_rows("leaves", node.outputs)
    st.caption(f"{len(block.groups)} nodes, {len(block.block.ops)} operations in each copy.")
    others = [
        r for r in drawing.runs if r is not run and r.block.rstrip("0123456789") == run.block.rstrip("0123456789")
    ]
    for other in others[:3]:
        reasons = fold.why_not_folded(result.graph, run.calls[0].prefix, other.calls[0].prefix, limit=2)
        if reasons:
            st.caption(frame.text(f"Not folded with {graph_view.run_title(other)}: {'; '.join(reasons)}."))


def node_panel(result: Result, drawing: graph_view.Scene, node: graph_view.Node, plan: Plan) -> None:
    """One node: what runs, on what, how large, and what it may do."""
    st.markdown(f"**{frame.text(node.label)}**  \n{frame.text(node.sub)}")
    if node.module:
        st.caption(f"module `{node.module}`")
    for name, meta in node.weights:
        st.caption(
            f"weight `{name}` {graph_view.tensor(meta)}, "
            f"{units.count(node.num_params if len(node.weights) == 1 else _elements(meta))} parameters"
        )
    _meta_rows("reads", node.inputs)
    _meta_rows("makes", node.outputs)
    st.caption(f"{units.flops(node.flops)} forward · {units.memory(node.saved_bytes)} kept for backward, whole")
    options = graph_view.choices(node, result.coarse)
    if options:
        st.markdown(f"**{len(options)} choices on one mesh axis**")
        rows = [[html.escape(name), _chips(ins), _chips(outs)] for name, ins, outs in options]
        frame.table(["choice", "operands", "result"], rows, "choices")
    scope = node.id.rpartition(":")[0]
    way = overlay.variant(plan, drawing, scope if scope in drawing.scopes else "")
    here = overlay.node_placement(node, way[1]) if way else None
    if here:
        chips = "".join(frame.chip(p, axis) for axis, p in zip(plan.mesh.axis_names, here[1], strict=True))
        st.html(f"{html.escape(words.title(plan))} keeps its {here[0]} as {chips}")
    with st.expander(f"{len(node.ops)} operations in this node"):
        for op in node.ops:
            st.caption(f"`{op.name}`")


def _elements(meta: Any) -> int:
    return int(math.prod(meta.shape))


def _chips(letters: str) -> str:
    return "".join(frame.chip(p) for p in letters.split())


def _meta_rows(verb: str, metas: tuple[Any, ...]) -> None:
    if metas:
        st.caption(f"{verb} " + ", ".join(dict.fromkeys(graph_view.tensor(m) for m in metas)))


def algorithm(result: Result) -> None:
    """TAP's Algorithm 1, depth by depth."""
    steps = fold.fold_steps(fold.weight_nodes(result.graph))
    if not steps:
        return
    depths = [s.depth for s in steps]
    st.markdown(
        "**How the repeats are found**: TAP's Algorithm 1, from the deepest module names upward",
        help=(
            "At each depth, names are cut to that many parts, and blocks with equal content are counted. Kept "
            "while something repeats."
        ),
    )
    current = state.value("depth")
    widget = state.seed("w_depth", current if current in depths else _telling(steps))
    if len(depths) > 1:
        st.select_slider(
            "Depth of module names", depths, key=widget, on_change=state.from_widget, args=("depth", widget)
        )
    step = next(s for s in steps if s.depth == st.session_state.get(widget, depths[0]))
    st.markdown(frame.text(words.fold_sentence(step.groups, step.depth, step.stopped)))
    groups = sorted(step.groups, key=lambda g: (not g.kept, -g.count))
    rows = [
        [html.escape(g.pattern), str(g.count), str(g.similar), "kept" if g.kept else "not kept", html.escape(g.reason)]
        for g in groups[:8]
    ]
    frame.table(["names", "copies", "weights in each", "", "why"], rows, "groups at this depth")
    if len(groups) > 8:
        st.caption(f"and {len(groups) - 8} more names")


def _telling(steps: Any) -> int:
    """The depth at which the most weights fold: the one to begin with."""
    return int(max(steps, key=lambda s: sum(g.count * g.similar for g in s.kept if g.similar > 1)).depth)


def page() -> None:
    """The page."""
    result = frame.open_page("fold")
    plans = state.plan_ids(result.plans)
    name, plan = state.chosen(plans)
    with st.container(key="wide"):
        left, right = st.columns([7, 3], gap="medium")
        with left:
            draw(result, name)
        with right:
            panel(result, plan)
    algorithm(result)
    st.download_button(
        "Download the folded graph as one HTML page",
        lambda: folded_html(result.coarse, result.graph.name),
        file_name=f"{result.graph.name}.html",
        mime="text/html",
        on_click="ignore",
        icon=":material/download:",
    )


page()
