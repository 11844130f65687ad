"""Tokens of the values that a module call reads or gets: equal tokens, equal behavior.

A module or tensor of the model is a `ModelPart` in a token. For two calls it is the same if it has the same name inside
each called module, or if it is one object outside of both (`relative_token`): blocks.0.proj as seen from blocks.0 equals blocks.1.proj
as seen from blocks.1.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

MAX_DEPTH = 4
"""Containers and objects are compared down to this depth."""
_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device, Enum)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)


class ModelPart(NamedTuple):
    """A module or tensor: its kind, its id, and all its names in the model."""

    what: str
    object_id: int
    names: tuple[str, ...]
    signature: Any

    def as_seen_from(self, base: str, given: Collection[int]) -> Any:
        """Return the token as the module at `base` sees it in a call that gets the tensors with ids `given`."""
        for name in self.names:
            if not base or name == base or name.startswith(base + "."):
                return (self.what, "own", name[len(base) :], self.signature)
        above = self.what == "module" and any(not n or base.startswith(n + ".") for n in self.names)
        if above or self.object_id in given:  # it contains `base`, or another call gets another tensor in its place
            return Incomparable()
        return (self.what, self.object_id, self.signature)


class Incomparable:
    """A token that equals no other, since another call may see another value."""


def relative_token(token: Any, base: str, given: Collection[int] = ()) -> Any:
    """Return a token as a call of the module at `base` sees it."""
    if isinstance(token, ModelPart):
        return token.as_seen_from(base, given)
    return tuple(relative_token(t, base, given) for t in token) if isinstance(token, tuple) else token


class Tokens:
    """Make tokens. `names_of(module or tensor)` returns its names in the model.

    Numbers and text are compared by value, containers and objects item by item, code and configs by identity. Any other value (an
    iterator, a closure) may change between two calls without a trace, so a call that reads one equals no other.
    """

    def __init__(self, names_of: Callable[[Any], tuple[str, ...]]) -> None:
        self.names_of = names_of
        self._alive: list[Any] = []

    def token(self, value: Any, depth: int = 0) -> Any:
        """Return a hashable value that is equal for equal values."""
        if isinstance(value, _PLAIN):
            # With the type: 1, 1.0 and True are equal in Python, and code may take another path for each.
            return (type(value).__name__, value)
        if isinstance(value, nn.Module):
            return ModelPart("module", self._stable_id(value), self.names_of(value), type(value))
        if isinstance(value, torch.Tensor):
            return ModelPart("tensor", self._stable_id(value), self.names_of(value), (type(value), signature(value)))
        if isinstance(value, (list, tuple)) and depth < MAX_DEPTH:
            return (type(value).__name__, *(self.token(v, depth + 1) for v in value))
        if isinstance(value, dict) and depth < MAX_DEPTH:
            return ("dict", *((self.token(k, depth + 1), self.token(v, depth + 1)) for k, v in value.items()))
        if isinstance(value, functools.partial) and depth < MAX_DEPTH:  # transformers keeps its GELUs as such
            return ("partial", *(self.token(v, depth + 1) for v in (value.func, value.args, value.keywords)))
        # A function with variables of its own may compute otherwise at its next call.
        if (isinstance(value, _CODE) and not getattr(value, "__closure__", None)) or _is_config(value):
            return ("object", self._stable_id(value))
        # An object that is called may keep a state that its attributes do not show.
        attributes = getattr(value, "__dict__", None)
        if callable(value) or not isinstance(attributes, dict) or depth >= MAX_DEPTH:
            return Incomparable()
        return (type(value), self.token(attributes, depth + 1))

    def _stable_id(self, value: Any) -> int:
        self._alive.append(value)  # a freed object's id could be reused
        return id(value)


def _is_config(value: Any) -> bool:
    """Return whether a value is a config of transformers, which no forward pass changes."""
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def signature(tensor: torch.Tensor) -> Any:
    """Return what a graph shows of a tensor."""
    stride = tensor.stride() if tensor.layout == torch.strided else None
    return (tuple(tensor.shape), tensor.dtype, stride, tensor.requires_grad)
