"""The selected node: its weight in the colours of the GPUs, its work, its choices, and what it sends under the chosen plan."""

from __future__ import annotations

import html
from collections import Counter
from functools import lru_cache
from typing import Any

import streamlit as st

from explorer import components
from explorer.components import frame
from explorer.figures.weight_picture import weight_picture
from explorer.graph import loads, overlay
from explorer.graph import scene as graph_view
from explorer.graph.stripes import largest_weight, split_of
from explorer.jobs.result_cache import ResultCache
from explorer.session import current_setup, shared_plans, state
from explorer.text import recipe, units
from planner_core.core import Plan
from planner_core.models import fold
from planner_core.planning import Request, Result

_MESSAGES: ResultCache[shared_plans.PlanKey, dict[str, list[dict[str, Any]]]] = ResultCache(64)
_KEPT: ResultCache[shared_plans.PlanKey, dict[str, int]] = ResultCache(64)
DONE = {
    "all_gather": "gathered on every GPU",
    "all_reduce": "summed, the sum on every GPU",
    "reduce_scatter": "summed, a part of the sum on each GPU",
    "all_to_all": "exchanged, a slice for each GPU",
    "send_recv": "passed around a ring of GPUs",
}
"""What a collective does with the bytes that it moves."""


def show_node(result: Result, plan_id: str, plan: Plan) -> None:
    """Draw what is selected in the graph."""
    drawing = shared_plans.model_drawing(result.request)
    node_id = state.value("node")
    node = drawing.node(node_id) if node_id else None
    if node_id and node is None:
        st.warning(f"There is no node “{frame.escape(node_id[:60])}” in this model.")
    if node is not None and node.kind == "block":
        _show_block(result, drawing, node, plan)
    elif node is not None:
        _show_node(result, drawing, node, plan_id, plan)


def _show_block(result: Result, drawing: graph_view.Scene, node: graph_view.Node, plan: Plan) -> None:
    """Describe a run of equal blocks: how many copies, what each recomputes, and why a similar run is not folded with it."""
    run = drawing.runs[node.call]
    ops = len(result.coarse.blocks[run.block].block.ops)
    copies = f"{len(run.calls)} equal copies of {frame.escape(run.block)}, {ops} operations each"
    st.markdown(f"**{frame.escape(node.name)}**: {copies}")
    variants = overlay.variants(plan, run.block)
    if len(variants) > 1:
        kinds: Counter[str] = Counter()
        for variant in variants.values():
            kinds[recipe.RECOMPUTED[variant.recompute]] += len(variant.prefixes)
        st.caption("; ".join(f"{kind} in {n}" for kind, n in kinds.most_common()) + ".")
    # Blocks of one class have its name with a number: `T5Block`, `T5Block2`.
    family = run.block.rstrip("0123456789")
    for other in drawing.runs:
        if other is run or other.block.rstrip("0123456789") != family:
            continue
        if reasons := why_not_folded(result.request, run.calls[0].prefix, other.calls[0].prefix):
            st.caption(frame.escape(f"Not folded with {graph_view.run_title(other)}: {'; '.join(reasons)}."))
            break


@lru_cache(maxsize=200)
def why_not_folded(request: Request, prefix: str, other: str) -> list[str]:
    """Say why two calls are not copies of one block; empty where they are."""
    return fold.why_not_folded(shared_plans.plan_request(request).graph, prefix, other, limit=2)


