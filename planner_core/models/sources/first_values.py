"""Build a model that will run: parameters on meta, where they take no memory, and buffers with the values that constructors give them.

A frozen batch norm starts with a scale of ones, which its constructor puts into a buffer. On meta the ones would be lost, and an
initializer of weights does not know them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

SEED = 0
"""Buffers that constructors draw are equal on every rank."""
MAX_ELEMENTS = 1 << 22
"""Elements of the largest tensor that is made on the CPU. Buffers are small; a layer's experts are filled with zeros for nothing."""
_FILLED = frozenset({torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn})


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to meta when a module gets it, while entered."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or param.is_meta:
            plain(module, name, param)
            return
        # On the parameter itself: a constructor may give one to several modules, and they stay tied.
        if not hasattr(param, "_on_meta"):
            param._on_meta = nn.Parameter(param.to("meta"), param.requires_grad)  # type: ignore[attr-defined]
        plain(module, name, param._on_meta)  # type: ignore[attr-defined]

    with (
        mock.patch.object(nn.Module, "register_parameter", register),
        torch.random.fork_rng(devices=[]),
        _LargeOnMeta(),
    ):
        torch.default_generator.manual_seed(SEED)
        yield


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors on meta."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FILLED and (on_meta := func(*args, **{**(kwargs or {}), "device": "meta"})).numel() > MAX_ELEMENTS:
            return on_meta
        return func(*args, **(kwargs or {}))
