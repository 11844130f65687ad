"""A person's own model and training loop, as they would write it for one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, TOKENS, VOCABULARY = 8, 16, 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        split = (
            y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.second(x))))


class OwnGPT(nn.Module):
    """A decoder with tied embeddings, a buffer and a loss of its own."""

    positions: torch.Tensor

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("positions", torch.arange(TOKENS))
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(self.positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the next ones as labels."""
    made = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return made[:, :-1], made[:, 1:]


def make() -> tuple[nn.Module, Any]:
    """As `path.py:make` gives it to the command line."""
    return OwnGPT(), batch(0)


def losses(model: nn.Module, part: slice | None = None, clip: float = 1.0, steps: int = 3) -> Sequence[float]:
    """Three steps of AdamW over two micro-batches each, with gradient clipping; `part`: the rank's own samples, else all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    totals = []
    for _ in range(steps):
        total = 0.0
        for micro in range(2):
            x, y = batch(micro)
            whole = {} if part is None else {"global_batch": True} if part == slice(None) else {"global_batch": False}
            rows = part or slice(None)
            loss = model(x[rows], y[rows], **whole) / 2
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        totals.append(total)
    return totals
