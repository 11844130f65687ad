"""The value `Request`: what a user asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planner_core.core import DEFAULT_PRECISION

Progress = Callable[[str], None]
"""A function that gets a sentence about what is being done. It may raise an exception to stop."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for. None means the default of the model or of the cluster.

    `accumulate`: the number of micro-batches of a step; None: the search chooses it. `precision`: "mixed" (weights, moments and
    gradients in float32, and gradients reduced in it) or "pure" (all in the dtype that computes). `zero`: the ZeRO stage that
    weights may have instead of stage 0; None: the search chooses the stage of the plan. `tool`: only plans that this tool
    can be told, e.g. "megatron". `expert_imbalance`, `chunks` and `offload`: those of `Workload`.
    """

    model: str
    cluster: str | Mapping[str, Any] = "2x8-h100"
    mesh: str | None = None
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    zero: int | None = 3
    recompute: str = "none"
    accumulate: int | None = 1
    precision: str = DEFAULT_PRECISION
    memory_gb: float | None = None
    layers: int | None = None
    method: str = "exact"
    objective: str = "time"
    layout: str | None = None
    tool: str | None = None
    expert_imbalance: float = 1.0
    chunks: int = 1
    offload: bool = False
