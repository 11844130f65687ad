"""Large tensors that a model makes of its inputs alone stand beside the planned memory, and are told."""

from __future__ import annotations

import torch
from torch import nn

import planner_core as shardscope

TOKENS, WIDTH = 256, 64


class Pairs(nn.Module):
    """Turns the distance of each pair of tokens into numbers, as BROS does."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.score = nn.Linear(WIDTH, 4), nn.Linear(4, 4)

    def forward(self, place: torch.Tensor) -> torch.Tensor:
        far = place[:, :, None] - place[:, None]
        waves = (far[..., None] * torch.arange(WIDTH, device=place.device)).sin()
        return self.score(self.read(waves)).square().mean()


def told(model: nn.Module, inputs: torch.Tensor) -> list[str]:
    found = shardscope.plan(model, inputs=(inputs,), cluster="1x2-h100")
    return [n for n in found.notes if "makes of its inputs alone" in n]


def test_a_sinusoid_for_each_pair_is_told() -> None:
    on_one = 8 // 2 * TOKENS**2 * WIDTH * 4
    assert told(Pairs(), torch.rand(8, TOKENS)) == [
        "what the model makes of its inputs alone is not in the planned memory: "
        f"{on_one / 2**30:.2f} GiB per GPU at read/linear alone (float32, 8 x 256 x 256 x 64 on all GPUs together)"
    ]


def test_what_is_small_beside_the_plan_is_not() -> None:
    wide = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1))
    assert not told(wide, torch.rand(64, 64))
