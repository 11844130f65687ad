"""Modules whose wiring is drawn: runs of equal layers that carry one or two values, take others along, and are skipped over.

`path.py:seed_7` builds number 7.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TOKENS, BATCH = 16, 4, 8


class Layer(nn.Module):
    """Takes `carried` values that it gives on, and `along` that it only reads."""

    def __init__(self, dice: random.Random, carried: int, along: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if dice.random() < 0.7 else nn.Identity()
        self.up = nn.Linear(WIDTH * (carried + along), 2 * WIDTH, bias=dice.random() < 0.5)
        self.down = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(carried)])
        self.residual, self.swapped = dice.random() < 0.7, dice.random() < 0.3
        self.written = dice.random() < 0.3

    def forward(self, *values: Tensor) -> Any:
        carried = values[: len(self.down)]
        hidden = F.gelu(self.up(torch.cat([self.norm(values[0]), *values[1:]], -1)))
        made = [down(hidden) for down in self.down]
        if self.residual and self.written:
            for new, old in zip(made, carried, strict=True):
                new += old
        elif self.residual:
            made = [old + new for new, old in zip(made, carried, strict=True)]
        made = made[::-1] if self.swapped else made
        return made[0] if len(made) == 1 else tuple(made)


class Drawn(nn.Module):
    """Stages one after the other; every value that was made may be used again later, and is used at the end."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.stages, self.merges, self.plans = nn.ModuleList(), nn.ModuleList(), []
        known = 1
        for _ in range(dice.randint(2, 4)):
            carried, along = dice.randint(1, 2), dice.randint(0, 1)
            layers = [Layer(random.Random(known), carried, along) for _ in range(dice.randint(1, 4))]
            self.stages.append(nn.ModuleList(layers))
            self.merges.append(nn.Linear(2 * WIDTH, WIDTH))
            reads = [dice.randrange(known) for _ in range(carried + along)]
            self.plans.append((carried, reads, dice.choice(("last", "add", "join", "product")), dice.randrange(known)))
            known += carried + 1
        self.ends = range(known)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        pool = [self.table(ids)]
        for layers, merge, (carried, reads, how, other) in zip(self.stages, self.merges, self.plans, strict=True):
            values, rest = [pool[i] for i in reads[:carried]], [pool[i] for i in reads[carried:]]
            for layer in layers:
                made = layer(*values, *rest)
                values = list(made) if isinstance(made, tuple) else [made]
            end = values[0]
            if how == "add":
                end = end + pool[other]
            elif how == "product":
                end = end * torch.sigmoid(pool[other])
            elif how == "join":
                end = merge(torch.cat([end, pool[other]], -1))
            pool += [*values, end]
        out = pool[-1] + sum(pool[i] for i in self.ends)
        return F.cross_entropy(self.head(out).flatten(0, 1), y.flatten())


def make(seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the module of a seed and its example inputs."""
    return Drawn(random.Random(seed)), (torch.randint(0, 32, (BATCH, TOKENS)), torch.randint(0, 8, (BATCH, TOKENS)))


def __getattr__(name: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]:
    if not name.startswith("seed_"):
        raise AttributeError(name)
    return partial(make, int(name.removeprefix("seed_")))
