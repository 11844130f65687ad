"""Tokens of the values that a module call reads or gets: equal tokens, equal behavior.

A module or tensor of the model is a `ModelPart` in a token. For two calls it is the same if it has the same name inside
each called module, or if it is one object outside of both (`relative_token`): blocks.0.proj as seen from blocks.0 equals blocks.1.proj
as seen from blocks.1.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from planner_core.models.capture.replay.outside import (
    MAX_ITEMS,
    ReadVariable,
    from_library,
    has_value,
    outside_variables,
)


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


def _contains(token: Any, kind: type) -> bool:
    """Return whether a token contains one of this class."""
    return isinstance(token, kind) or (isinstance(token, (tuple, frozenset)) and any(_contains(t, kind) for t in token))


def nested_items(value: Any) -> list[Any]:
    """List a value and all items of nested lists, sets and dicts, with keys and the containers themselves."""
    items, seen = [value], set()
    for item in items:  # grows meanwhile
        if isinstance(item, (dict, list, tuple, set, frozenset, deque)) and id(item) not in seen:
            seen.add(id(item))
            items += [*item, *item.values()] if isinstance(item, dict) else item
    return items


class Tokens:
    """Make tokens. `names_of(module or tensor)` returns its names in the model.

    Containers are compared down to depth 4, callables to 3, and objects, of at most 299 attributes, to 2. Whatever lies deeper is compared
    by identity. That errs on the safe side for two objects: equal ones count as different, and the call is traced. One deep object that
    changes between two calls goes unnoticed; a flat capture traces every call, so it judges (docs/DESIGN.md).
    """

    def __init__(self, names_of: Callable[[Any], tuple[str, ...]]) -> None:
        self.names_of = names_of
        self.objects: dict[int, tuple[list[Any], Any]] = {}  # id(object) -> its attributes, token
        self.variables: dict[type | types.FunctionType, tuple[ReadVariable, ...]] = {}
        self.numbers: dict[Any, int] = {}
        self.kept: list[Any] = []

    def token(self, value: Any, depth: int = 0) -> Any:
        """Return a hashable value that is equal for equal values."""
        if value is None or isinstance(value, (int, float, str, bool, bytes, torch.dtype, torch.device)):
            return (type(value).__name__, value)
        if isinstance(value, nn.Module):
            return ModelPart("module", self._stable_id(value), self.names_of(value), type(value))
        if isinstance(value, torch.Tensor):
            return ModelPart("tensor", self._stable_id(value), self.names_of(value), (type(value), signature(value)))
        if isinstance(value, (list, tuple, deque)) and depth < 4:
            return (type(value).__name__, *(self.token(v, depth + 1) for v in value))
        if isinstance(value, (set, frozenset)) and depth < 4:
            return (type(value).__name__, frozenset(self.token(v, depth + 1) for v in value))
        if isinstance(value, (Iterator, bytearray)):
            return Incomparable()
        if isinstance(value, dict) and depth < 4:
            return ("dict", *((self.token(k, depth + 1), self.token(v, depth + 1)) for k, v in value.items()))
        if callable(value):
            return self._function(value, depth)
        return self._object(value, depth)

    def _function(self, value: Any, depth: int) -> Any:
        """Return the token of a callable with its closure, defaults and bound arguments."""
        if depth > 3:
            return ("object", self._stable_id(value))
        within: tuple[Any, ...]
        if isinstance(value, functools.partial):
            within = value.func, value.args, value.keywords
        elif isinstance(value, types.MethodType):
            within = value.__func__, value.__self__
        elif isinstance(value, weakref.ref):
            within = (value(),)
        elif isinstance(value, types.FunctionType):
            cells = tuple(c.cell_contents if has_value(c) else None for c in value.__closure__ or ())
            within = cells, value.__defaults__, value.__kwdefaults__
            bound = tuple(self.token(v, depth + 1) for v in within)
            return ("function", self._stable_id(value.__code__), *bound, *self.outside_token(value, depth))
        else:
            return ("object", self._stable_id(value))
        return (type(value).__name__, *(self.token(v, depth + 1) for v in within))

    def outside_token(self, code: type | types.FunctionType, depth: int = 0) -> Any:
        """Return the token of the variables that the code of a class or function may read, arguments and attributes aside."""
        if depth > 2:
            return ()
        if code not in self.variables:
            self.variables[code] = outside_variables(code)
        return tuple(self._variable(place(), depth + 1) for place in self.variables[code])

    def _variable(self, value: Any, depth: int) -> Any:
        if isinstance(value, (list, tuple, dict)):
            data = len(value) > MAX_ITEMS
        else:
            data = from_library(value) and not (callable(value) or isinstance(value, torch.Tensor))
        return ("object", self._stable_id(value)) if data else self.token(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        attributes = getattr(value, "__dict__", None)
        if depth > 2 or not isinstance(attributes, dict) or len(attributes) > 299:
            return ("object", self._stable_id(value))
        before, known = self.objects.get(id(value), ([], None))
        now = nested_items([*attributes.values()])[1:]
        if known is None or len(before) != len(now) or not all(map(operator.is_, before, now)):
            self._stable_id(value)
            content = tuple((k, self.token(attributes[k], depth + 1)) for k in sorted(attributes))
            if _contains(content, Incomparable):
                return Incomparable()
            short = content if _contains(content, ModelPart) else self.numbers.setdefault(content, len(self.numbers))
            known = ("like", type(value), short)
            self.objects[id(value)] = now, known
        return known

    def _stable_id(self, value: Any) -> int:
        self.kept.append(value)  # a freed object's id could be reused
        return id(value)


def signature(tensor: torch.Tensor) -> Any:
    """Return what a graph shows of a tensor."""
    stride = tensor.stride() if tensor.layout == torch.strided else None
    return (tuple(tensor.shape), tensor.dtype, stride, tensor.requires_grad)
