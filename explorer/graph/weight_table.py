"""The weights of a plan as rows of a table: pattern, shape, placement per mesh axis, bytes per GPU. No Streamlit here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from explorer.graph.scene import Scene
from explorer.text import units
from explorer.text.glossary import GLOSSARY
from planner_core.core import ParamPlan, Plan, TensorMeta, glob_name
from planner_core.ops import CoarseGraph


def table(
    plan: Plan, coarse: CoarseGraph, drawing: Scene, node: str, candidate: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    """What weights.js draws. `node` marks the rows of one node of the graph; `candidate` maps (block, weight) to a letter
    that stands in a column of its own."""
    axes = [(i, n) for i, n in enumerate(plan.mesh.axis_names) if plan.mesh.axis_sizes[i] > 1]
    nodes = by_weight(drawing)
    rows = []
    for label, block in plan.blocks.items():
        name = label.partition("#")[0]
        values = (coarse.blocks[name] if name else coarse.top).block.values
        shapes = {v.name: v.meta for v in values if v.kind == "parameter"}
        pattern = glob_name(block.prefixes)
        for weight, p in block.params.items():
            home = nodes.get((name, weight), "")
            cells: list[Any] = [
                units.shape(shapes[weight].shape) if weight in shapes else "",
                *(_cell(p, i) for i, _ in axes),
            ]
            if candidate:
                letter = candidate.get((name, weight))
                cells.append({"chip": letter} if letter else "")
            cells.append(per_gpu(plan, p, shapes.get(weight), len(block.prefixes)))
            rows.append({
                "name": f"{pattern}.{weight}" if pattern else weight, "node": home, "cells": cells,
                "times": len(block.prefixes) if len(block.prefixes) > 1 else 0, "picked": bool(home) and home == node,
            })  # fmt: skip
    head = ["weight", "shape", *(f"on {n} ({plan.mesh.axis_sizes[i]})" for i, n in axes)]
    return {
        "label": "placement of every weight", "rows": rows, "told": {k: GLOSSARY[k] for k in ("R", "S", "P", "gathered at use")},
        "head": [*head, *(["candidate"] if candidate else []), "per GPU"],
    }  # fmt: skip


def _cell(p: ParamPlan, axis: int) -> list[Any]:
    when = " gathered at use" if axis in p.gathered else " gathered once a step" if axis in p.gathered_once else ""
    return [{"chip": str(p.stored[axis])}, when]


def by_weight(drawing: Scene) -> dict[tuple[str, str], str]:
    """(block, weight) -> the node of the graph that uses it first."""
    found: dict[tuple[str, str], str] = {}
    for scope, content in drawing.scopes.items():
        for placed in content.nodes:
            for name, _ in placed.node.weights:
                found.setdefault((scope, name), placed.node.id)
    return found


def run_of(drawing: Scene, node: str) -> str:
    """What has to be open on the Fold page for a node to show: its block's first run, or nothing."""
    scope = node.rpartition(":")[0]
    return next((f"run:{k}" for k, r in enumerate(drawing.runs) if r.block == scope), "") if scope else ""


def per_gpu(plan: Plan, p: ParamPlan, meta: TensorMeta | None, copies: int) -> str:
    """Bytes that one GPU keeps of all copies of a weight."""
    if meta is None:
        return ""
    return units.memory(meta.num_bytes * copies / split(p.stored, plan.mesh.axis_sizes))


def split(stored: Sequence[object], sizes: Sequence[int]) -> int:
    """Into how many slices a weight is cut."""
    return math.prod(n for p, n in zip(stored, sizes, strict=True) if str(p).startswith("S"))
