"""What a plan does at each node of a drawing: the placements of its tensors, and the collectives that run there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from explorer.graph.scene import Node, Scene, ScopeDrawing
from explorer.text import units, words
from planner_core.core import BlockLabel, BlockPlan, Graph, Op, Plan
from planner_core.cost import Message, MessageSource, cost_model_of, plan_messages


def most_common_variant(plan: Plan, scope: str) -> tuple[str, BlockPlan] | None:
    """Return (label, block plan) of the variant that most copies of a block run; scope "" is the top of the model."""
    if not scope:
        return ("", plan.blocks[""]) if "" in plan.blocks else None
    return max(variants(plan, scope).items(), key=lambda pair: len(pair[1].prefixes), default=None)


def planned_scopes(plan: Plan, drawing: Scene) -> Iterator[tuple[ScopeDrawing, str, BlockPlan]]:
    """Yield each drawing that the plan knows, with the label and the plan of the variant that most copies run."""
    for scope, content in drawing.scopes.items():
        if variant := most_common_variant(plan, scope):
            yield content, *variant


def variants(plan: Plan, scope: str) -> dict[str, BlockPlan]:
    """Return the different plans of the copies of a block, by label (`Block#0`, `Block#1`)."""
    return {label: bp for label, bp in plan.blocks.items() if scope and BlockLabel.parse(label).block == scope}


def node_messages(plan: Plan, drawing: Scene, graph: Graph) -> dict[str, list[dict[str, Any]]]:
    """Return what one copy of each node sends: phase, kind, axis, bytes, times, and where it is drawn."""
    model = cost_model_of(plan)
    messages_of: dict[str, list[dict[str, Any]]] = {}
    for content, label, block in planned_scopes(plan, drawing):
        # One copy stands for all: a node is drawn once, and its messages are those of one copy.
        one = BlockPlan(block.prefixes[:1], block.params, block.sites)
        home = _node_of_site(tuple(p.node for p in content.nodes))
        for m in plan_messages({label: one}, graph, model):
            node = home.get(m.site)
            if node:
                messages_of.setdefault(node, []).append(_message_json(m, plan))
    return messages_of


def _node_of_site(nodes: tuple[Node, ...]) -> Mapping[str, str]:
    by_site = {op.name: n.id for n in nodes for op in n.ops}
    return by_site | {name: n.id for n in nodes for name, _ in n.weights}


MESSAGE_PLACES = {
    MessageSource.RESULT: "after",
    MessageSource.OPERAND: "before",
    MessageSource.WEIGHT: "weight",
    MessageSource.INSIDE: "weight",
}
"""Where a message is drawn at its node."""


def _message_json(m: Message, plan: Plan) -> dict[str, Any]:
    where = MESSAGE_PLACES[m.source]
    return {
        "phase": m.phase,
        "kind": m.kind,
        "axis": plan.mesh.name_of(m.axes),
        "bytes": m.num_bytes,
        "text": units.traffic(m.num_bytes),
        "count": m.count,
        "where": where,
        "what": m.what,
    }


def nodes_without_rule(drawing: Scene, unknown: Iterable[tuple[str, Op]]) -> dict[str, str]:
    """Return the nodes with an op that no rule splits, and a sentence about each (`Result.unknown_ops`)."""
    missing = {(block, op.name) for block, op in unknown}
    sentences = {}
    for scope, content in drawing.scopes.items():
        for n in (p.node for p in content.nodes):
            fns = dict.fromkeys(op.fn for op in n.ops if (scope, op.name) in missing)
            if fns:
                sentences[n.id] = (
                    f"no rule for {', '.join(fns)}: runs whole on every GPU, which may cost more than needed"
                )
    return sentences


def overlay_legends(plan: Plan) -> dict[str, str]:
    """Say what each overlay shows, of which plan, and with its unit."""
    mesh = words.mesh_words(plan.mesh)
    whose = f"{words.title_in_sentence(plan)} on {mesh}"
    sends = f"under {whose}: bytes of whole tensors, in one copy of each block; thicker is more"
    return {
        "memory": f"weights and what is kept for backward, on one GPU under {whose}",
        "flops": f"forward work of one GPU under {whose}; 2 FLOP a multiplication and addition",
        "forward": f"forward {sends}",
        "backward": f"backward {sends}",
    }
