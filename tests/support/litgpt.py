"""Llama-2-13B as LitGPT writes it: q, k and v are one product, which is dealt out to the heads, and the loss is in 16 bits."""

# mypy: allow-untyped-calls
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, HIDDEN, WORDS = 5120, 40, 13824, 32000
TOKENS = 4096


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        return x.to(dtype=dtype) * self.weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).to(dtype=x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        qkv = self.attn(x).view(b, t, HEADS, 3, WIDTH // HEADS).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((1, 1, 1), dim=2)
        q, k, v = (part.reshape(b, -1, t, WIDTH // HEADS) for part in (q, k, v))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = Norm(), Attention(), Norm()
        self.fc_1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.fc_2 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x), cos, sin)
        h = self.norm_2(x)
        return x + self.proj(F.silu(self.fc_1(h)) * self.fc_2(h))


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.ln_f = Norm()
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        angles = torch.outer(torch.arange(TOKENS).float(), 1e4 ** -(torch.arange(0, 128, 2) / 128)).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()))
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))


def build(layers: int, samples: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return the model on meta, with example inputs."""
    with torch.device("meta"):
        ids = torch.zeros(samples, TOKENS, dtype=torch.long)
        return Gpt(layers).to(torch.bfloat16), (ids, ids)
