"""Large constants: those that a model computes of its inputs are planned, and others stand beside the planned memory and are said."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.plans import plan_in_passes

TOKENS, WIDTH = 256, 64


class Pairs(nn.Module):
    """Turns the distance of each pair of tokens into numbers, as BROS does: of the tokens' places, or of those that the inputs state."""

    def __init__(self, stated: bool) -> None:
        super().__init__()
        self.stated = stated
        self.read, self.score = nn.Linear(WIDTH, 4), nn.Linear(4, 4)

    def forward(self, place: torch.Tensor) -> torch.Tensor:
        if not self.stated:
            place = torch.arange(place.shape[1], device=place.device).float().expand_as(place)
        far = place[:, :, None] - place[:, None]
        waves = (far[..., None] * torch.arange(WIDTH, device=place.device)).sin()
        return self.score(self.read(waves)).square().mean()


def noted(model: nn.Module, inputs: torch.Tensor) -> list[str]:
    found = plan_in_passes(model, "notes", inputs=(inputs,), cluster="1x2-h100")
    return [n.sentence for n in found.notes if "not in the planned memory" in n.sentence]


def test_a_sinusoid_of_positions_for_each_pair_is_noted() -> None:
    on_one = 8 // 2 * TOKENS**2 * WIDTH * 4
    assert noted(Pairs(stated=False), torch.rand(8, TOKENS)) == [
        f"a constant that the model computes is not in the planned memory: {on_one / 2**30:.2f} GiB per GPU at read/linear alone "
        "(float32, 8 x 256 x 256 x 64 on all GPUs together)"
    ]


def test_a_sinusoid_of_inputs_for_each_pair_is_planned() -> None:
    on_one = 8 // 2 * TOKENS**2 * WIDTH * 4
    found = plan_in_passes(Pairs(stated=True), "notes", inputs=(torch.rand(8, TOKENS),), cluster="1x2-h100")
    assert not [n for n in found.notes if "not in the planned memory" in n.sentence]
    assert found.best.cost.memory_bytes["activations"] > on_one


def test_what_is_small_beside_the_plan_is_not_noted() -> None:
    wide = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1))
    assert not noted(wide, torch.rand(64, 64))
