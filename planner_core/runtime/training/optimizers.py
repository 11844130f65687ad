"""The optimizer that a plan's workload names, with the states that the cost model counts."""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from planner_core.core import OPTIMIZERS, Plan
from planner_core.runtime.training.host_states import HostStates

MOMENTUM = 0.9
FINAL_RATE = 0.1
"""The share of the highest learning rate at the end of a run, as GPT-3 was trained (Brown et al. 2020, appendix B)."""


def make_optimizer(
    name: str, params: Iterable[nn.Parameter], rate: float, *, weight_decay: float = 0.01, offload: bool = False
) -> torch.optim.Optimizer:
    """Make one of `OPTIMIZERS`. Master weights in float32, if a plan keeps any, are the parameters themselves.

    On a CPU it updates parameter by parameter, so that temporary copies are those of one parameter. `offload`: the host's memory
    keeps its states.
    """
    moments, params = OPTIMIZERS[name], list(params)
    fused = all(p.is_cuda for p in params)
    optimizer = (
        torch.optim.AdamW(params, rate, weight_decay=weight_decay, fused=fused, foreach=False)
        if moments == 2
        else torch.optim.SGD(params, rate, momentum=MOMENTUM if moments else 0.0, foreach=False)
    )
    return HostStates(optimizer) if offload else optimizer


def optimizer_for(
    plan: Plan, params: Iterable[nn.Parameter], rate: float, *, weight_decay: float = 0.01
) -> torch.optim.Optimizer:
    """Make the optimizer of a plan's workload, for a module that `apply` returned."""
    load = plan.workload
    return make_optimizer(load.optimizer, params, rate, weight_decay=weight_decay, offload=load.offload)


def warmup_cosine(step: int, *, warmup: int, steps: int) -> float:
    """Return the factor of the highest learning rate in a step (counted from 0).

    It grows over `warmup` steps, then falls along half a cosine to `FINAL_RATE` at the end. It depends on the step only, so a
    checkpoint does not need it.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
