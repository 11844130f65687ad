"""A drawing as plain data for the component in the browser."""

from __future__ import annotations

from typing import Any

from explorer.graph.scene import PlacedNode, Scene, node_facts


def to_json(drawing: Scene) -> dict[str, Any]:
    """Return plain data for the component. All text is text: the component never reads it as markup."""
    return {
        "title": drawing.title,
        "scopes": {
            name: {
                "w": s.width,
                "h": s.height,
                "nodes": [_node_json(p, drawing) for p in s.nodes],
                "wires": [[w.src, w.dst, [c for p in w.points for c in p]] for w in s.wires],
            }
            for name, s in drawing.scopes.items()
        },
    }


def _node_json(p: PlacedNode, drawing: Scene) -> dict[str, Any]:
    n = p.node
    data: dict[str, Any] = {
        "id": n.id,
        "name": n.name,
        "sub": n.sub,
        "kind": n.kind,
        "x": p.x,
        "y": p.y,
        "w": p.width,
        "h": p.height,
    }
    if n.kind == "block":
        data["scope"] = drawing.runs[n.call].block
        data["copies"] = n.copies
    if n.kind != "port":
        data["facts"] = node_facts(n)
    return data
