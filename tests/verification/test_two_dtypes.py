"""A layer of 16 bits with a router in float32: both gradients are summed in float32, so they leave in one message."""

from __future__ import annotations

import torch
from torch import nn

import planner_core as shardscope
from planner_core.verification.fake.group import verify_fake_all


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, dtype=torch.bfloat16), nn.Linear(512, 256, dtype=torch.bfloat16)
        self.router = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x.float()).softmax(-1).to(x.dtype)
        return x + chosen * self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def make() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Layers(), (torch.randn(64, 256, dtype=torch.bfloat16),)


def test_gradients_of_two_dtypes_leave_together_as_scheduled() -> None:
    found = shardscope.plan(f"{__file__}:make", cluster="1x2-h100")
    (plan,) = (p for p in found.plans if p.name == "FSDP")
    assert plan.workload.precision == "mixed"
    (report,) = verify_fake_all([plan], graphs=[found.graph])
    assert report["ok"], (report["order"], report["memory_bytes"])
    assert report["memory_bytes"]["rel_error"] < 0.005
