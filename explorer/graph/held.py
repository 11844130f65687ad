"""What one GPU holds of one kind of memory at the peak, node by node of a drawing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from explorer.graph.loads import Loads
from explorer.graph.overlay import variant
from explorer.graph.scene import Scene
from planner_core.core import Graph, Plan
from planner_core.cost import cost_model_of
from planner_core.cost.memory import Held, tensors_at_peak


def tensors(plan: Plan, graph: Graph, kind: str) -> list[Held]:
    """Every tensor of a kind that one GPU holds at the peak, the largest first; their bytes add up to the plan's figure."""
    return [h for h in tensors_at_peak(plan.blocks, graph, cost_model_of(plan)) if h.kind == kind]


def by_node(found: Iterable[Held], plan: Plan, drawing: Scene, way: str = "") -> Loads:
    """Bytes of each node in one copy on one GPU, of all copies for a run of blocks; a tensor that belongs to no node counts with the
    blocks that it is of, and with nothing where it is of none. `way` as in `overlay.variant`."""
    names = _names(drawing)
    shown = {scope: one[0] for scope in drawing.scopes if (one := variant(plan, drawing, scope, way))}
    sums: dict[str, float] = {}

    def add(node: str, num_bytes: float) -> None:
        sums[node] = sums.get(node, 0.0) + num_bytes

    for h in found:
        scope = h.block.partition("#")[0]
        said = (word.strip(",:") for word in h.what.split())
        node = next((names[scope, word] for word in said if (scope, word) in names), "")
        if not scope:
            if node:
                add(node, h.total_bytes)
            continue
        prefixes = plan.blocks[h.block].prefixes
        if node and shown.get(scope) == h.block:
            add(node, h.total_bytes / len(prefixes))
        for k, run in enumerate(drawing.runs):
            if calls := sum(c.prefix in prefixes for c in run.calls):
                add(f"run:{k}", h.total_bytes * calls / len(prefixes))
    return {node: (num_bytes, 0.0) for node, num_bytes in sums.items()}


def _names(drawing: Scene) -> Mapping[tuple[str, str], str]:
    """(block, name of a weight, an operation or a call) -> its node."""
    found = {("", c.prefix): f"run:{k}" for k, run in enumerate(drawing.runs) for c in run.calls}
    for scope, content in drawing.scopes.items():
        for placed in content.nodes:
            for name in (*(w for w, _ in placed.node.weights), *(op.name for op in placed.node.ops)):
                found.setdefault((scope, name), placed.node.id)
    return found
