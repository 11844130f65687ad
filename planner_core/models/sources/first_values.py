"""Keep the values that constructors give to buffers while a model is built on meta.

A frozen batch norm starts with a scale of ones, which its constructor puts into a buffer. On meta the ones are lost, and an
initializer of weights does not know them. So while modules are built, each tensor on meta that is made of constants has a
copy with values on the CPU, to which the same calls are applied.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

MAX_ELEMENTS = 1 << 22
"""Elements of the largest tensor whose values are kept."""
UNKNOWN_VALUES = frozenset(
    {"rand", "randn", "randint", "randperm", "normal", "empty", "empty_strided", "empty_permuted"}
)
"""Constructors of tensors without defined values."""
FILLS = frozenset({"fill_", "zero_", "copy_"})
"""Calls that write every element."""
ATTRIBUTE = "_first_values"


class InitialValues(TorchFunctionMode):
    """Apply each call on meta tensors that are made of constants to their copies with values too."""

    def __init__(self) -> None:
        super().__init__()
        self.known_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # A tensor whose calls cannot be followed has no known values; its buffer is then initialized like others.
        with contextlib.suppress(Exception):
            self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        out = args[0] if func is torch.Tensor.__setitem__ else out
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_meta]
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        # Buffers are small; a weight of a billion elements would be filled on the CPU for nothing.
        if not made or max(t.numel() for t in made) > MAX_ELEMENTS:
            return
        name = func.__name__
        if func in _device_constructors():
            if name in UNKNOWN_VALUES:
                return
            kwargs = {**kwargs, "device": "cpu"}
        elif not given:
            return
        elif name in FILLS and args[0].is_meta and id(args[0]) not in self.known_values:
            self.known_values[id(args[0])] = args[0], torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu")
        unknown = [t for t in given if t.is_meta and id(t) not in self.known_values]
        if unknown:
            for tensor in made:  # written in place with unknown values
                self.known_values.pop(id(tensor), None)
            return
        twin = func(*pytree.tree_map(self._known_value, args), **pytree.tree_map(self._known_value, kwargs))
        if twin is not None:
            for tensor, value in zip(made, pytree.tree_leaves(twin), strict=True):
                self.known_values[id(tensor)] = tensor, value

    def _known_value(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and id(x) in self.known_values:
            return self.known_values[id(x)][1]
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def store_buffers(self, model: nn.Module) -> None:
        """Store the values of the model's buffers by name, for `initial_buffers`."""
        known = {n: self.known_values[id(b)][1] for n, b in model.named_buffers() if id(b) in self.known_values}
        model.__dict__[ATTRIBUTE] = {n: v.detach() for n, v in known.items()}


def initial_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the known values that constructors gave to buffers, by name."""
    return dict(model.__dict__.get(ATTRIBUTE, {}))
