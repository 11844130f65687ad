"""Small models in plain torch for the tests of exported programs: their code is the same whether it is exported or captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, KEY_HEADS, WORDS, TOKENS = 32, 4, 2, 64, 16


class Block(nn.Module):
    """As in GPT-2: one projection for query, key and value, and layer norms with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.c_proj(attended.transpose(1, 2).reshape(b, s, WIDTH)), 0.0)
        return x + self.out(F.gelu(self.c_fc(self.ln_2(x))))


class Gpt2Like(nn.Module):
    """Tied embeddings, learnt positions, a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(3)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS).float(), labels[:, 1:].reshape(-1))


class Norm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """As in Llama: rotary positions from a buffer, grouped queries, a gated projection."""

    def __init__(self) -> None:
        super().__init__()
        narrow = WIDTH // HEADS * KEY_HEADS
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, narrow, bias=False)
        self.v, self.o = nn.Linear(WIDTH, narrow, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.down, self.first, self.second = nn.Linear(48, WIDTH, bias=False), Norm(), Norm()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        y = self.first(x)
        q, k, v = (p(y).view(b, s, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = turned(q, angles), turned(k, angles)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(b, s, WIDTH))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * angles.cos() + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * angles.sin()


class LlamaLike(nn.Module):
    """A table of frequencies as a buffer, and layers in a ModuleList."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Layer() for _ in range(3)])
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("frequencies", torch.rand(WIDTH // HEADS))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None].float() * self.frequencies
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, WORDS), labels.view(-1), ignore_index=-1)


class Odd(nn.Module):
    """Shared modules, tied weights, repeated calls, constants, in-place ops, all kinds of indexing, a symbolic batch."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.tied = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.tied.weight = self.l.weight
        self.shared = nn.ModuleList([nn.Sequential(self.l, nn.ReLU()), nn.Sequential(self.l, nn.Tanh())])
        self.bn, self.const = nn.BatchNorm1d(8), torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tied(self.l(self.l(x)))
        y = self.bn(self.shared[0](y) + self.shared[1](y))[:, None, :6] * self.const[:6]
        with torch.no_grad():
            scale = y.abs().amax(dim=-1, keepdim=True)
        a, b = (y / scale).chunk(2, -1)
        z = (F.dropout(a, 0.1) * b)[..., 0, 1:].flatten(1)
        z += 1
        return torch.cat([z, y[:, 0]], dim=-1).softmax(-1)


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], Any]]:
    """Module, example inputs, and dynamic shapes for the export."""
    ids = torch.ones(4, TOKENS, dtype=torch.long)
    from transformers import ResNetConfig, ResNetForImageClassification

    resnet = ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], num_labels=8)
    )
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    return {
        "gpt2-like": (Gpt2Like(), (ids, ids), None),
        "llama-like": (LlamaLike(), (ids, ids), None),
        "mlp": (mlp, (torch.randn(4, 8),), None),
        "resnet": (resnet, (torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)), None),
        "odd": (Odd(), (torch.randn(4, 8),), ({0: torch.export.Dim("samples", min=2)},)),
    }


def export(name: str, folder: Path) -> Path:
    """Write one of the models as a .pt2 file."""
    module, args, dynamic = models()[name]
    path = folder / f"{name}.pt2"
    torch.export.save(torch.export.export(module.train(), args, dynamic_shapes=dynamic), path)
    return path
