"""The values that constructors give to buffers, of a model that is built on meta.

A frozen batch norm begins with a scale of ones, which its class puts into a buffer. On meta the ones are lost, and what gives a model
its first weights does not know of them. So while modules are built, each tensor on meta that a constructor makes of constants has a
twin on the CPU, to which the same is done.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

LARGEST = 1 << 22
"""Elements of the largest tensor that has a twin."""
DRAWN = frozenset({"rand", "randn", "randint", "randperm", "normal", "empty", "empty_strided", "empty_permuted"})
"""Makers of tensors whose values nobody knows."""
FILLED = frozenset({"fill_", "zero_", "copy_"})
"""Calls that give every element a value."""
ATTRIBUTE = "_first_values"


class FirstValues(TorchFunctionMode):
    """Inside, follows what is done to tensors on meta that are made of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # what cannot be followed has no twin, and begins as before
        with contextlib.suppress(Exception):
            self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        out = args[0] if func is torch.Tensor.__setitem__ else out
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_meta]
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not made or max(t.numel() for t in made) > LARGEST:
            return
        name = func.__name__
        if func in _device_constructors():
            if name in DRAWN:
                return
            kwargs = {**kwargs, "device": "cpu"}
        elif not given:
            return
        elif name in FILLED and args[0].is_meta and id(args[0]) not in self.twins:
            self.twins[id(args[0])] = args[0], torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu")
        unknown = [t for t in given if t.is_meta and id(t) not in self.twins]
        if unknown:
            for tensor in made:  # written in place, with values that nobody knows
                self.twins.pop(id(tensor), None)
            return
        twin = func(*pytree.tree_map(self._twin, args), **pytree.tree_map(self._twin, kwargs))
        if twin is not None:
            for tensor, value in zip(made, pytree.tree_leaves(twin), strict=True):
                self.twins[id(tensor)] = tensor, value

    def _twin(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and id(x) in self.twins:
            return self.twins[id(x)][1]
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def note(self, model: nn.Module) -> None:
        """Keep the values of the model's buffers, by name, for `first_buffers`."""
        known = {n: self.twins[id(b)][1] for n, b in model.named_buffers() if id(b) in self.twins}
        model.__dict__[ATTRIBUTE] = {n: v.detach() for n, v in known.items()}


def first_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The values that constructors gave to buffers, by name, as far as they are known."""
    return dict(model.__dict__.get(ATTRIBUTE, {}))
