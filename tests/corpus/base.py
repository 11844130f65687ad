"""What the modules of the corpus share: example inputs, small and divisible by four."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Made: TypeAlias = tuple[nn.Module, Any]
"""A module and its example inputs: a tuple of positional ones, or a dict of named ones."""


def numbers(*shape: int) -> Tensor:
    """Numbers of a normal distribution."""
    return torch.randn(shape)


def images(size: int = 16, batch: int = 8) -> Tensor:
    """`[batch, 3, size, size]`."""
    return torch.randn(batch, 3, size, size)


def classes(kinds: int, shape: tuple[int, ...] = (8,)) -> Tensor:
    """Whole numbers below `kinds`."""
    return torch.randint(0, kinds, shape)
