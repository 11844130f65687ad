"""What the function of a unit takes, and what of its weights backward needs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.core import Replicate, Shard, Step
from planner_core.runtime.program import Axis
from planner_core.runtime.write.functions import FunctionArguments
from planner_core.runtime.write.planned import PlannedForward

WIDTH = 64


class UsesWeights(nn.Module):
    """Autograd keeps no `first`, since its operand has no gradient; a view of `viewed`, for the gradient of h; and `scale` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.viewed = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, self.first) + self.offset
        h = h @ self.viewed.t()
        return (h * self.scale).square().mean()


@pytest.mark.parametrize(
    ("recomputed", "wanted"),
    [
        (False, {"first": (False, False), "viewed": (False, True), "scale": (True, False)}),
        # The function runs again up to the square, which keeps its operand.
        (True, {"first": (True, False), "viewed": (True, False), "scale": (True, False)}),
    ],
)
def test_backward_gathers_again_what_it_reads(recomputed: bool, wanted: dict[str, tuple[bool, bool]]) -> None:
    x = torch.randn(8, WIDTH)
    plan = shardscope.plan(UsesWeights(), inputs=(x,), cluster="1x8-h100:gpus=2").best
    forward = PlannedForward(UsesWeights(), plan, [Axis(plan.mesh.axis_names[0], None, 2)])
    layout = forward.prepare((x,), {}, global_batch=True, gather=lambda part: part).layout
    calls = [c for c in layout.tape.calls if c.kind == "op"]
    gathered = ((Step(0, Shard(0), Replicate()),), ())
    steps = {(n, call.site): gathered for call in calls for n in call.inputs}
    arguments = FunctionArguments(layout, calls, "", steps, recomputed=recomputed)
    assert {u.parameter: (u.regather, u.saved_by_autograd) for u in arguments.weights.values()} == wanted
    assert all(u.trained and u.gather == gathered[0] for u in arguments.weights.values())
    assert [b.buffer for b in arguments.buffers.values()] == ["offset"]
    assert [layout.tape.tensors[n].name for n, _ in arguments.cuts] == ["x"] and arguments.inputs == []
