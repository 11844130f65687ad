"""Linear layers whose frozen weights are kept in 4 bits, as bitsandbytes keeps them for QLoRA (NF4 with double quantization).

    weight    two numbers a byte, in elements of the dtype that computes, so that FSDP can shard it as any weight (`quant_storage`)
    scales    a byte for each 64 numbers, and a float32 for each 256 of these; every rank holds all of them

    bytes of n numbers = n / 2 + n / 64 + 4 n / 16 384

The layer makes its weight in the dtype that computes for a moment, in forward and again in backward, and keeps it in neither. A layer of
4096 x 4096 takes 8.4 MB of weights and 0.27 MB of scales, and 33.6 MB for a moment in bfloat16.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
from torch import nn

GROUP, COARSE = 64, 256
"""Numbers that share a scale, and scales that share a coarse scale."""
LEVELS = (
    -1.0,
    -0.6961928,
    -0.5250731,
    -0.3949175,
    -0.2844414,
    -0.1847734,
    -0.0910500,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.3379152,
    0.4407098,
    0.5626170,
    0.7229568,
    1.0,
)
"""The sixteen numbers of NF4 (Dettmers et al. 2023, appendix E)."""


class LinearNF4(torch.autograd.Function):
    """Compute `x @ w.T` for a frozen `w` in 4 bits. Backward dequantizes `w` a second time."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, coarse: torch.Tensor, out: int
    ) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        ctx.save_for_backward(weight, scales, coarse)
        return x @ numbers(weight, scales, coarse, (out, x.shape[-1]), x.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of x; the weight is frozen."""
        weight, scales, coarse = ctx.saved_tensors
        # From the packed bytes, since nothing of the layer's size is kept for backward.
        shape = (gradient.shape[-1], 2 * weight.numel() * weight.element_size() // gradient.shape[-1])
        return gradient @ numbers(weight, scales, coarse, shape, gradient.dtype), None, None, None, None


def numbers(
    weight: torch.Tensor, scales: torch.Tensor, coarse: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize a weight to the dtype that computes."""
    packed = weight.view(torch.uint8).flatten()
    levels = torch.tensor(LEVELS, dtype=dtype, device=weight.device)
    values = levels[torch.stack([packed >> 4, packed & 15], -1).long()].flatten()
    each = (scales.float() * coarse.repeat_interleave(COARSE)[: len(scales)]).to(dtype)
    return (values.view(-1, GROUP) * each[:, None]).view(shape)


class FourBitLinear(nn.Module):
    """A frozen linear layer in 4 bits."""

    scales: torch.Tensor
    coarse: torch.Tensor

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, full = like.in_features, like.out_features, like.weight
        size = like.in_features * like.out_features
        scales, per_element = size // GROUP, 2 * full.element_size()
        self.weight = nn.Parameter(
            torch.empty(size // per_element, 1, dtype=full.dtype, device=full.device), requires_grad=False
        )
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device=full.device))
        self.register_buffer("coarse", torch.empty(-(-scales // COARSE), dtype=torch.float32, device=full.device))
        self.bias = like.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        out: torch.Tensor = LinearNF4.apply(x, self.weight, self.scales, self.coarse, self.out_features)
        return out if self.bias is None else out + self.bias
