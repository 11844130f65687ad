"""Models that draw numbers in forward, or keep count of their calls."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, numbers

WIDTH, KINDS = 32, 8


class Drawing(nn.Module):
    """`how` names what is drawn."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.rate, self.count = how, 0.0 if how == "never" else 0.5, 0
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, KINDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(getattr(self, self.how)(self.first(x))), y)

    def like(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn_like(h) * torch.rand_like(h[:, :1])

    def slopes(self, h: Tensor) -> Tensor:
        return F.rrelu(h, 0.1, 0.6, training=True)

    def coins(self, h: Tensor) -> Tensor:
        return h * torch.bernoulli(torch.sigmoid(h.detach())) + torch.empty_like(h).uniform_(-0.1, 0.1)

    def places(self, h: Tensor) -> Tensor:
        return h + 0.5 * h[torch.randperm(h.shape[0])]

    def by_numpy(self, h: Tensor) -> Tensor:
        return h * torch.tensor(np.random.rand(h.shape[0], 1) < 0.5)

    def by_python(self, h: Tensor) -> Tensor:
        return h * (1 + random.random())

    def counted(self, h: Tensor) -> Tensor:
        self.count += 1
        return h * min(1.0, self.count / 10)

    def never(self, h: Tensor) -> Tensor:
        return h if torch.rand([]) < self.rate else F.relu(h)

    def by_chance(self, h: Tensor) -> Tensor:
        return h if torch.rand([]) < self.rate else F.relu(h)

    def by_sign(self, h: Tensor) -> Tensor:
        return h if torch.randn([]) < 0 else F.relu(h)

    def by_chance_of_python(self, h: Tensor) -> Tensor:
        return h if random.random() < self.rate else F.relu(h)

    def some_rows(self, h: Tensor) -> Tensor:
        return h + h[torch.rand(h.shape[0]) < self.rate].mean(0)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x + 0.5 * torch.randn_like(x))))


class NoisyBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Noisy() for _ in range(3)]), nn.Linear(WIDTH, KINDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


def noisy_blocks() -> Made:
    """Blocks that draw noise."""
    return NoisyBlocks(), (numbers(8, WIDTH), classes(KINDS))


def _made(how: str) -> Made:
    return Drawing(how), (numbers(8, WIDTH), classes(KINDS))


def noise_like() -> Made:
    """Noise of the shape of a computed tensor."""
    return _made("like")


def random_slopes() -> Made:
    """Leaky units whose slopes are drawn."""
    return _made("slopes")


def coins() -> Made:
    """Coins of computed probabilities, and uniform numbers in place."""
    return _made("coins")


def shuffled() -> Made:
    """Samples in a drawn order (mixup)."""
    return _made("places")


def masks_by_numpy() -> Made:
    """Masks that numpy draws (SpecAugment)."""
    return _made("by_numpy")


def scaled_by_python() -> Made:
    """A number of Python's generator."""
    return _made("by_python")


def keeps_count() -> Made:
    """A number of the module grows with each call (annealing)."""
    return _made("counted")


def leaves_out_no_layer() -> Made:
    """A layer is left out by chance, at a rate of 0."""
    return _made("never")


def leaves_out_a_layer() -> Made:
    """A layer is left out by chance."""
    return _made("by_chance")


def leaves_out_by_sign() -> Made:
    """The same by the sign of a number of a normal distribution."""
    return _made("by_sign")


def leaves_out_by_python() -> Made:
    """The same by Python's generator."""
    return _made("by_chance_of_python")


def picks_random_rows() -> Made:
    """As many samples as chance says."""
    return _made("some_rows")


REFUSED = {
    "leaves_out_a_layer": "decides by random numbers",
    "leaves_out_by_sign": "decides by random numbers",
    "leaves_out_by_python": "draws random numbers of Python or numpy",
    "masks_by_numpy": "draws random numbers of Python or numpy",
    "scaled_by_python": "draws random numbers of Python or numpy",
    "keeps_count": "forward sets count",
    "picks_random_rows": "picks a random number of elements",
}
