"""An embedding that scales gradients by how often an id occurs: refused where a rank would count in its own part of the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.runtime import CannotRewrite
from planner_core.runtime.program import Axis
from planner_core.runtime.write.planned import PlannedForward


class Scaled(nn.Module):
    """Looks ids up, and scales their gradients if `by_freq`."""

    def __init__(self, by_freq: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16, scale_grad_by_freq=by_freq), nn.Linear(16, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("by_freq", [False, True])
def test_counts_of_ids_are_not_taken_in_a_part_of_the_batch(by_freq: bool) -> None:
    model, ids = Scaled(by_freq), torch.randint(0, 64, (4, 8))
    plan = shardscope.price(model, inputs=(ids,), cluster="1x2-a100", layout="dp=2").plan
    forward = PlannedForward(
        model, plan, [Axis(n, None, s) for n, s in zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)]
    )

    def prepare() -> None:
        forward.prepare((ids[:2],), {}, global_batch=False, gather=lambda x: torch.cat([x, x]))

    if by_freq:
        with pytest.raises(CannotRewrite, match="scale_grad_by_freq"):
            prepare()
    else:
        prepare()
