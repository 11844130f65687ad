"""Small models that return what models return: logits alone, a tuple, a dict; with dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.own_model import OwnGPT


class Returns(nn.Module):
    """`OwnGPT` that returns its logits, alone or with the loss as a tuple or a dict."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.inner = what, OwnGPT()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> object:
        own = self.inner
        x = own.tokens(ids) + own.places(own.positions)
        for block in own.blocks:
            x = block(x)
        logits = own.head(own.norm(x))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits} if self.what == "dict" else (logits, loss)


class Dropping(nn.Module):
    """Two layers with dropout between and behind them."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x + self.down(self.drop(F.gelu(self.up(x))))).pow(2).mean()
