"""A stand-in loss as a part of a model that returns no loss. The plan of such a model has it, so a run computes what was
planned."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from planner_core.core import STANDIN_LOSS, InputError, PlannedModel
from planner_core.models.capture import standin_loss

_NAME = "loss"
"""The scope in which the capture records a stand-in loss."""


class StandInLoss(nn.Module):
    """The mean of the output to the fourth power, in float32."""

    def forward(self, out: Any) -> torch.Tensor:
        """Return the loss of what the model returns.

        While that is recorded, computed tensors are on meta and constants, which do not count, are not.
        """
        return standin_loss(out, lambda t: t.is_meta or t.requires_grad)


def has_hooks(model: nn.Module) -> bool:
    """Return whether a model itself, and not a part of it, has hooks. Torch runs them around the model's `forward`, and so
    around the plan."""
    return bool(model._forward_hooks or model._forward_pre_hooks)


def with_planned_loss(model: nn.Module, planned: PlannedModel) -> nn.Module:
    """Return the model as a plan describes it: with the stand-in loss in its forward, if it was planned with one.

    `planned` is the plan's `model`. If the model has hooks of its own, which read what forward returns, the loss stays outside.
    """
    stand_in = planned.loss == STANDIN_LOSS and not has_hooks(model)
    return add_stand_in_loss(model) if stand_in else model


def add_stand_in_loss(model: nn.Module) -> nn.Module:
    """Let a model return (stand-in loss, what it returned) from now on. Call it before `apply`.

    Raises InputError if the model has another part with weights under the name of the loss.
    """
    if isinstance(model._modules.get(_NAME), StandInLoss):
        return model  # one process runs several plans of it
    part = model._modules.pop(_NAME, None)
    if part is not None and any(True for _ in (*part.parameters(), *part.buffers())):
        model._modules[_NAME] = part
        raise InputError(
            f"{type(model).__name__} has weights in a part of the name {_NAME}, where a stand-in loss would go; let it return its loss"
        )
    if part is not None:
        model.__dict__[_NAME] = part  # which the model's code goes on to find
    model._modules[_NAME] = loss = StandInLoss()
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        del model._modules[_NAME]  # a Sequential calls whatever parts it has
        try:
            out = plain(*args, **kwargs)
        finally:
            model._modules[_NAME] = loss
        return loss(out), out

    model.__dict__["forward"] = forward
    return model
