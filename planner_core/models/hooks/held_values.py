"""What a model's modules hold beside weights and buffers, which its forward pass may read and set.

These are numbers, words, flags and functions, those of a config, lists and dicts of them, and tensors that are no buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

LONGEST = 64
"""A list or dict that is longer is data, and not watched."""
DEPTH = 3
"""How deep it is looked: into a config of a module, a dict of that config, and a list of that dict."""

Held = dict[Any, Any] | list[Any]
"""The attributes of a module or config, or a list or dict of values."""


class Absent:
    """Takes the place of a value. `instead`: what was there before, which counts; MISSING if there was nothing."""

    __slots__ = ("instead",)

    def __init__(self, instead: Any) -> None:
        self.instead = instead


_PLAIN = (bool, int, float, str, type(None))
_APART = frozenset(nn.Module().__dict__) - {"training"} | {"_flat_weights", "_flat_weight_refs"}
"""What every module has: its parts, weights, buffers and hooks; and what torch's recurrent layers make of their weights."""
_VALUES = (list, dict, tuple, set, Enum, type, torch.dtype, torch.device, torch.Tensor)
_NO_CONFIG = (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType, Absent)
MISSING, COMPUTED = object(), object()
"""Marks of a value that is not there, and of a tensor that a recording has computed, which has no values."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A module, config, list or dict at one time. `values`: those that it has, by attribute or place. `parent`: what holds it, and
    under which key; None for a module."""

    name: str
    held: Held
    values: dict[Any, Any]
    parent: tuple[Holder, Any] | None

    def path(self, key: Any) -> str:
        """The name of a value."""
        return f"{self.name}.{key}" if self.name else str(key)


Place = tuple[Holder, Any]
"""A value: its holder, and its key there."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What all modules hold at one time. `marks`: what counts about each value, by its name."""

    holders: list[Holder]
    marks: dict[str, Any]

    @classmethod
    def of(cls, modules: Iterable[tuple[str, nn.Module]]) -> Noted:
        """What named modules hold at present."""
        modules = list(modules)
        apart = {id(t) for _, m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
        found: dict[int, Holder] = {}
        marks: dict[str, Any] = {}
        todo: list[tuple[str, Held, Place | None, int]] = [(n, m.__dict__, None, 0) for n, m in modules]
        for name, held, parent, depth in todo:  # grows meanwhile
            if id(held) in found:
                continue
            holder = found[id(held)] = Holder(name, held, _values(held), parent)
            for key, value in holder.values.items():
                path = holder.path(key)
                if is_plain(value):
                    marks[path] = value
                    continue
                inside = _inside(value) if depth < DEPTH else None
                if inside is not None:
                    todo.append((path, inside, (holder, key), depth + 1))
                marks[path] = type(value) if inside is not None or id(value) in apart else mark_of(value)
        return cls(list(found.values()), marks)

    def changed(self, now: Noted) -> str:
        """The name of a value that another one took the place of; empty if there is none.

        Computed tensors where none was do not count, nor do caches, which are empty at first.
        """
        names = {**self.marks, **now.marks}
        return next((n for n in names if _sets(self.marks.get(n, MISSING), now.marks.get(n, MISSING))), "")

    def computed(self, now: Noted) -> list[Place]:
        """Where there are tensors that a recording between the two has computed."""
        known = {id(h.held): h.values for h in self.holders}
        return [
            (h, k) for h in now.holders for k, v in h.values.items()
            if now.marks[h.path(k)] is COMPUTED and known.get(id(h.held), {}).get(k) is not v
        ]  # fmt: skip

    def put_back(self) -> None:
        """Give everything that was there its earlier values, and empty caches, so that each recording is of the same calls."""
        for holder in self.holders:
            held, before = holder.held, holder.values
            if isinstance(held, list):
                held[:] = before.values()
                continue
            for key in [k for k in _values(held) if k not in before]:
                del held[key]
            held.update(before)


class UsesOf(TorchFunctionMode):
    """Notes which of some tensors are used inside: `seen` has their places."""

    def __init__(self, wanted: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.wanted, self.seen = {id(t): i for i, t in enumerate(wanted)}, list[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(out))
        if made or getattr(func, "__name__", "") == "__setitem__":  # to ask for a shape is no use of values
            self.seen += [self.wanted[id(t)] for t in pytree.tree_leaves((args, kwargs)) if id(t) in self.wanted]
        return out


class Same:
    """The mark of a tensor or other object: its identity, and how often a tensor was written. The object is kept, so that no other
    takes its place in memory."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        tensor = isinstance(value, torch.Tensor) and not value.is_inference()
        self.value, self.key = value, (id(value), value._version if tensor else 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


def is_plain(value: Any) -> bool:
    """Whether it is a number, word, flag or None, or a tuple of them."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def _is_nothing(value: Any) -> bool:
    return value is None or value is MISSING


def mark_of(value: Any) -> Any:
    """What counts about a value: two with the same mark can be exchanged for each other."""
    if is_plain(value):
        return value
    return COMPUTED if isinstance(value, torch.Tensor) and value.is_meta else Same(value)


def _sets(then: Any, now: Any) -> bool:
    """Whether a forward pass that leaves the second mark in place of the first has set what a later pass may read."""
    if then is now or then is COMPUTED:
        return False
    if _is_nothing(then) and not is_plain(now):
        return False
    if isinstance(then, Same) and isinstance(now, Same):
        a, b = then.value, now.value
        if not isinstance(a, torch.Tensor):
            return False
        alike = isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a, b)
        return not alike
    return bool(then != now)


def raw_values(held: Held) -> dict[Any, Any]:
    """What is held, by attribute or place."""
    if isinstance(held, list):
        return dict(enumerate(held))
    return {k: v for k, v in held.items() if k not in _APART}


def _values(held: Held) -> dict[Any, Any]:
    """The values that count, by attribute or place. In place of one that is refused it is the one before."""
    found = raw_values(held)
    for key in [k for k, v in found.items() if isinstance(v, Absent)]:
        set_or_delete(found, key, found[key].instead)
    return found


def _inside(value: Any) -> Held | None:
    """What a config, list or dict holds; None for what holds nothing that is watched."""
    if isinstance(value, (list, dict)):
        return value if len(value) <= LONGEST else None
    return value.__dict__ if _is_config(value, DEPTH) else None


def _is_config(value: Any, depth: int) -> bool:
    """Whether an object holds values, and no code or parts of a program, as a trainer does that a module knows."""
    if isinstance(value, _NO_CONFIG) or not hasattr(value, "__dict__") or not depth:
        return False
    return all(isinstance(v, (*_PLAIN, *_VALUES)) or _is_config(v, depth - 1) for v in value.__dict__.values())


def set_or_delete(held: Held, key: Any, value: Any) -> None:
    """Set a value, or delete it if the new one is MISSING."""
    if value is MISSING:
        del held[key]
    else:
        held[key] = value
