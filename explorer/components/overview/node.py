"""The selected node: its weight in the colours of the GPUs, what it does, its choices, and what it sends under the chosen plan."""

from __future__ import annotations

import html
from collections import Counter

import streamlit as st

from explorer import components
from explorer.components import frame
from explorer.figures.weight_picture import weight_picture
from explorer.graph import overlay
from explorer.graph import scene as graph_view
from explorer.graph.stripes import largest_weight, split_of
from explorer.session import current_setup, state
from explorer.text import recipe, units
from planner_core.core import Plan
from planner_core.models import fold
from planner_core.planning import Request, Result

KEPT = 64


def show_node(result: Result, name: str, plan: Plan) -> None:
    """What is selected in the graph, or how to select."""
    drawing = state.model_drawing(result.request)
    current = state.value("node")
    node = drawing.node(current) if current else None
    if current and node is None:
        st.warning(f"There is no node “{frame.escape(current[:60])}” in this model.")
    if node is None:
        st.caption("Click a node of the graph for its weight, its choices and its traffic.")
    elif node.kind == "block":
        _show_block(result, drawing, node, plan)
    else:
        _show_node(result, drawing, node, name, plan)


def _show_block(result: Result, drawing: graph_view.Scene, node: graph_view.Node, plan: Plan) -> None:
    """A run of equal blocks: how often, how the copies run, and why another like it is not folded in."""
    run = drawing.runs[node.call]
    ops = len(result.coarse.blocks[run.block].block.ops)
    st.markdown(
        f"**{frame.escape(node.name)}**: {len(run.calls)} equal copies of {frame.escape(run.block)}, {ops} operations each"
    )
    ways = overlay.variants(plan, run.block)
    if len(ways) > 1:
        kinds = Counter({recipe.RECOMPUTED[b.recompute]: 0 for b in ways.values()})
        for b in ways.values():
            kinds[recipe.RECOMPUTED[b.recompute]] += len(b.prefixes)
        st.caption("; ".join(f"{kind} in {n}" for kind, n in kinds.most_common()) + ".")
    for other in (
        r for r in drawing.runs if r is not run and r.block.rstrip("0123456789") == run.block.rstrip("0123456789")
    ):
        if reasons := why_not_folded(result.request, run.calls[0].prefix, other.calls[0].prefix):
            st.caption(frame.escape(f"Not folded with {graph_view.run_title(other)}: {'; '.join(reasons)}."))
            break


@st.cache_data(max_entries=200, show_spinner=False)
def why_not_folded(request: Request, one: str, other: str) -> list[str]:
    """Why two calls are not copies of one block, in words; empty where they are."""
    return fold.why_not_folded(state.plan_request(request).graph, one, other, limit=2)


def _show_node(result: Result, drawing: graph_view.Scene, node: graph_view.Node, name: str, plan: Plan) -> None:
    scope = node.id.rpartition(":")[0]
    way = overlay.most_common_variant(plan, scope if scope in drawing.scopes else "")
    held = largest_weight(node, way[1]) if way else None
    title = f"**{frame.escape(node.name)}** {frame.escape(node.module)}"
    if held:
        shape = next(meta.shape for weight, meta in node.weights if weight == held[0])
        left, right = st.columns([2, 3], gap="medium")
        with left:
            components.draw_svg(weight_picture(held[1], plan.mesh, shape), key="weight_picture")
        with right:
            st.markdown(title)
            st.caption(f"weight {units.shape(shape)}: {split_of(held[1], plan.mesh).words}")
            _show_work(result, node)
            _show_traffic(result, node, name, plan)
    else:
        st.markdown(title)
        _show_work(result, node)
        _show_traffic(result, node, name, plan)
    _show_choices(result, node)


def _show_work(result: Result, node: graph_view.Node) -> None:
    lead = f"{units.flops(node.flops)} forward · {units.memory(node.saved_bytes)} kept for backward, whole"
    st.caption(lead)
    if bare := overlay.nodes_without_rule(state.model_drawing(result.request), result.unknown_ops).get(node.id):
        st.warning(frame.escape(bare[:1].upper() + bare[1:] + "."))


@st.cache_resource(max_entries=KEPT, show_spinner=False)
def _messages(
    request: Request, name: str, edit: tuple[str, ...], _plan: Plan, _home: Result
) -> dict[str, list[dict[str, object]]]:
    return overlay.node_messages(_plan, state.model_drawing(request), _home.graph)


def _show_traffic(result: Result, node: graph_view.Node, name: str, plan: Plan) -> None:
    """What one copy sends in a step."""
    sent = _messages(result.request, name, state.edit_of(name), plan, current_setup.result_of(name, result)).get(
        node.id, []
    )
    told = dict.fromkeys(f"{m['phase']}: {m['kind']} of {m['text']} over {m['axis']}" for m in sent)
    st.caption("sends " + "; ".join(told).replace("_", "\\_") if told else "sends nothing")


def _show_choices(result: Result, node: graph_view.Node) -> None:
    options = graph_view.node_choices(node, result.coarse)
    with st.expander(f"{len(options)} choices on one mesh axis, {len(node.ops)} operations", key="node_choices"):
        if options:
            rows = [[html.escape(name), _chips(ins), _chips(outs)] for name, ins, outs in options]
            lead = graph_view.lead_op(node)
            out = graph_view.find_block(node, result.coarse).values[lead.outputs[0]].meta if lead else None
            head = f"result {units.shape(out.shape)}" if out else "result"
            frame.show_table(["choice", "operands", head], rows, "choices")
        st.caption(", ".join(f"`{op.name}`" for op in node.ops))


def _chips(letters: str) -> str:
    return "".join(frame.chip(p) for p in letters.split())
