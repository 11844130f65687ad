"""A refused forward pass is explained by the model's own names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner_core as shardscope
from planner_core.core import CaptureError
from planner_core.runtime.program import Axis
from planner_core.runtime.write.planned import PlannedForward


class FailsInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise ValueError("no labels")
        return self.up(x).sum()  # type: ignore[no-any-return]


def test_an_error_of_the_model_names_the_model() -> None:
    """It named the class that stood for the model while it was recorded."""
    model, x = FailsInEvaluation(), torch.randn(4, 8)
    plan = shardscope.plan(model, inputs=(x,), cluster="1x8-h100:gpus=2").best
    forward = PlannedForward(model.eval(), plan, [Axis(plan.mesh.axis_names[0], None, 2)])
    with pytest.raises(CaptureError, match=r"^FailsInEvaluation could not be run on example inputs at .*no labels"):
        forward.prepare((x,), {}, global_batch=True, gather=lambda part: part)
