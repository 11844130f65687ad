"""Why no plan fits: there is too little memory, or the number of GPUs does not divide the model's sizes."""

from __future__ import annotations

import math

from planner_core.core import Graph, Plan, Shard
from planner_core.cost import block_of

MOSTLY = 0.5
"""An axis is called idle if less than this share of the weights' elements is sharded on it."""


def shortage(least: Plan, graph: Graph, budget: float) -> str:
    """The message for a model whose plan of least memory, `least`, needs more than `budget` bytes per GPU."""
    peak = least.cost.memory_bytes["peak"]
    needs = f"the least memory that any plan needs is {peak / 1e9:.1f} GB per GPU, but there are {budget / 1e9:.1f} GB"
    idle = idle_axes(least, graph)
    if not idle:
        return needs
    gpus, sizes = least.mesh.num_devices, " x ".join(f"{least.mesh.axis_sizes[a]:,}" for a in idle)
    even = 2 ** int(math.log2(gpus))
    better = f"; {even:,} GPUs would" if even != gpus else ""
    return (
        f"{needs}. Most of the {gpus:,} GPUs hold the same weights: batch {least.workload['batch']:,} and the sizes of this model "
        f"do not divide by {sizes}{better}"
    )


def idle_axes(plan: Plan, graph: Graph) -> list[int]:
    """The mesh axes of more than one device on which most of the weights are not sharded."""
    total, split = 0, [0] * len(plan.mesh.axis_sizes)
    for label, plans in plan.blocks.items():
        for value in block_of(graph, label).values:
            if value.kind == "parameter" and value.name in plans.params:
                elements = math.prod(value.meta.shape) * len(plans.prefixes)
                total += elements
                for axis, placement in enumerate(plans.params[value.name].stored):
                    split[axis] += elements * isinstance(placement, Shard)
    return [a for a, n in enumerate(plan.mesh.axis_sizes) if n > 1 and split[a] < MOSTLY * total]
