"""Where rounding alone may be the difference, float64 decides, also of models that cast to float32 themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from planner_core.core import Plan
from planner_core.models.loading import capture_file
from planner_core.planning import Request, plan_model
from planner_core.verification import numerics
from tests.support.corpus import cluster
from tests.support.ranks import run_ranks


class Casts(nn.Module):
    """Sums in float32, as models of 16 bits do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x).float().softmax(-1, dtype=torch.float32).to(torch.float32)
        return self.two(h.to(x.dtype)).float().square().sum() + torch.ones(3, dtype=torch.float32).sum()


def make() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Casts(), (torch.randn(8, 32),)


def _judged(plan: Plan) -> dict[str, Any]:
    numerics.TOLERANCE = 0.0  # so float32 is never enough
    return numerics.compare_with_fallback(plan)


def test_casts_of_the_model_do_nothing_there_as_in_float32() -> None:
    source = f"{__file__}:make"
    plans = plan_model(Request(source, cluster=cluster(2), mesh="2"), capture_file(source)).plans
    (plan,) = (p for p in plans if p.name == "FSDP")
    for found in run_ranks(_judged, 2, (plan,)):
        assert found["dtype"] == "float64"
        assert found["float32"]["grad"][0] > 0 and found["grad"][0] < 1e-13 and found["param"][0] < 1e-13
        assert abs(found["loss"][0] - found["loss"][1]) < 1e-13 * abs(found["loss"][0])
