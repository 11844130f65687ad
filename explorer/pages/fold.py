"""Fold: what repeats? The graph in its unique blocks, the selected node, and Algorithm 1 replayed."""

from __future__ import annotations

import html
import math
from typing import Any

import streamlit as st

from explorer.components import frame, graphs
from explorer.graph import overlay
from explorer.graph import scene as graph_view
from explorer.graph.pyvis_page import folded_html
from explorer.session import state, stated
from explorer.text import units, words
from planner_core.core import Plan
from planner_core.models import fold
from planner_core.planning import Folded, Request, Result
from planner_core.planning.analysis import to_dot, to_graphml
from planner_core.search.network import Run

LEAST = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # from how many copies on blocks may be folded in the drawing


def choose_way(result: Result, plan: Plan) -> None:
    """The control where copies of a block run in several ways: which of them the graph shows."""
    drawing = state.drawing(result.request)
    several = {scope: found for scope in drawing.scopes if len(found := overlay.ways(plan, scope)) > 1}
    if not several:
        return
    names = {
        label: f"{drawing.titles.get(scope, scope)}, {overlay.copies(bp.prefixes, drawing, scope)}"
        for scope, found in several.items()
        for label, bp in found.items()
    }
    shown = overlay.variant(plan, drawing, next(iter(several)), state.value("way"))
    current = state.value("way") if state.value("way") in names else (shown[0] if shown else "")
    frame.follower("Copies that the overlays show", list(names), "way", current, lambda n: names[n])
    st.caption("The plan runs the copies of this block in several ways, as the memory allows.")


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
    return f"{node.name} ({drawing.titles.get(scope, scope)})" if node and scope else (node.name if node else node_id)


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
        choose_least(result)
        all_apart(result, drawing)
    top = result.coarse.top
    st.caption(
        f"{len(top.groups)} nodes stand outside repeated blocks. A node is an operation with the ones that must "
        "share its placement."
    )
    st.caption(
        "Click a node for its shapes, work and choices; + opens a block. Click into the graph to zoom with the wheel."
    )


def choose_least(result: Result) -> None:
    """The control: from how many copies on a block is folded in the drawing."""
    most = max(result.graph.num_repeats.values())
    current = min(state.value("least"), most + 1)
    options = sorted({n for n in LEAST if n <= most} | {current, most + 1})
    widget = state.seed("w_least", current)
    st.select_slider(
        "Fold blocks of at least", options, key=widget, format_func=lambda n: f"{n} copies" if n <= most else "fold nothing",
        help="Blocks of fewer equal copies are drawn copy by copy; plans do not depend on it.",
        on_change=lambda: state.change(least=int(st.session_state[widget]), open=None, node=""),
    )  # fmt: skip


