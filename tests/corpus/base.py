"""What the modules of the corpus share: example inputs, small and divisible by four."""

from __future__ import annotations

from collections.abc import Callable
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


def variants(kind: type[nn.Module], inputs: Callable[[], Any]) -> dict[str, Callable[[], Made]]:
    """The modules that `kind(name)` makes, where `name` is a method of its own with a docstring: what happens in forward."""

    def maker(name: str, method: Any) -> Callable[[], Made]:
        def make() -> Made:
            return kind(name), inputs()

        make.__name__, make.__doc__, make.__module__ = name, method.__doc__, kind.__module__
        return make

    return {n: maker(n, m) for n, m in vars(kind).items() if m.__doc__ and not n.startswith("_")}
