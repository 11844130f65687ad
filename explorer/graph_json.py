"""A drawing as plain data for the component in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer import units
from explorer.graph_view import Node, Placed, Scene, facts


def to_json(drawing: Scene) -> dict[str, Any]:
    """Plain data for the component. All text is text: the component never reads it as markup."""
    sizes = {n.id: _sizes(n, drawing) for s in drawing.scopes.values() for p in s.nodes if (n := p.node).kind != "port"}
    most = [
        max((size[i] for name, size in sizes.items() if not name.startswith("run:")), default=1) or 1 for i in (0, 1)
    ]
    return {
        "title": drawing.title,
        "scopes": {
            name: {
                "w": s.width,
                "h": s.height,
                "nodes": [_node_json(p, drawing, sizes, most) for p in s.nodes],
                "wires": [[w.src, w.dst, [c for p in w.points for c in p]] for w in s.wires],
            }
            for name, s in drawing.scopes.items()
        },
    }


def _sizes(node: Node, drawing: Scene) -> tuple[int, int]:
    """(forward FLOPs, bytes of weights and of what is kept for backward); of all copies for a run."""
    if node.kind != "block":
        return node.flops, node.saved_bytes + node.weight_bytes
    run = drawing.runs[node.call]
    inner = [p.node for p in drawing.scopes[run.block].nodes if p.node.kind != "port"]
    times = len(run.calls)
    return sum(n.flops for n in inner) * times, sum(n.saved_bytes + n.weight_bytes for n in inner) * times


def _node_json(p: Placed, drawing: Scene, sizes: Mapping[str, tuple[int, int]], most: list[int]) -> dict[str, Any]:
    n = p.node
    data: dict[str, Any] = {
        "id": n.id,
        "label": n.label,
        "sub": n.sub,
        "kind": n.kind,
        "x": p.x,
        "y": p.y,
        "w": p.width,
        "h": p.height,
    }
    if n.kind == "port":
        return data
    if n.kind == "block":
        data["scope"] = drawing.runs[n.call].block
    work, kept = sizes[n.id]
    data |= {
        "flops_text": units.flops(work) if work else "",
        "flops_share": min(1.0, work / most[0]),
        "memory_text": units.memory(kept) if kept else "",
        "memory_share": min(1.0, kept / most[1]),
        "facts": facts(n),
    }
    return data
