"""The fold of a model as data and as text: its unique blocks with their candidates, and the steps of Algorithm 1."""

from __future__ import annotations

from typing import Any

from planner_core.models import fold_steps, list_weight_nodes
from planner_core.ops import CoarseGraph
from planner_core.search.candidates import weight_matrices


def fold_report(coarse: CoarseGraph) -> dict[str, Any]:
    """Return the object of `fold --json`: the graph's sizes, each unique block, and what Algorithm 1 does at each depth."""
    graph = coarse.graph
    repeats = graph.num_repeats
    blocks = []
    for name, block in coarse.blocks.items():
        weights = [block.block.values[w].name for w in weight_matrices(block.block)]
        calls = [c.prefix for c in graph.calls() if c.block == name]
        blocks.append(
            {
                "name": name,
                "repeats": repeats[name],
                "nodes": len(block.groups),
                "ops": len(block.block.ops),
                "weights": weights,
                # A candidate of TAP leaves each matrix whole, or splits it along one of its two dims.
                "candidates": 3 ** len(weights),
                "prefixes": calls,
            }
        )
    steps = [
        {
            "depth": s.depth,
            "stopped": s.stopped,
            "groups": [
                {"pattern": g.pattern, "count": g.count, "similar": g.similar, "kept": g.kept, "reason": g.reason}
                for g in s.groups
            ],
        }
        for s in fold_steps(list_weight_nodes(graph))
    ]
    return {
        "schema": "shardscope.fold/1",
        "model": {"name": graph.name, "params": graph.num_params, "source": graph.source},
        "ops": graph.num_ops,
        "nodes": coarse.num_nodes,
        "unique_nodes": len(coarse.top.groups) + sum(len(b.groups) for b in coarse.blocks.values()),
        "unique_blocks": blocks,
        "algorithm1": steps,
    }


def fold_text(data: dict[str, Any]) -> str:
    """Return the report as text."""
    lines = [
        f"{data['model']['name']}: {data['ops']} ops, {data['nodes']} groups, {data['unique_nodes']} after folding",
        "",
        *(
            f"{b['name']} x{b['repeats']}: {b['nodes']} groups, {len(b['weights'])} weight matrices, {b['candidates']} candidate plans"
            for b in data["unique_blocks"]
        ),
        "",
        "Algorithm 1, by depth of the module path:",
    ]
    for step in data["algorithm1"]:
        groups = [g for g in step["groups"] if g["kept"]]
        patterns = "; ".join(f"{g['pattern']} x{g['count']}" for g in groups) or "nothing repeats"
        lines.append(f"  depth {step['depth']}: {patterns}{' (stop)' if step['stopped'] else ''}")
    return "\n".join(lines)
