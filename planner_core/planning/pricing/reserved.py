"""What PyTorch's allocator will have reserved, which is more than the tensors of the fullest moment (`assets/reserved.json`).

The allocator keeps blocks that were freed, and pieces between those in use. A tool that asks the allocator or the driver shows
these too. Published runs tell how much they are:

    reserved = scale · peak + add_bytes

Both numbers are fitted to runs of one kind. Weights that are gathered and freed leave more behind than weights that stay whole. The
program that a plan runs as (stack `torch`) keeps its buffers, so it leaves less than either; it was measured by `bench.gpu`.
CUDA's context and NCCL's buffers lie outside the allocator and are not counted.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from planner_core.core import ASSETS, USUAL_STACK, Cluster, Plan
from planner_core.cost import SHARD, axis_roles

TABLE = ASSETS / "reserved.json"
GATHERED, WHOLE, OWN = "weights gathered and freed", "weights whole", "plans as they run"


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes that the allocator of the fullest GPU will have reserved, at most all that the GPU has. Nine in ten of the measured runs
    of its kind, of which there are `runs`, were measured between `low_bytes` and `high_bytes`. `short`: it would take more than the
    GPU has, so it must free blocks and allocate them anew."""

    kind: str
    runs: int
    likely_bytes: int
    low_bytes: int
    high_bytes: int
    short: bool

    def to_json(self) -> dict[str, Any]:
        """The object for `plan --json`."""
        return asdict(self)


@cache
def _kinds() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(TABLE.read_text(encoding="utf-8"))["kinds"]
    return found


def _kind_of(plan: Plan) -> str:
    """The asset's kind of a plan. One with weights in 4 bits is run by another program, whatever its stack."""
    adapters = (plan.model.get("config") or {}).get("lora") or {}
    if plan.workload.get("stack") in (None, USUAL_STACK) and "weights" not in adapters:
        return OWN
    sizes = zip(axis_roles(plan), plan.mesh.axis_sizes, strict=True)
    return GATHERED if any(role == SHARD and size > 1 for role, size in sizes) else WHOLE


def reserved_of(plan: Plan, cluster: Cluster) -> Reserved:
    """What the allocator will have reserved under a plan."""
    kind, most = _kind_of(plan), cluster.gpu.memory_bytes
    row = _kinds()[kind]
    likely = row["scale"] * plan.cost.memory_bytes["peak"] + row["add_bytes"]
    peak, low, high = (min(most, round(likely * factor)) for factor in (1.0, row["low"], row["high"]))
    return Reserved(kind, int(row["n"]), peak, low, high, short=likely > most)
