"""What a model's code reads that no module holds: globals of its source files, and attributes of its classes. A user may set these, too."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from planner_core.models.hooks import COMPUTED, DEPTH, MISSING, Content, inside, is_plain, mark_of
from planner_core.runtime.record.tape import Named

LIBRARIES = ("torch", "transformers", "builtins", "numpy")
"""Packages whose code nobody sets between two steps."""
Place = tuple[str, Mapping[str, Any], str, Any]
"""The name of a value, where it stands, and the class or the dict in which it is set."""


class Outside:
    """The values that stand outside of modules. `marks()` says what counts about them now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: dict[tuple[int, str], Place] = {}
        self._seen: set[Any] = set()
        for kind in {type(m): None for m in modules}:
            for cls in kind.__mro__:
                if issubclass(cls, nn.Module):
                    self._class(cls)

    def marks(self) -> dict[str, Any]:
        """What counts about each value, by its name."""
        return {name: _mark(held.get(key, MISSING), DEPTH) for name, held, key, _ in self._places.values()}

    def set_since(self, before: dict[str, Any]) -> str:
        """The name of a value that was set since `before`; empty if there is none. What was added to a dict or list is a cache, unless
        the pass has computed it: that is a state, which a later step may read."""
        marks = self.marks().items()
        return next((n for n, m in marks if _set(before[n], m) or (_computed(m) and not _computed(before[n]))), "")

    def values(self) -> list[Named]:
        """Each value, with its name."""
        return [(name, (owner, key, held.get(key, MISSING))) for name, held, key, owner in self._places.values()]

    def keep(self) -> Callable[[], None]:
        """A function that lets all values be as they are now."""
        kept = [(owner, key, held[key]) for _, held, key, owner in self._places.values() if key in held]
        contents = [put_back for *_, value in kept for put_back in _contents(value, DEPTH)]

        def put_back() -> None:
            for owner, key, value in kept:
                if isinstance(owner, dict):
                    owner[key] = value
                elif vars(owner).get(key) is not value:  # to set an attribute of a class is slow
                    setattr(owner, key, value)
            for restore in contents:
                restore()

        return put_back

    def _class(self, cls: type) -> None:
        if cls in self._seen or str(cls.__module__).partition(".")[0] in LIBRARIES:
            return
        self._seen.add(cls)
        for name, value in list(vars(cls).items()):
            if isinstance(value, (staticmethod, classmethod, property)):
                value = value.fget if isinstance(value, property) else value.__func__
            if isinstance(value, FunctionType):
                self._function(value)
            elif not name.startswith("__"):
                self._value(f"{cls.__name__}.{name}", vars(cls), name, cls)

    def _function(self, function: FunctionType) -> None:
        if function in self._seen or str(function.__module__).partition(".")[0] in LIBRARIES:
            return
        self._seen.add(function)
        if Content.of(function):  # variables from around it
            self._places[id(function), ""] = function.__name__, {"": function}, "", {}
        for name in _globals_of(function.__code__):
            value = function.__globals__.get(name, MISSING)
            if isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, type):
                self._class(value)
            else:
                self._value(name, function.__globals__, name, function.__globals__)

    def _value(self, name: str, held: Mapping[str, Any], key: str, owner: Any) -> None:
        value = held.get(key, MISSING)
        if (
            is_plain(value)
            or isinstance(value, (tuple, torch.Tensor))
            or inside(value) is not None
            or Content.of(value)
        ):
            self._places[id(owner), key] = name, held, key, owner


def _globals_of(code: CodeType) -> set[str]:
    """The names of globals that a function and those inside it read."""
    found = {str(i.argval) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return found.union(*(_globals_of(c) for c in code.co_consts if isinstance(c, CodeType)))


def _mark(value: Any, depth: int) -> Any:
    within = value if isinstance(value, tuple) and not is_plain(value) else inside(value)
    if within is None or not depth:
        return mark_of(value)
    items = within.items() if isinstance(within, dict) else enumerate(within)
    return tuple((key, _mark(item, depth - 1)) for key, item in items)


def _computed(mark: Any) -> bool:
    return mark is COMPUTED or (isinstance(mark, tuple) and any(map(_computed, mark)))


def _set(before: Any, now: Any) -> bool:
    if (
        isinstance(before, tuple)
        and isinstance(now, tuple)
        and before
        and all(type(x) is tuple and len(x) == 2 for x in before)
    ):
        later = dict(x for x in now if type(x) is tuple and len(x) == 2)
        return any(key not in later or _set(mark, later[key]) for key, mark in before)
    if isinstance(before, Content):
        return isinstance(now, Content) and before != now
    return bool(is_plain(before) and is_plain(now) and before != now and before != ())


def _contents(value: Any, depth: int) -> Iterator[Callable[[], None]]:
    """Functions that give what holds values the items that it has now."""
    within = inside(value)
    if not depth or within is None:
        content = Content.of(value)
        if content:
            yield content.put_back
        return
    if isinstance(within, list):
        yield partial(within.__setitem__, slice(None), list(within))
    else:
        yield partial(_refill, within, dict(within))
    for item in within.values() if isinstance(within, dict) else within:
        yield from _contents(item, depth - 1)


def _refill(held: dict[Any, Any], items: dict[Any, Any]) -> None:
    held.clear()
    held.update(items)