def _show_node(result: Result, drawing: graph_view.Scene, node: graph_view.Node, plan_id: str, plan: Plan) -> None:
    scope = node.id.rpartition(":")[0]
    variant = overlay.most_common_variant(plan, scope if scope in drawing.scopes else "")
    weight = largest_weight(node, variant[1]) if variant else None
    text = st.container()
    if weight:
        name, placed = weight
        shape = next(meta.shape for other, meta in node.weights if other == name)
        left, text = st.columns([5, 9])
        with left:
            components.draw_svg(weight_picture(placed, plan.mesh, shape), key="weight_picture")
    lines = [f"weight {units.shape(shape)}: {split_of(placed, plan.mesh).sentence}"] if weight else []
    lines += [
        f"all GPUs together: {units.flops(node.flops)} in forward",
        *_describe_kept(result, node, plan_id, plan),
        *_describe_traffic(result, node, plan_id, plan),
    ]
    with text:
        with st.container(horizontal=True, vertical_alignment="center", gap="small", key="node_head"):
            st.markdown(f"**{frame.escape(node.name)}** {frame.escape(node.module)}", width="content")
            _show_choices(result, node)
        st.caption("  \n".join(map(frame.escape, lines)))
        if problem := overlay.nodes_without_rule(drawing, result.unknown_ops).get(node.id):
            st.warning(frame.escape(problem[:1].upper() + problem[1:] + "."))


def _describe_kept(result: Result, node: graph_view.Node, plan_id: str, plan: Plan) -> list[str]:
    """Say what one GPU keeps of a node for backward under the plan; nothing where the plan does not know it."""
    drawing, home = shared_plans.model_drawing(result.request), current_setup.result_of(plan_id, result)
    key = shared_plans.plan_key(result.request, plan_id, plan)
    kept = _KEPT.get(key, lambda: loads.node_kept_bytes(plan, drawing, home.graph)).get(node.id)
    scope = node.id.rpartition(":")[0]
    variant = overlay.most_common_variant(plan, scope if scope in drawing.scopes else "")
    if kept is None or variant is None:
        return []
    own, copies = len(variant[1].prefixes), sum(len(v.prefixes) for v in overlay.variants(plan, scope).values())
    of = [f"in each of {own} copies" + (f" of {copies}" if copies > own else "")] if copies > 1 else []
    if kept and plan.accumulate > 1:
        of.append("of each micro-batch")
    where = "".join(f" {words}" for words in of)
    if variant[1].recompute == "full":
        return [f"one GPU keeps {units.memory(kept) if kept else 'nothing'} for backward{where}: full recomputation"]
    size = f"{units.memory(kept)} for backward{where}" if kept else f"nothing for backward{where}"
    return [f"one GPU keeps {size}, beside what earlier nodes keep"]


def _describe_traffic(result: Result, node: graph_view.Node, plan_id: str, plan: Plan) -> list[str]:
    """Say for each phase of a step what one copy of the node sends."""
    home = current_setup.result_of(plan_id, result)
    key = shared_plans.plan_key(result.request, plan_id, plan)
    sent_by_node = _MESSAGES.get(
        key, lambda: overlay.node_messages(plan, shared_plans.model_drawing(result.request), home.graph)
    )
    messages = sent_by_node.get(node.id, [])
    by_phase: dict[str, list[str]] = {}
    for m in messages:
        sent = f"{m['text']} {DONE[str(m['kind'])]} ({m['kind']} over {m['axis']})"
        by_phase.setdefault(str(m["phase"]), []).append(sent)
    return [f"{phase}: {'; '.join(dict.fromkeys(sent))}" for phase, sent in by_phase.items()] or ["it sends nothing"]


def _show_choices(result: Result, node: graph_view.Node) -> None:
    options = graph_view.node_choices(node, result.coarse)
    with st.popover(f"{len(options)} ways to share this work", type="tertiary", key="node_choices"):
        if options:
            st.caption("Along one axis of the mesh: what each GPU holds of the inputs, and of the result")
            rows = [[html.escape(name), _chips(ins), _chips(outs)] for name, ins, outs in options]
            lead = graph_view.lead_op(node)
            out = graph_view.find_block(node, result.coarse).values[lead.outputs[0]].meta if lead else None
            head = f"result {units.shape(out.shape)}" if out else "result"
            frame.show_table(["way", "inputs", head], rows, "choices")
        st.caption(f"{len(node.ops)} operations: {', '.join(f'`{op.name}`' for op in node.ops)}")


def _chips(letters: str) -> str:
    return "".join(frame.chip(p) for p in letters.split())
