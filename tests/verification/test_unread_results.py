"""A model returns more than the loss reads: what leads to the rest alone runs no backward, and none is scheduled."""

from __future__ import annotations

from pathlib import Path

from planner_core.cost import schedule_events
from planner_core.planning import Request
from planner_core.verification import verify
from tests.support.plans import planned

TWO_HEADS = '''"""Three layers, and two heads of the same kind. The loss is that of the first."""

import torch
from torch import nn


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part(64) for _ in range(3))
        self.first, self.second = Part(64), Part(64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return self.first(x).square().mean(), self.second(x)


def make():
    return TwoHeads(), (torch.zeros(4, 16, 64),)
'''


def test_they_are_left_out_of_backward(tmp_path: Path) -> None:
    """The weights of the first head were gathered again too late, behind a unit that no gradient goes through."""
    (tmp_path / "heads.py").write_text(TWO_HEADS)
    found = planned(Request(f"{tmp_path}/heads.py:make", cluster="1x4-a100-pcie"))
    (plan,) = (p for p in found.plans if p.name == "FSDP")
    events = schedule_events(plan, found.graph)
    returned = [e.kind for e in events if e.what == "return"]
    assert "second" not in returned and "first" in returned
    assert [e.kind for e in events if e.what == "run"].count("second") == 1
    told = verify(plan)
    assert told["ok"] and told["order"]["ok"], told["order"]
