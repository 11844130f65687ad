"""Predict the memory that PyTorch's allocator reserves, which exceeds the tensors of the fullest moment (`assets/reserved.json`).

The allocator keeps freed blocks, and fragments between blocks in use. Tools that ask the allocator or the driver count these. From
published runs:

    reserved = scale · peak + add_bytes

Both numbers are fitted to runs of one kind. Weights that are gathered and freed leave more fragments than weights that stay whole. The
program of a plan (stack `torch`) reuses its buffers, so it leaves the fewest; `bench.gpu` measured it.
CUDA's context and NCCL's buffers lie outside the allocator. They are no part of what it reserves, and take their room (`outside_bytes`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from planner_core.core import ASSETS, USUAL_STACK, Cluster, Plan
from planner_core.cost import SHARD, axis_roles

GROWING_SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""Lets the allocator return what it keeps between blocks; a shell sets it."""
RESERVED_FILE = ASSETS / "reserved.json"
GATHERED_WEIGHTS, WHOLE_WEIGHTS, PLANNED_PROGRAM = "weights gathered and freed", "weights whole", "plans as they run"


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """Bytes that the allocator of the fullest GPU reserves, at most the memory of the GPU.

    Nine in ten of the `runs` measured runs of this kind lie between `low_bytes` and `high_bytes`. `short`: the allocator needs more
    than the GPU has, so it frees and reallocates blocks, which costs time. `tight`: it may, since the upper end is more than CUDA's
    context and NCCL's buffers leave of the GPU. `above_stated`: the upper end is more than the memory that a request states, of which the
    allocator does not know."""

    kind: str
    runs: int
    likely_bytes: int
    low_bytes: int
    high_bytes: int
    short: bool
    tight: bool
    above_stated: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the object for `plan --json`."""
        return asdict(self)


@cache
def _load_fit() -> tuple[dict[str, dict[str, float]], int]:
    """Return the fit of each kind, and the bytes of a GPU that the allocator cannot have."""
    data = json.loads(RESERVED_FILE.read_text(encoding="utf-8"))
    return data["kinds"], int(data["outside_bytes"]["value"])


def _kind_of_plan(plan: Plan) -> str:
    """Return the asset's kind of a plan. Plans with 4-bit weights always run in another program than the plan's own."""
    adapters = plan.model.config.get("lora") or {}
    if plan.workload.stack in (None, USUAL_STACK) and "weights" not in adapters:
        return PLANNED_PROGRAM
    # An axis of one rank shards nothing, so its weights stay whole.
    sizes = zip(axis_roles(plan), plan.mesh.axis_sizes, strict=True)
    return GATHERED_WEIGHTS if any(role == SHARD and size > 1 for role, size in sizes) else WHOLE_WEIGHTS


def predict_reserved(plan: Plan, cluster: Cluster, memory_gb: float | None = None) -> ReservedMemory:
    """Return the memory that the allocator reserves under a plan. `memory_gb`: the memory that the request states, if it does."""
    kind, capacity = _kind_of_plan(plan), cluster.gpu.memory_bytes
    kinds, outside_bytes = _load_fit()
    row = kinds[kind]
    likely = row["scale"] * plan.cost.memory_bytes["peak"] + row["add_bytes"]
    # The allocator cannot reserve more than there is: it frees cached blocks first.
    peak, low, high = (min(capacity, round(likely * factor)) for factor in (1.0, row["low"], row["high"]))
    short, tight = likely > capacity, likely * row["high"] > capacity - outside_bytes
    above_stated = memory_gb is not None and high > memory_gb * 1e9
    return ReservedMemory(kind, int(row["n"]), peak, low, high, short, tight, above_stated)
