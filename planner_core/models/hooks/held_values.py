"""What a model's modules hold beside weights and buffers, which its forward pass may read and set.

These are numbers, words, flags and functions, those of a config, lists and dicts of them, and tensors that are no buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain, filterfalse
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner_core.models.hooks.callsites import parts_of

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
_CONTENTS = (partial, deque, set, bytearray, numpy.ndarray)
LARGEST = 1 << 20
"""An array of more bytes is data, and not watched."""
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
    """What all modules hold at one time. `marks`: what counts about each value, by its name. `hooks`: each module's table of hooks for
    forward, and what it had."""

    holders: list[Holder]
    marks: dict[str, Any]
    hooks: list[tuple[dict[Any, Any], dict[Any, Any]]]

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
                if type(value) in _PLAIN or is_plain(value):
                    marks[path] = value
                    continue
                within = inside(value) if depth < DEPTH else None
                if within is not None:
                    todo.append((path, within, (holder, key), depth + 1))
                marks[path] = type(value) if within is not None or id(value) in apart else mark_of(value)
        tables = [m.__dict__[kind] for _, m in modules for kind in ("_forward_hooks", "_forward_pre_hooks")]
        return cls(list(found.values()), marks, [(table, dict(table)) for table in tables])

    def changed(self, now: Noted, besides: Collection[str] = ()) -> str:
        """The name of a value that another one took the place of, `besides` those; empty if there is none.

        Computed tensors where none was do not count, nor do caches, which are empty at first.
        """
        names = [n for n in {**self.marks, **now.marks} if n not in besides]
        return next((n for n in names if _sets(self.marks.get(n, MISSING), now.marks.get(n, MISSING))), "")

    def computed(self, now: Noted) -> list[Place]:
        """Where there are tensors that a recording between the two has computed."""
        known = {id(h.held): h.values for h in self.holders}
        return [
            (h, k) for h in now.holders for k, v in h.values.items()
            if now.marks[h.path(k)] is COMPUTED and known.get(id(h.held), {}).get(k) is not v
        ]  # fmt: skip

    def put_back(self) -> None:
        """Give everything that was there its earlier values, and empty caches, so that each recording is of the same calls. Hooks that
        forward registers at its first call (those of transformers, for hidden states) go as well, as does the flag that says so."""
        for table, hooks in self.hooks:
            for key in [k for k in table if k not in hooks]:
                del table[key]
        for mark in self.marks.values():
            if isinstance(mark, Content):
                mark.put_back()
        for holder in self.holders:
            held, before = holder.held, holder.values
            if isinstance(held, list):
                held[:] = before.values()
                continue
            if new := held.keys() - before.keys() - _APART:
                for key in new & _values(held).keys():
                    del held[key]
            held.update(before)


class Replacement:
    """Puts other tensors, by the id of those there, into the attributes of modules, and into lists, dicts and objects in them."""

    def __init__(self, model: nn.Module, others: Mapping[int, torch.Tensor]) -> None:
        modules = [part for _, part in parts_of(model)]
        self.others, self.seen = others, {id(m) for m in modules}
        self.todo: list[tuple[Iterable[tuple[Any, Any]], Any]] = [
            (raw_values(m.__dict__).items(), m.__dict__) for m in modules
        ]
        for items, held in self.todo:  # grows meanwhile
            for key, item in [*items]:
                if (new := self._current(item)) is not item:
                    held[key] = new

    def _current(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.others.get(id(value), value)
        if isinstance(value, tuple):
            items = [*map(self._current, value)]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if id(value) not in self.seen:
            self.seen.add(id(value))
            self._look_into(value)
        return value

    def _look_into(self, value: Any) -> None:
        held = value if isinstance(value, (list, deque, dict)) else getattr(value, "__dict__", None)
        if isinstance(held, (list, deque)):
            self.todo.append((enumerate(held), held))
        elif isinstance(held, dict) and not isinstance(value, (type, FunctionType, ModuleType)):
            self.todo.append((held.items(), held))


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


class Content:
    """The mark of what holds values otherwise than lists, dicts and configs do: a deque, a set, an array, an object with slots, the
    arguments of a partial function, the variables that a function has from around it."""

    __slots__ = ("key", "restores", "value")

    def __init__(self, value: Any, key: Any, restores: Sequence[Callable[[], None]]) -> None:
        self.value, self.key, self.restores = value, key, restores

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def put_back(self) -> None:
        """Let the value have the content that it had when it was marked."""
        for restore in self.restores:
            restore()

    @classmethod
    def of(cls, value: Any, depth: int = DEPTH) -> Content | None:
        """The mark of such a value; None for any other."""
        if not depth:
            return None
        if isinstance(value, (list, dict, deque, set)):
            return cls._of_items(value, depth) if len(value) <= LONGEST else None
        if isinstance(value, bytearray):
            return cls(value, (id(value), bytes(value)), [partial(value.__setitem__, slice(None), bytes(value))])
        if isinstance(value, numpy.ndarray):
            return cls._of_array(value)
        if isinstance(value, partial):
            inner = [_deep(item, depth - 1) for item in (value.func, *value.args, *value.keywords.values())]
            return cls(value, (partial, *value.keywords, *inner), _restores(inner))
        if isinstance(value, FunctionType):
            return cls._of_function(value, depth)
        return cls._of_slots(value, depth)

    @classmethod
    def _of_array(cls, value: Any) -> Content | None:
        if value.nbytes > LARGEST or value.dtype.hasobject or not value.flags.writeable:
            return None
        before = value.copy()
        return cls(value, (id(value), value.shape, before.tobytes()), [partial(numpy.copyto, value, before)])

    @classmethod
    def _of_slots(cls, value: Any, depth: int) -> Content | None:
        names = [n for kind in type(value).__mro__ for n in _slots(kind) if n[:2] != "__" and hasattr(value, n)]
        if not names or hasattr(value, "__dict__") or isinstance(value, _NO_CONFIG):
            return None
        held = [getattr(value, n) for n in names]
        inner = [_deep(item, depth - 1) for item in held]
        puts = [partial(_set, value, n, x) for n, x in zip(names, held, strict=True) if is_plain(x)]
        return cls(value, (id(value), *inner), [*puts, *_restores(inner)])

    @classmethod
    def _of_items(cls, value: Any, depth: int) -> Content:
        before = value.copy()
        inner = [_deep(item, depth - 1) for item in (before.values() if isinstance(before, dict) else before)]
        key: Any = frozenset(inner) if isinstance(value, set) else tuple(inner)
        names = tuple(before) if isinstance(before, dict) else ()
        return cls(value, (id(value), names, key), [partial(_refill, value, before), *_restores(inner)])

    @classmethod
    def _of_function(cls, value: FunctionType, depth: int) -> Content | None:
        """That of the variables from around a function, and of its defaults."""
        cells = [c for c in value.__closure__ or () if _filled(c)]
        held = [c.cell_contents for c in cells]
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        inner = [_deep(x, depth - 1) for x in (*held, *given)]
        if not inner:
            return None
        puts = [partial(setattr, c, "cell_contents", x) for c, x in zip(cells, held, strict=True) if is_plain(x)]
        return cls(value, (id(value), *inner), [*puts, *_restores(inner)])


def _set(value: Any, name: str, before: Any) -> None:
    if getattr(value, name, MISSING) is not before:  # what cannot be set has not changed
        object.__setattr__(value, name, before)


def _refill(value: Any, before: Any) -> None:
    if _ids(value) != _ids(before):  # what cannot be cleared has not changed
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)


def _ids(value: Any) -> list[int]:
    return [*map(id, chain(*value.items()) if isinstance(value, dict) else value)]


def _deep(value: Any, depth: int) -> Any:
    return value if is_plain(value) else Content.of(value, depth) or Same(value)


def _restores(marks: Iterable[Any]) -> list[Callable[[], None]]:
    return [m.put_back for m in marks if isinstance(m, Content)]


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not MISSING
    except ValueError:  # a variable that has no value yet
        return False


def is_plain(value: Any) -> bool:
    """Whether it is a number, word, flag or None, or a tuple of them."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def kept_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a value that is `COMPUTED`."""
    held = list(value) if isinstance(value, (set, frozenset)) else value
    return [x for x in pytree.tree_leaves(held) if isinstance(x, torch.Tensor)]


