"""How sure a step's time is: the errors of published runs of the same kind (`assets/bands.json`).

For each kind of run the asset holds how predicted and measured time differ, as ln(predicted / measured): its median (`bias`)
and the size that nine in ten stay within (`p90`). Runs of one software stack share an error of their own, which no layout tells
(`stack_sigma`), and a GPU that no run was measured on adds `gpu_sigma`. The parts add up as independent errors do.

Example: FSDP on one node has p90 8.6 %, a stack 5 % (nine in ten: 1.645 times that): hypot(8.6, 8.2) = 11.9 %, so a step of
1 s is shown as 0.89 to 1.13 s.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner_core.core import ASSETS, Cluster, DeviceMesh, P, Plan, Shard

NINE_IN_TEN = 1.645
"""Standard deviations of a normal error that nine in ten stay within."""
DATA, SHARD, TENSOR = "data", "shard", "tensor"
TABLE = ASSETS / "bands.json"


@dataclass(frozen=True, slots=True)
class Band:
    """Factors on the predicted time between which nine in ten runs lie, the kind of run that says so, and how many such runs
    there are."""

    kind: str
    runs: int
    low: float
    high: float
    measured_gpu: bool

    def to_json(self) -> dict[str, Any]:
        """What `plan --json` tells of it."""
        return {"kind": self.kind, "runs": self.runs, "measured_gpu": self.measured_gpu}


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def band_of(plan: Plan, cluster: Cluster) -> Band:
    """The band of a plan on a cluster."""
    table = _table()
    kind = _kind(plan, cluster)
    row = table["kinds"][kind]
    measured = any(cluster.gpu.name.startswith(name) for name in table["measured_gpus"])
    sigma = math.hypot(table["stack_sigma"], 0.0 if measured else table["gpu_sigma"])
    size = math.hypot(row["p90"], NINE_IN_TEN * sigma)
    return Band(kind, row["n"], math.exp(-size), math.exp(size), measured)


def sigma_of(plan: Plan, cluster: Cluster) -> float:
    """Standard deviation of ln(predicted / measured) of runs of a plan's kind: the error that two plans on one machine do not
    share."""
    return float(_table()["kinds"][_kind(plan, cluster)]["sigma"])


def _kind(plan: Plan, cluster: Cluster) -> str:
    """Which of the asset's kinds a plan is: by what is shared over the most distant ranks that share work."""
    roles, sizes = axis_roles(plan), plan.mesh.axis_sizes
    there = {role: axis for axis, (role, n) in enumerate(zip(roles, sizes, strict=True)) if n > 1}
    if TENSOR in there:
        inside = _within_node(plan.mesh, there[TENSOR], cluster)
        return "tensor parallel in a node" if inside else "tensor parallel over nodes"
    if SHARD in there:
        if len(cluster.levels) == 1 or cluster.num_gpus <= cluster.levels[0].size:
            return "FSDP, one node"
        return "FSDP, to 128 GPUs" if cluster.num_gpus <= 128 else "FSDP, more"
    return f"data parallel or ZeRO-1, {'to 64 ranks' if cluster.num_gpus <= 64 else 'more ranks'}"


def _within_node(mesh: DeviceMesh, axis: int, cluster: Cluster) -> bool:
    return mesh.stride(axis) * mesh.axis_sizes[axis] <= cluster.levels[0].size


def axis_roles(plan: Plan) -> tuple[str, ...]:
    """What each mesh axis does for most weights: `data` (they are whole there), `shard` (stored in parts, gathered at use) or
    `tensor` (used in parts)."""
    return tuple(_role(plan, axis) for axis in range(len(plan.mesh.axis_sizes)))


def micro_batch(plan: Plan) -> int:
    """Samples of one micro-batch on one data-parallel rank; ranks that share a sample count as one."""
    ranks = math.prod(n for n, role in zip(plan.mesh.axis_sizes, axis_roles(plan), strict=True) if role != TENSOR)
    return max(1, int(plan.workload["batch"]) // int(plan.workload["accumulate"]) // ranks)


def _role(plan: Plan, axis: int) -> str:
    votes: Counter[str] = Counter()
    for block in plan.blocks.values():
        for param in block.params.values():
            split = any(isinstance(p, Shard) for p in param.stored)
            weight = len(block.prefixes) * (1000 if split else 1)  # norms have a say where nothing else is split
            if not isinstance(param.working[axis], Shard):
                role = DATA if isinstance(param.stored[axis], Shard) or param.gradient[axis] == P else TENSOR
                votes[role] += weight
            else:
                votes[SHARD if axis in param.gathered else TENSOR] += weight
    return votes.most_common(1)[0][0] if votes else DATA


def zero_stage(plan: Plan) -> int:
    """The ZeRO stage at which most weights lie on the axes over which they are used whole."""
    votes: Counter[int] = Counter()
    roles = axis_roles(plan)
    for block in plan.blocks.values():
        for param in block.params.values():
            if not any(isinstance(p, Shard) for p in param.stored):
                continue
            for axis, role in enumerate(roles):
                if role == SHARD:
                    votes[3] += len(block.prefixes)
                elif role == DATA and isinstance(param.stored[axis], Shard):
                    votes[1 if param.gradient[axis] == P else 2] += len(block.prefixes)
    return votes.most_common(1)[0][0] if votes else 0
