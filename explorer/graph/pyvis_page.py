"""The folded graph as one HTML page that asks nothing of any other host (pyvis, positions fixed, no physics)."""

from __future__ import annotations

import html
import re
from itertools import pairwise

from pyvis.network import Network

from explorer.graph.scene import PlacedNode, Scene, ScopeDrawing, Wire, build_scene, node_facts
from planner_core.ops import CoarseGraph

NODE_COLOURS = {
    "weight": "#cfe3f1",
    "attention": "#cdeae0",
    "loss": "#f6dccb",
    "block": "#efd9e6",
    "norm": "#eceff2",
    "join": "#eceff2",
    "op": "#eceff2",
    "port": "#ffffff",
}
GAP, STRETCH = 160.0, 1.35
EXTERNAL = re.compile(
    r"<(?:link|script)\b[^>]*\b(?:href|src)=[\"']https?://[^>]*>(?:\s*</script>)?", re.IGNORECASE | re.DOTALL
)


def folded_page(coarse: CoarseGraph, title: str) -> str:
    """Return a page with the top graph and, right of it, each unique block once with its ×N."""
    drawing = build_scene(coarse)
    net = Network(height="100vh", width="100%", directed=True, cdn_resources="in_line", heading="")
    left = 0.0
    for name, scope in _top_first(drawing):
        _add_caption(net, drawing, name, left + scope.width / 2)
        for placed in scope.nodes:
            _add_node(net, name, placed, left)
        for wire in scope.wires:
            _add_wire(net, name, wire, left)
        left += scope.width + GAP
    net.set_options(
        '{"physics": {"enabled": false}, "edges": {"smooth": false}, "interaction": {"hover": true, "keyboard": true}}'
    )
    page: str = net.generate_html(notebook=False)
    page = EXTERNAL.sub("", page)
    return page.replace("<head>", f"<head><title>{html.escape(title)}</title>", 1)


def _add_wire(net: Network, scope: str, wire: Wire, left: float) -> None:
    """Draw an edge; one in a side lane goes through the lane's corners, so that it crosses no node."""
    lane = any(a[1] == b[1] for a, b in pairwise(wire.points))
    stops = [_vis_id(scope, wire.src)]
    for k, (x, y) in enumerate(wire.points[1:-1] if lane else ()):
        stops.append(f"corner\n{scope}\n{wire.src}\n{wire.dst}\n{k}")
        net.add_node(
            stops[-1], label=" ", x=left + x, y=y * STRETCH, shape="dot", size=0.1, physics=False, color="#7a8590"
        )
    stops.append(_vis_id(scope, wire.dst))
    for k, (a, b) in enumerate(pairwise(stops), 2):
        net.add_edge(a, b, arrows="to" if k == len(stops) else "", color="#7a8590")


def _top_first(drawing: Scene) -> list[tuple[str, ScopeDrawing]]:
    return [("", drawing.scopes[""]), *((n, s) for n, s in drawing.scopes.items() if n)]


def _vis_id(scope: str, node: str) -> str:
    return f"{scope}\n{node}"


def _add_caption(net: Network, drawing: Scene, scope: str, x: float) -> None:
    copies = sum(len(r.calls) for r in drawing.runs if r.block == scope)
    words = f"{drawing.titles.get(scope, scope)}  ×{copies}" if scope else drawing.title
    net.add_node(
        f"caption\n{scope}", label=words, x=x, y=-70, shape="text", physics=False, font={"size": 22, "color": "#1c2024"}
    )


def _add_node(net: Network, scope: str, placed: PlacedNode, left: float) -> None:
    n = placed.node
    lines = [f"{k}: {v}" for k, v in node_facts(n)] if n.kind != "port" else []
    net.add_node(
        _vis_id(scope, n.id),
        label=f"{n.name}\n{n.sub}" if n.sub else n.name,
        title="\n".join([n.name, *lines]),
        x=left + placed.x,
        y=placed.y * STRETCH,
        shape="box",
        color={"background": NODE_COLOURS[n.kind], "border": "#7a8590"},
        physics=False,
        font={"size": 13, "color": "#1c2024"},
    )
