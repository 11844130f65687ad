"""The lines of a plan's generated code, linked with the nodes of the model's drawing."""

from __future__ import annotations

from typing import Any

from explorer.graph.scene import Scene
from explorer.jobs.code import Code, Function

HEIGHT = 640
LABEL = "Generated code. Arrow keys walk the lines, and the graph outlines the node of each."


def linked(code: Code, drawing: Scene) -> dict[str, Any]:
    """What code.js draws. The block that is repeated most is shown first."""
    nodes = {
        (name, op.name): placed.node.id
        for name, scope in drawing.scopes.items()
        for placed in scope.nodes
        for op in placed.node.ops
    }
    lines: list[dict[str, Any]] = []
    starts: dict[str, int] = {}
    for function in code.functions:
        starts.setdefault(function.block, len(lines))
        lines += _lines(function, nodes)
    most = max(drawing.runs, key=lambda run: len(run.calls), default=None)
    first = starts.get(most.block, 0) if most is not None else 0
    return {"label": LABEL, "height": HEIGHT, "first": first, "lines": lines}


def _lines(function: Function, nodes: dict[tuple[str, str], str]) -> list[dict[str, Any]]:
    found = []
    for line in function.lines:
        own = dict.fromkeys(nodes[function.block, op] for op in line.ops if (function.block, op) in nodes)
        found.append({"text": line.text, "nodes": list(own), "head": line.text.startswith("def ")})
    return [*found, *({"text": "", "nodes": [], "head": False} for _ in range(2))]
