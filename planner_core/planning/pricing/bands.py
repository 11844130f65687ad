"""Bound the error of a predicted step by the errors of published runs of the same kind (`assets/bands.json`).

For each kind of run the asset holds two numbers about ln(predicted / measured): the median (`bias`), and the bound that nine in ten
runs stay within (`p90`), where each run is predicted by a fit that has not seen its source. Two further errors are added as independent:
runs of one software stack share an error (`stack_sigma`), and a GPU without measured runs adds `gpu_sigma`.

    width = hypot(p90, 1.645 · stack_sigma, 1.645 · gpu_sigma if the GPU was not measured)

No eager run was measured to take less than `host.call_s` for each call of an operator, forward and backward together, since the host
launches each kernel. If the calls of a step take longer at that pace, the band extends up to it: but only for a software stack whose
own pace is not known, since elsewhere the step has its waits for the host already (`cost.schedule.host`).

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

Z_NINE_IN_TEN = 1.645
"""Nine in ten normal errors are within this many standard deviations."""
BANDS_FILE = ASSETS / "bands.json"
OVER_NODES = "tensor parallel over nodes"
RUNS_WITH_STAGES = "pipeline stages"
UNKNOWN_BAND = "not known for this kind of run"


@dataclass(frozen=True, slots=True)
class Band:
    """The range of a step's time.

    Attributes:
        kind: The kind of run.
        runs: The number of published runs of this kind.
        low, high: Factors on the predicted time; nine in ten runs lie between them. None without published runs of a known machine.
        measured_gpu: Whether runs on this GPU were measured.
        host_s: Seconds of a step at the host's pace, if they exceed the band; otherwise 0.
        why: The missing evidence, if the factors are None.
    """

    kind: str
    runs: int
    low: float | None
    high: float | None
    measured_gpu: bool
    host_s: float = 0.0
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the object for `plan --json`."""
        return {
            "kind": self.kind,
            "runs": self.runs,
            "measured_gpu": self.measured_gpu,
            "host_s": self.host_s,
            "why": self.why,
        }


@cache
def _load_bands() -> dict[str, Any]:
    bands: dict[str, Any] = json.loads(BANDS_FILE.read_text(encoding="utf-8"))
    return bands


def count_runs(kind: str) -> int:
    """Return the number of published runs by which plans of a kind have their band."""
    return int(_load_bands()["kinds"][kind]["n"])


def time_band(plan: Plan, cluster: Cluster) -> Band:
    """Return the band of a plan on a cluster."""
    table = _load_bands()
    kind = _kind_of_run(plan, cluster)
    row, why = table["kinds"][kind], _missing_evidence(plan, kind)
    # Files name variants of a GPU after it, so the beginning of the name decides.
    measured = any(cluster.gpu.name.startswith(name) for name in table["measured_gpus"])
    sigma = math.hypot(table["stack_sigma"], 0.0 if measured else table["gpu_sigma"])
    if why:
        return Band(UNKNOWN_BAND, 0, None, None, measured, why=why)
    low = math.exp(-math.hypot(row["p90"], Z_NINE_IN_TEN * sigma))
    high, step = math.exp(math.hypot(row["p90"], Z_NINE_IN_TEN * sigma)), plan.cost.step_time_s
    # The floor was measured of eager runs alone, whose host launches each kernel. A step of 12.0 s on torch, with 1 ms of waits, was said
    # to take up to 43.8 s.
    priced = plan.workload.compiled or plan.workload.resolved().call_s
    host_s = 0.0 if priced else num_operator_calls(plan) * table["host"]["call_s"]
    # The floor only extends the band upwards: its lower end stays that of the published runs.
    if host_s <= high * step:
        return Band(kind, row["n"], low, high, measured)
    return Band(kind, row["n"], low, host_s / step, measured, host_s)


def _missing_evidence(plan: Plan, kind: str) -> str:
    """Return the reason why no published run bounds the error of a plan; empty if some do."""
    roles = {role for role, size in zip(axis_roles(plan), plan.mesh.axis_sizes, strict=True) if size > 1}
    for role, what in ((EXPERT, "deals out experts"), (CONTEXT, "splits the tokens of a sample")):
        if role in roles:
            return f"no published run of which all is known {what}"
    return "the published runs of it do not state the network between their nodes" if kind == OVER_NODES else ""


def num_operator_calls(plan: Plan) -> int:
    """Return the calls of operators in the forward passes of a step, on each rank of a pipeline."""
    calls = sum(len(block.sites) * len(block.prefixes) for block in plan.blocks.values())
    # Each rank of a pipeline has a host, which issues its own stages alone.
    return calls * plan.accumulate // (plan.pipeline.ranks if plan.pipeline else 1)


def time_sigma(plan: Plan, cluster: Cluster) -> float:
    """The standard deviation of ln(predicted / measured) over runs of a plan's kind.

    It leaves out the errors of the stack and the GPU, which two plans on one machine share."""
    return float(_load_bands()["kinds"][_kind_of_run(plan, cluster)]["sigma"])


def _kind_of_run(plan: Plan, cluster: Cluster) -> str:
    """Return the asset's kind of a plan, by the parallelism between its most distant ranks.

    Expert and context parallelism communicate between operators as tensor parallelism does, so they count as it. An axis of one rank
    does not count. All plans with stages are one kind, unless operators of a stage communicate over nodes: no published run with stages
    does, so its band says nothing of such a plan."""
    axes = [(role, axis) for axis, role in enumerate(axis_roles(plan)) if plan.mesh.axis_sizes[axis] > 1]
    between = [axis for role, axis in axes if role in (TENSOR, CONTEXT, EXPERT)]
    inside = all(_within_node(plan.mesh, axis, cluster) for axis in between)
    # First, since neither stages nor shards change that no run of this kind states its network.
    if not inside:
        return OVER_NODES
    if plan.pipeline is not None:
        return RUNS_WITH_STAGES
    # Between operators nothing hides a message, so tensor ranks decide the error where there are both kinds of axes.
    if between:
        return "tensor parallel in a node"
    if SHARD in (role for role, _ in axes):
        if cluster.is_one_node:
            return "FSDP, one node"
        return "FSDP, to 128 GPUs" if cluster.num_gpus <= 128 else "FSDP, more"
    return f"data parallel or ZeRO-1, {'to 64 ranks' if cluster.num_gpus <= 64 else 'more ranks'}"


def _within_node(mesh: DeviceMesh, axis: int, cluster: Cluster) -> bool:
    return mesh.stride(axis) * mesh.axis_sizes[axis] <= cluster.near_gpus
