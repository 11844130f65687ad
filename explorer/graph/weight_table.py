"""The weights of a plan as rows of a table: pattern, shape, placement per mesh axis, bytes per GPU. No Streamlit here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.graph.scene import Scene
from explorer.text import units
from explorer.text.glossary import GLOSSARY
from planner_core.core import Block, BlockPlan, ParamPlan, Plan, glob_name
from planner_core.cost import CostModel, cost_model_of
from planner_core.cost.memory import param_bytes
from planner_core.ops import CoarseGraph


def table(
    plan: Plan, coarse: CoarseGraph, drawing: Scene, node: str, candidate: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    """What weights.js draws. `node` marks the rows of one node of the graph; `candidate` maps (block, weight) to a letter
    that stands in a column of its own."""
    axes = [(i, n) for i, n in enumerate(plan.mesh.axis_names) if plan.mesh.axis_sizes[i] > 1]
    nodes, model = by_weight(drawing), cost_model_of(plan)
    rows = []
    for label, block in plan.blocks.items():
        name = label.partition("#")[0]
        content = (coarse.blocks[name] if name else coarse.top).block
        shapes = {v.name: v.meta for v in content.values if v.kind == "parameter"}
        held = per_gpu(content, block, model)
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
            cells.append(units.memory(held[weight]) if weight in held else "")
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


def per_gpu(content: Block, block: BlockPlan, model: CostModel) -> dict[str, int]:
    """By weight: bytes that one GPU keeps of it and of its working copy, for all copies of the block."""
    return {weight: len(block.prefixes) * size for weight, size in param_bytes(content, block, model).items()}
