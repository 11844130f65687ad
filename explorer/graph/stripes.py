"""How a plan splits the weight of each node of a drawing, as a stripe of parts and a few words. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorer.graph.overlay import planned_scopes
from explorer.graph.scene import Node, Scene
from planner_core.core import BlockPlan, DeviceMesh, ParamPlan, Plan, Shard

WHOLE, SHARDED, SPLIT, BOTH = "whole", "sharded", "split", "both"


@dataclass(frozen=True, slots=True)
class WeightSplit:
    """How a weight is split over the mesh.

    `gathered`: GPUs that it is sharded over and gathered from at use. `stored`: GPUs that share the optimizer's part alone.
    `split`: parts of each dim where the weight is used.
    """

    gathered: int
    stored: int
    split: Mapping[int, int]

    @property
    def parts(self) -> int:
        """Different parts of the weight that GPUs keep between uses; what the optimizer alone shards does not count."""
        return self.gathered * math.prod(self.split.values())

    @property
    def kind(self) -> str:
        """Which of the four looks it has."""
        rest, used = self.gathered > 1, bool(self.split)
        return BOTH if rest and used else SHARDED if rest else SPLIT if used else WHOLE

    @property
    def words(self) -> str:
        """`FSDP 16`, `dim 0 / 8`, `FSDP 2 · dim 1 / 8`.

        A dim is not called rows or columns: PyTorch keeps a linear layer's outputs in dim 0, and the course draws them as columns.
        """
        parts = [f"FSDP {self.gathered}"] if self.gathered > 1 else []
        parts += [f"ZeRO {self.stored}"] if self.stored > 1 else []
        parts += [f"dim {d} / {n}" for d, n in self.split.items()]
        return " · ".join(parts) or WHOLE

    @property
    def sentence(self) -> str:
        """The same for who does not know these words; they stand in brackets, as the graph and the names of plans have them."""
        parts = []
        if self.gathered > 1:
            parts.append(
                f"each of {self.gathered} GPUs keeps a part, gathered whole for each use (FSDP {self.gathered})"
            )
        if self.stored > 1:
            parts.append(
                f"each of {self.stored} GPUs updates a part, and all of them hold the whole (ZeRO {self.stored})"
            )
        parts += [f"each of {n} GPUs computes with a part alone (dim {d} / {n})" for d, n in self.split.items()]
        return "; ".join(parts) or "every GPU holds the whole"


def split_of(p: ParamPlan, mesh: DeviceMesh) -> WeightSplit:
    """Return how a weight is split over a mesh."""
    gathered, stored = 1, 1
    split: dict[int, int] = {}
    for axis, n in enumerate(mesh.axis_sizes):
        rest, used = p.stored[axis], p.working[axis]
        if n == 1 or not isinstance(rest, Shard):
            continue
        if axis in p.gathered:
            gathered *= n
        elif isinstance(used, Shard):
            # Two axes may split one dim: dim 0 over 2 and over 4 ranks is in 8 parts.
            split[used.dim] = split.get(used.dim, 1) * n
        else:
            stored *= n
    return WeightSplit(gathered, stored, split)


def largest_weight(node: Node, block: BlockPlan) -> tuple[str, ParamPlan] | None:
    """Return the largest weight of a node, and its plan."""
    planned = [w for w in node.weights if w[0] in block.params]
    name = max(planned, key=lambda w: (len(w[1].shape), w[1].num_bytes), default=None)
    return (name[0], block.params[name[0]]) if name else None


def node_stripes(plan: Plan, drawing: Scene) -> dict[str, dict[str, Any]]:
    """Return the stripe that the component draws for each node; of a run of blocks, that of most of its weights."""
    stripes: dict[str, dict[str, Any]] = {}
    common: dict[str, WeightSplit] = {}
    for content, _, block in planned_scopes(plan, drawing):
        splits: list[WeightSplit] = []
        for node in (p.node for p in content.nodes):
            weight = largest_weight(node, block)
            if weight and node.kind == "weight":
                splits.append(split := split_of(weight[1], plan.mesh))
                stripes[node.id] = _stripe_json(split)
        if splits:
            common[content.name] = max(splits, key=splits.count)
    for k, run in enumerate(drawing.runs):
        if run.block in common:
            stripes[f"run:{k}"] = _stripe_json(common[run.block])
    return stripes


def node_stages(plan: Plan, drawing: Scene) -> dict[str, list[list[int]]]:
    """Return by node of the top (stage, copies of it) in order, for a plan with pipeline stages.

    A node that is not a run has one stage: that of the last copy before it, or the first stage.
    """
    cut = plan.pipeline
    if cut is None:
        return {}
    stages = [stage for stage, copies in enumerate(cut.copies) for _ in range(copies)]
    stages_of: dict[str, list[list[int]]] = {}
    ends = []  # where a run stands, and the stage of its last copy
    for k, run in enumerate(drawing.runs):
        run_stages, stages = stages[: len(run.calls)], stages[len(run.calls) :]
        stages_of[f"run:{k}"] = [[stage, run_stages.count(stage)] for stage in dict.fromkeys(run_stages)]
        ends.append((next(p.y for p in drawing.scopes[""].nodes if p.node.id == f"run:{k}"), run_stages[-1]))
    for placed in drawing.scopes[""].nodes:
        if placed.node.kind not in ("port", "block"):
            above = [stage for y, stage in ends if y < placed.y]
            stages_of[placed.node.id] = [[above[-1] if above else 0, 1]]
    return stages_of


def _stripe_json(lie: WeightSplit) -> dict[str, Any]:
    return {"n": lie.parts, "kind": lie.kind, "words": lie.words}