def block_panel(result: Result, drawing: graph_view.Scene, node: graph_view.Node) -> None:
    """A run of equal blocks."""
    run = drawing.runs[node.call]
    block = result.coarse.blocks[run.block]
    st.markdown(f"**{frame.text(node.name)}**")
    st.caption(
        f"One copy of {run.block}, `{run.calls[0].prefix}`, drawn by itself."
        if len(run.calls) == 1
        else f"{len(run.calls)} equal copies of {run.block}, from `{run.calls[0].prefix}` to `{run.calls[-1].prefix}`: "
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
    others = [r for r in drawing.runs if r is not run and _alike(r.block) == _alike(run.block)]
    for other in others[:3]:
        reasons = apart(result.request, run.calls[0].prefix, other.calls[0].prefix)
        if reasons:
            st.caption(frame.text(f"Not folded with {graph_view.run_title(other)}: {'; '.join(reasons)}."))


def _alike(block: str) -> str:
    """Blocks of one class differ in the number at the end of their name."""
    return block.rstrip("0123456789")


@st.cache_data(max_entries=200, show_spinner=False)
def apart(request: Request, one: str, other: str) -> list[str]:
    """Why two calls are not copies of one block, in words; empty where they are."""
    return fold.why_not_folded(state.plan(request).graph, one, other, limit=2)


def all_apart(result: Result, drawing: graph_view.Scene) -> None:
    """Blocks of one class that were not folded together, and why; a kind of block is told once."""
    first: dict[str, Run] = {}
    told: dict[str, str] = {}
    for run in drawing.runs:
        other = first.setdefault(_alike(run.block), run)
        if run.block == other.block or run.block in told:
            continue
        reasons = apart(result.request, other.calls[0].prefix, run.calls[0].prefix)
        if reasons:
            titles = drawing.titles[run.block], drawing.titles[other.block]
            told[run.block] = f"{titles[0]} is not folded with {titles[1]}: {'; '.join(reasons)}."
    if not told:
        return
    with st.expander(f"Why {len(told) + 1} similar blocks are not one", expanded=len(told) == 1):
        for text in list(told.values())[:6]:
            st.caption(frame.text(text))


def node_panel(result: Result, drawing: graph_view.Scene, node: graph_view.Node, plan: Plan) -> None:
    """One node: what runs, on what, how large, and what it may do."""
    st.markdown(f"**{frame.text(node.name)}**  \n{frame.text(node.sub)}")
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
    if bare := overlay.without_rule(drawing, result.unknown_ops).get(node.id):
        st.warning(frame.text(bare[:1].upper() + bare[1:] + "."))
    options = graph_view.choices(node, result.coarse)
    if options:
        st.markdown(f"**{len(options)} choices on one mesh axis**")
        rows = [[html.escape(name), _chips(ins), _chips(outs)] for name, ins, outs in options]
        frame.table(["choice", "operands", "result"], rows, "choices")
    scope = node.id.rpartition(":")[0]
    way = overlay.variant(plan, drawing, scope if scope in drawing.scopes else "", state.value("way"))
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
    if current is not None:
        frame.absent("depth", [str(current)], list(map(str, depths)), f"Showing {_telling(steps)}")
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
    frame.table(["names", "copies", "weights in each", "result", "why"], rows, "groups at this depth")
    if len(groups) > 8:
        st.caption(f"and {len(groups) - 8} more names")


def _telling(steps: Any) -> int:
    """The depth at which the most weights fold: the one to begin with."""
    return int(max(steps, key=lambda s: sum(g.count * g.similar for g in s.kept if g.similar > 1)).depth)


def page() -> None:
    """The page."""
    result = frame.open_page("fold")
    plans = stated.plans(result)
    with st.container(horizontal=True, vertical_alignment="bottom", key="which_graphs"):
        name, plan = frame.plan_choice(plans, "Plan that the graph shows", width=340)
        graphs.choose_beside(plans, name)
    with st.container(key="wide"):
        second = graphs.beside(result, plans, name, plan)
        left, right = st.columns(2 if second else [7, 3], gap="medium")
        if second:
            with left:
                graphs.differences(*second)
        else:
            with left:
                graphs.draw(result, name, plan)
        with right:
            panel(result, plan)
            choose_way(result, plan)
    algorithm(result)
    st.download_button(
        "Download the folded graph as one HTML page",
        lambda: folded_html(result.coarse, result.graph.name),
        file_name=f"{result.graph.name}.html",
        mime="text/html",
        on_click="ignore",
        icon=":material/download:",
    )
    folded = Folded(result.graph, result.coarse)
    with st.popover(
        "Graph for other programs", icon=":material/hub:", help="The folded graph, or every copy of every block"
    ):
        every = st.checkbox("Every copy of every block", key="download_unfolded")
        for name, write, ending in (("GraphML", to_graphml, "graphml"), ("DOT", to_dot, "dot")):
            st.download_button(
                f"Download {name}", lambda write=write: write(folded, unfolded=every), file_name=f"{result.graph.name}.{ending}",  # type: ignore[misc]
                mime="text/plain", on_click="ignore", key=f"download_{ending}", icon=":material/download:",
            )  # fmt: skip
        st.caption(
            "GraphML opens in Gephi, yEd, Cytoscape; DOT in Graphviz. In Python: `shardscope.to_networkx(shardscope.fold(model))`."
        )


page()
