"""Models that draw numbers in forward, or keep count of their calls."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, numbers, variants

WIDTH, NUM_CLASSES = 32, 8


class Drawing(nn.Module):
    """`how` names what is drawn."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.rate, self.count = how, 0.0 if how == "leaves_out_no_layer" else 0.5, 0
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(getattr(self, self.how)(self.first(x))), y)

    def noise_like(self, h: Tensor) -> Tensor:
        """Noise of the shape of a computed tensor."""
        return h + 0.1 * torch.randn_like(h) * torch.rand_like(h[:, :1])

    def random_slopes(self, h: Tensor) -> Tensor:
        """Leaky units whose slopes are drawn."""
        return F.rrelu(h, 0.1, 0.6, training=True)

    def coins(self, h: Tensor) -> Tensor:
        """Coins of computed probabilities, and uniform numbers in place."""
        return h * torch.bernoulli(torch.sigmoid(h.detach())) + torch.empty_like(h).uniform_(-0.1, 0.1)

    def shuffled(self, h: Tensor) -> Tensor:
        """Samples in a drawn order (mixup)."""
        return h + 0.5 * h[torch.randperm(h.shape[0])]

    def masks_by_numpy(self, h: Tensor) -> Tensor:
        """Masks that numpy draws (SpecAugment)."""
        return h * torch.tensor(np.random.rand(h.shape[0], 1) < 0.5)

    def scaled_by_python(self, h: Tensor) -> Tensor:
        """A number of Python's generator."""
        return h * (1 + random.random())

    def keeps_count(self, h: Tensor) -> Tensor:
        """A number of the module grows with each call (annealing)."""
        self.count += 1
        return h * min(1.0, self.count / 10)

    def leaves_out_no_layer(self, h: Tensor) -> Tensor:
        """A layer is left out by chance, at a rate of 0."""
        return h if torch.rand([]) < self.rate else F.relu(h)

    def leaves_out_a_layer(self, h: Tensor) -> Tensor:
        """A layer is left out by chance."""
        return h if torch.rand([]) < self.rate else F.relu(h)

    def leaves_out_by_sign(self, h: Tensor) -> Tensor:
        """The same by the sign of a number of a normal distribution."""
        return h if torch.randn([]) < 0 else F.relu(h)

    def picks_random_rows(self, h: Tensor) -> Tensor:
        """As many samples as chance says."""
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
        self.blocks, self.head = nn.ModuleList([Noisy() for _ in range(3)]), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


def noisy_blocks() -> Made:
    """Blocks that draw noise."""
    return NoisyBlocks(), (numbers(8, WIDTH), classes(NUM_CLASSES))


globals().update(variants(Drawing, lambda: (numbers(8, WIDTH), classes(NUM_CLASSES))))


REFUSED = {
    "leaves_out_a_layer": "decides by random numbers",
    "leaves_out_by_sign": "decides by random numbers",
    "masks_by_numpy": "draws random numbers of Python or numpy",
    "scaled_by_python": "draws random numbers of Python or numpy",
    "keeps_count": "forward sets count",
    "picks_random_rows": "picks a random number of elements",
}
