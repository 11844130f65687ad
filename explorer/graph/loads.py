"""The share of one GPU's memory and work that each node of a drawing takes under a plan. Pure.

Memory: the weights as they are stored, their working copies, and what autograd keeps for backward, each storage with the op that
keeps it first. An input that a block keeps counts with the run of blocks; none of the nodes inside counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from explorer.graph.overlay import planned_scopes
from explorer.graph.scene import Node, Scene
from explorer.text import units
from planner_core.core import Block, BlockPlan, Graph, Op, Plan
from planner_core.cost import CostModel, block_of, cost_model_of, split_parts
from planner_core.cost.compute import op_work
from planner_core.cost.memory import BlockMemory, block_memories, param_bytes

NodeLoads = dict[str, tuple[float, float]]
"""Node -> bytes, and forward FLOPs, of one copy on one GPU; of all copies for a run."""
SHADES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Steps of the scale that the legend shows: shades of a node go with the square root of its share of the largest."""


def node_loads(plan: Plan, drawing: Scene, graph: Graph) -> NodeLoads:
    """Compute the load of every node of a drawing."""
    model = cost_model_of(plan)
    memories = block_memories(plan.blocks, graph, model)
    label_of = {prefix: label for label, bp in plan.blocks.items() for prefix in bp.prefixes if label}
    loads: NodeLoads = {}
    for content, label, bp in planned_scopes(plan, drawing):
        block = block_of(graph, label)
        saved, weights = _saved_bytes_by_op(memories[label]), param_bytes(block, bp, model)
        for placed in content.nodes:
            if placed.node.kind not in ("port", "block"):
                loads[placed.node.id] = _node_load(placed.node, block, bp, (weights, saved), model)
    block_loads = {
        label: _block_load(block_of(graph, label), plan.blocks[label], model) for label in set(label_of.values())
    }
    number = dict(zip((call.prefix for call in graph.calls()), graph.top.call_positions, strict=True))
    for k, run in enumerate(drawing.runs):
        calls = [
            (block_loads[label_of[c.prefix]], memories[""].saved_bytes(number[c.prefix]))
            for c in run.calls
            if c.prefix in label_of
        ]
        loads[f"run:{k}"] = sum(w + saved for (w, _), saved in calls), sum(work for (_, work), _ in calls)
    return loads


def node_kept_bytes(plan: Plan, drawing: Scene, graph: Graph) -> dict[str, int]:
    """Return by node the bytes that one GPU keeps for backward in one copy, of one micro-batch."""
    memories = block_memories(plan.blocks, graph, cost_model_of(plan))
    kept: dict[str, int] = {}
    for content, label, _ in planned_scopes(plan, drawing):
        saved = _saved_bytes_by_op(memories[label])
        inside = (p.node for p in content.nodes if p.node.kind not in ("port", "block"))
        kept |= {n.id: sum(saved.get(op.name, 0) for op in n.ops) for n in inside}
    return kept


def _saved_bytes_by_op(block_memory: BlockMemory) -> Mapping[str, int]:
    """Return by op the bytes that it is the first to keep; where forward runs again, those of results that the plan keeps."""
    items, results = block_memory.storages.block.items, block_memory.keys_kept_for_recompute
    plain = block_memory.storages.plan.recompute == "none"
    return {
        op.name: block_memory.saved_bytes(k) if plain else block_memory.size_of(results[k])
        for k, op in enumerate(items)
        if isinstance(op, Op)
    }


def _node_load(
    node: Node, block: Block, bp: BlockPlan, block_bytes: tuple[Mapping[str, int], Mapping[str, int]], model: CostModel
) -> tuple[float, float]:
    """Return the load of one node; `block_bytes` is (bytes by weight of the block, saved bytes by op)."""
    weights, saved = block_bytes
    num_bytes = sum(weights.get(name, 0) for name, _ in node.weights) + sum(saved.get(op.name, 0) for op in node.ops)
    return num_bytes, sum(_op_flops(block, bp, op, model) for op in node.ops)


def _block_load(block: Block, bp: BlockPlan, model: CostModel) -> tuple[float, float]:
    return sum(param_bytes(block, bp, model).values()), sum(_op_flops(block, bp, op, model) for op in block.ops)


def _op_flops(block: Block, bp: BlockPlan, op: Op, model: CostModel) -> float:
    return op_work(op, block.values).flops / split_parts(block, op, bp.sites[op.name], model)


def to_json(loads: NodeLoads) -> dict[str, Any]:
    """Return what the component draws: per overlay each node's words and shade, and the scale of the shades."""
    kinds: tuple[tuple[str, int, Callable[[float], str]], ...] = (
        ("memory", 0, units.memory),
        ("flops", 1, units.flops),
    )
    overlays: dict[str, Any] = {}
    for name, k, words in kinds:
        # Runs are sums of all their copies: beside them every single node would be pale.
        most = max((v[k] for node, v in loads.items() if not node.startswith("run:")), default=0.0) or 1.0
        nodes = {
            node: [words(v[k]) if v[k] else "", round(min(1.0, math.sqrt(v[k] / most)), 3)] for node, v in loads.items()
        }
        overlays[name] = {"nodes": nodes, "scale": [[s, words(most * s * s) if s else "0"] for s in SHADES]}
    return overlays
