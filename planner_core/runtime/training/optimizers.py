"""The optimizer that a plan's workload names, with the states that the cost model counts."""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from planner_core.core import Plan
from planner_core.runtime.training.host_states import HostStates

MOMENTUM = 0.9


def make_optimizer(
    name: str, params: Iterable[nn.Parameter], lr: float, *, fused: bool = False, offload: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer `adamw`, `sgd` or `sgd-momentum`. With master weights the parameters are these masters.

    It updates parameter by parameter, so that temporary copies are those of one parameter. `offload`: the host's memory keeps
    its states.
    """
    if offload:
        return HostStates(make_optimizer(name, params, lr, fused=fused))
    if name == "adamw":
        return torch.optim.AdamW(params, lr=lr, fused=fused, foreach=False)
    return torch.optim.SGD(params, lr=lr, momentum=MOMENTUM if name == "sgd-momentum" else 0.0, foreach=False)


def optimizer_for(
    plan: Plan, params: Iterable[nn.Parameter], rate: float, *, weight_decay: float = 0.01
) -> torch.optim.Optimizer:
    """Make the optimizer of a plan's workload, for a module that `apply` returned.

    If there are master weights, they are the module's parameters.
    """
    name = str(plan.workload["optimizer"]).removesuffix("-fp32")
    optimizer = make_optimizer(
        name, params, rate, fused=torch.cuda.is_available(), offload=bool(plan.workload.get("offload"))
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay if name == "adamw" else 0.0
    return optimizer


def warmup_cosine(step: int, *, warmup: int, steps: int, floor: float = 0.1) -> float:
    """Return the factor of the highest learning rate in a step (counted from 0).

    It grows over `warmup` steps, then falls along half a cosine to `floor` at the end. It depends on the step only, so a
    checkpoint does not need it.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
