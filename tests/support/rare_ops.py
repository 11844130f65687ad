"""A small model of the ops of `rules_more`, and of attention as one function of torch, for the runtime to run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Rare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 16, 3, padding=1, groups=4), dim=2)
        self.mix, self.head = nn.Linear(16 * 3, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.attention(x, x * 2.0, x)[0]
        x = self.layer(x) + torch.fft.fftn(x, dim=(1, 2)).real
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.mix(F.unfold(x.transpose(1, 2)[..., None], (3, 1), padding=(1, 0)).transpose(1, 2))
        chunks = x.contiguous().as_strided((len(x), 3, 8, 16), (256, 64, 16, 1))  # of 8 tokens, overlapping by half
        near = x.unfold(1, 8, 4).transpose(2, 3)  # the same by another name
        x = x + torch.einsum("b...nd,b...nd->b...n", chunks, near).mean((1, 2))[:, None, None]
        logs = F.log_softmax(self.head(x).flatten(0, 1), -1)
        return F.nll_loss(logs, ids.flatten())


def make() -> Any:
    return Rare(), {"ids": torch.arange(64, device="cpu").reshape(4, 16) % 32}