def _is_nothing(value: Any) -> bool:
    return value is None or value is MISSING


def mark_of(value: Any) -> Any:
    """What counts about a value: two with the same mark can be exchanged for each other."""
    if is_plain(value):
        return value
    if isinstance(value, torch.Tensor):
        return COMPUTED if value.is_meta else Same(value)
    several = isinstance(value, (tuple, deque, set, frozenset)) and len(value) <= LONGEST  # the two states of an LSTM
    if several and any(mark_of(item) is COMPUTED for item in value):
        return COMPUTED
    return Content.of(value) or Same(value)


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
    return {k: held[k] for k in filterfalse(_APART.__contains__, held)}


def _values(held: Held) -> dict[Any, Any]:
    """The values that count, by attribute or place. In place of one that is refused it is the one before."""
    found = raw_values(held)
    for key in [k for k, v in found.items() if isinstance(v, Absent)]:
        set_or_delete(found, key, found[key].instead)
    return found


def inside(value: Any) -> Held | None:
    """What a config, list or dict holds; None for what holds nothing that is watched."""
    if isinstance(value, (list, dict)):
        return value if len(value) <= LONGEST else None
    return value.__dict__ if _is_config(value, DEPTH) else None


def _is_config(value: Any, depth: int) -> bool:
    """Whether an object holds values, and no code or parts of a program, as a trainer does that a module knows."""
    if isinstance(value, (*_NO_CONFIG, *_CONTENTS)) or not hasattr(value, "__dict__") or not depth:
        return False
    return all(isinstance(v, (*_PLAIN, *_VALUES)) or _is_config(v, depth - 1) for v in value.__dict__.values())


def set_or_delete(held: Held, key: Any, value: Any) -> None:
    """Set a value, or delete it if the new one is MISSING."""
    if value is MISSING:
        del held[key]
    else:
        held[key] = value
