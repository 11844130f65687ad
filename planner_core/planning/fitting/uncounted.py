"""What stands beside the planned memory: tensors that a model makes of its inputs alone, where they are large.

The memory of a plan holds what is computed from weights. Inputs, masks and positions are small beside it in most models. Some make
more of them: BROS makes a sinusoid of 192 numbers for each pair of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner_core.core import ITEM_BYTES, Graph, Op, Plan, Value, local_shape, root
from planner_core.cost import block_of

TOLD, LEAST = 0.02, 2**24
"""Such tensors are told from this share of a plan's peak on, and from so many bytes on."""


def uncounted(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """A note about the operator that takes most bytes of such tensors, if these are many beside the plan's peak."""
    taken, op, largest = max(_taken(plan, graph), key=lambda found: found[0], default=(0, None, None))
    if op is None or largest is None or taken < max(LEAST, TOLD * plan.cost.memory_bytes["peak"]):
        return ()
    shape = " x ".join(f"{n:,}" for n in largest.meta.shape)
    return (
        f"what the model makes of its inputs alone is not in the planned memory: {taken / 2**30:.2f} GiB per GPU at {op.name} alone "
        f"({largest.meta.dtype}, {shape} on all GPUs together)",
    )


def _taken(plan: Plan, graph: Graph) -> Iterator[tuple[int, Op, Value]]:
    """For each operator that takes such tensors: their bytes on one GPU, and the largest of them."""
    for label, way in plan.blocks.items():
        block = block_of(graph, label)
        for op in block.ops:
            found: dict[int, tuple[int, Value]] = {}
            for value, edge in zip(op.inputs, way.sites[op.name].inputs, strict=True):
                made = block.values[value]
                if made.kind == "constant":
                    part = math.prod(local_shape(made.meta.shape, edge.dst.forward, plan.mesh.axis_sizes))
                    found[root(block, value)] = (part * ITEM_BYTES[made.meta.dtype], made)
            if found:
                yield sum(n for n, _ in found.values()), op, max(found.values(), key=lambda f: f[0])[1]
