"""Dims that are sharded part by part (q, k and v of one product) meet the same dims in other parts, or in one piece."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.plans_train_alike import check_plans_train_alike

WIDTH, NUM_CLASSES = 16, 4


def mixed(x: torch.Tensor, width: int = WIDTH) -> torch.Tensor:
    """A different use of each of three parts, or of two."""
    a, b, *c = x.split(width, -1)
    return a * torch.tanh(b) + sum(c)


class Parts(nn.Module):
    """What is split into one part is split into three; and one tensor is split into two and into three."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (whole,), twice = self.one(x).split(48, -1), self.two(x)
        return self.out(torch.cat([mixed(whole) + mixed(twice), mixed(twice, 24)], -1))


class Passed(nn.Module):
    """As in PaiNN: each of two equal blocks gets its part of a split, and splits a product with it again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Filtered() for _ in range(2))
        self.filter = nn.Linear(WIDTH, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, part in zip(self.blocks, self.filter(x).split(48, -1), strict=True):
            x = block(x, part)
        return x


class Filtered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.context = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 48))

    def forward(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return x + mixed(part * self.context(x))


class Shared(nn.Module):
    """Two equal blocks split the result of a layer into three; another has that layer too, and splits by `width`, or not at all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, 48)
        self.blocks = nn.ModuleList([InThree(layer), InThree(layer)])
        self.last, self.out, self.width = layer, nn.Linear(width, WIDTH), width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y = self.last(x)
        return x + self.out(y.relu() if self.width == 48 else mixed(y, self.width))


class InThree(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm, self.out = layer, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(mixed(self.layer(self.norm(x))))


class Net(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(self.first(x))), y)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "parts": (Parts, 0),
    "passed": (Passed, 2),
    "shared, in halves": (lambda: Shared(24), 0),
    "shared, whole": (lambda: Shared(48), 0),
}
"""With the number of equal blocks. Blocks of a user's own code that have a layer in common are no copies of one another."""


def _made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(MODELS[kind][0]())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.slow(only=("shared, in halves",))
def test_every_plan_trains_as_one_process_does(kind: str) -> None:
    drawn = torch.Generator().manual_seed(1)
    batch = torch.randn(8, WIDTH, generator=drawn), torch.randint(0, NUM_CLASSES, (8,), generator=drawn)
    report = check_plans_train_alike(partial(_made, kind), [batch] * 2)
    assert any(not p.data_axes for p in report.plans), "no plan splits features"
    assert any(p.name == "Megatron-LM" for p in report.plans)
    assert max(report.graph.num_repeats.values(), default=0) == MODELS[kind][1]
