"""The optimizer that a plan's workload names, with the states that the cost model counts."""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from planner_core.core import Plan
from planner_core.runtime.training.host_states import HostStates

MOMENTUM = 0.9
FINAL_RATE = 0.1
"""The share of the highest learning rate at the end of a run, as GPT-3 was trained (Brown et al. 2020, appendix B)."""


class MasterAdamW(torch.optim.Optimizer):
    """AdamW for parameters of 16 bits, with a master copy and two moments of each in float32."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        # the defaults of torch.optim.AdamW; a loop sets others in `param_groups`
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step, parameter by parameter, so that temporary copies are those of one parameter."""
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update_parameter(param, group)

    def _update_parameter(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[param], group["betas"]
        if not state:
            master = param.detach().clone().float()
            moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            state.update(step=torch.zeros(()), master=master, **moments)
        state["step"] += 1
        count, gradient = float(state["step"]), param.grad.float()  # type: ignore[union-attr]
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = state["exp_avg_sq"].div(1 - second**count).sqrt_().add_(group["eps"])
        state["master"].mul_(1 - group["lr"] * group["weight_decay"])
        state["master"].addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - first**count))
        param.copy_(state["master"])


def make_optimizer(
    name: str, params: Iterable[nn.Parameter], lr: float, *, fused: bool = False, offload: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer `adamw`, `adamw-fp32`, `sgd` or `sgd-momentum`.

    It updates parameter by parameter, so that temporary copies are those of one parameter. `offload`: the host's memory keeps
    its states.
    """
    if offload:
        return HostStates(make_optimizer(name, params, lr, fused=fused))
    if name == "adamw-fp32":
        return MasterAdamW(params, lr)
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
