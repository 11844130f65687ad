"""How sure a step's time is: the errors of published runs of the same kind (`assets/bands.json`).

For each kind of run the asset holds two numbers about ln(predicted / measured): the median (`bias`), and the size within which
nine in ten runs stay (`p90`). Two more errors are added as independent errors. Runs of one software stack share an error
(`stack_sigma`). A GPU on which no run was measured adds `gpu_sigma`.

    width = hypot(p90, 1.645 · stack_sigma, 1.645 · gpu_sigma if the GPU was not measured)

No eager run was measured to take less than `host.call_s` for each call of an operator, forward and backward together: then the
host, which launches kernels, sets the pace. Where a step's calls take longer at that pace, the band reaches up to it.

Example: FSDP on one node has a p90 of 8.6 %, and a stack 5 %. hypot(8.6, 1.645 · 5) = 11.9 %, so a step of 1 s is shown as
0.89 to 1.13 s.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner_core.core import ASSETS, Cluster, DeviceMesh, Plan
from planner_core.cost import CONTEXT, EXPERT, SHARD, TENSOR, axis_roles

NINE_IN_TEN = 1.645
"""Nine in ten normal errors are within this many standard deviations."""
TABLE = ASSETS / "bands.json"
OVER_NODES = "tensor parallel over nodes"
STAGES = "pipeline stages"
NOT_KNOWN = "not known for this kind of run"


@dataclass(frozen=True, slots=True)
class Band:
    """The two factors on the predicted time between which nine in ten runs are; the kind of run; and the number of runs of it. Of a kind
    of which no runs were published, or none whose machine is known, the factors are None, and `why` says what is missing.
    `host_s`: the seconds of a step whose pace the host sets, if they are more than such runs take; else 0."""

    kind: str
    runs: int
    low: float | None
    high: float | None
    measured_gpu: bool
    host_s: float = 0.0
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The object for `plan --json`."""
        return {
            "kind": self.kind,
            "runs": self.runs,
            "measured_gpu": self.measured_gpu,
            "host_s": self.host_s,
            "why": self.why,
        }


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def band_of(plan: Plan, cluster: Cluster) -> Band:
    """The band of a plan on a cluster."""
    table = _table()
    kind = _kind(plan, cluster)
    row, why = table["kinds"][kind], _unlike(plan, kind)
    measured = any(cluster.gpu.name.startswith(name) for name in table["measured_gpus"])
    sigma = math.hypot(table["stack_sigma"], 0.0 if measured else table["gpu_sigma"])
    if why:
        return Band(NOT_KNOWN, 0, None, None, measured, why=why)
    low = math.exp(-math.hypot(row["p90"], NINE_IN_TEN * sigma))
    high, step = math.exp(math.hypot(row["p90"], NINE_IN_TEN * sigma)), plan.cost.step_time_s
    host_s = 0.0 if plan.workload.get("compiled") else calls_of(plan) * table["host"]["call_s"]
    if host_s <= high * step:
        return Band(kind, row["n"], low, high, measured)
    return Band(kind, row["n"], low, host_s / step, measured, host_s)


def _unlike(plan: Plan, kind: str) -> str:
    """Why no published run tells how sure a plan's time is; empty if some do."""
    roles = {role for role, size in zip(axis_roles(plan), plan.mesh.axis_sizes, strict=True) if size > 1}
    for role, what in ((EXPERT, "deals out experts"), (CONTEXT, "splits the tokens of a sample")):
        if role in roles:
            return f"no published run of which all is known {what}"
    return "the published runs of it do not state the network between their nodes" if kind == OVER_NODES else ""


def calls_of(plan: Plan) -> int:
    """The calls of operators in the forward passes of a step."""
    once = sum(len(block.sites) * len(block.prefixes) for block in plan.blocks.values())
    return once * int(plan.workload["accumulate"])


def sigma_of(plan: Plan, cluster: Cluster) -> float:
    """The standard deviation of ln(predicted / measured) over runs of a plan's kind. Two plans on one machine do not share this
    error."""
    return float(_table()["kinds"][_kind(plan, cluster)]["sigma"])


def _kind(plan: Plan, cluster: Cluster) -> str:
    """The asset's kind of a plan: what the most distant ranks share.

    Experts that are dealt out and tokens of a sample that are split send between operators, as tensor parallelism does. An idle axis
    sends nothing. Plans with stages have one kind."""
    if plan.pipeline is not None:
        return STAGES
    axes = [(role, axis) for axis, role in enumerate(axis_roles(plan)) if plan.mesh.axis_sizes[axis] > 1]
    between = [axis for role, axis in axes if role in (TENSOR, CONTEXT, EXPERT)]
    if between:
        inside = all(_within_node(plan.mesh, axis, cluster) for axis in between)
        return "tensor parallel in a node" if inside else OVER_NODES
    if SHARD in (role for role, _ in axes):
        if len(cluster.levels) == 1 or cluster.num_gpus <= cluster.levels[0].size:
            return "FSDP, one node"
        return "FSDP, to 128 GPUs" if cluster.num_gpus <= 128 else "FSDP, more"
    return f"data parallel or ZeRO-1, {'to 64 ranks' if cluster.num_gpus <= 64 else 'more ranks'}"


def _within_node(mesh: DeviceMesh, axis: int, cluster: Cluster) -> bool:
    return mesh.stride(axis) * mesh.axis_sizes[axis] <= cluster.levels[0].size
