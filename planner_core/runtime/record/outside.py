"""What a model's code reads that no module holds: globals of its source files, and attributes of its classes. A user may set these, too."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from planner_core.models.hooks import DEPTH, LONGEST, MISSING, is_plain, mark_of

LIBRARIES = ("torch", "transformers", "builtins", "numpy")
"""Packages whose code nobody sets between two steps."""
Place = tuple[str, Mapping[str, Any], str]
"""The name of a value, and where it stands."""


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
        return {name: _mark(held.get(key, MISSING), DEPTH) for name, held, key in self._places.values()}

    def _class(self, cls: type) -> None:
        if cls in self._seen or cls.__module__.partition(".")[0] in LIBRARIES:
            return
        self._seen.add(cls)
        for name, value in list(vars(cls).items()):
            if isinstance(value, (staticmethod, classmethod, property)):
                value = value.fget if isinstance(value, property) else value.__func__
            if isinstance(value, FunctionType):
                self._function(value)
            elif not name.startswith("__"):
                self._value(f"{cls.__name__}.{name}", vars(cls), name)

    def _function(self, function: FunctionType) -> None:
        if function in self._seen or function.__module__.partition(".")[0] in LIBRARIES:
            return
        self._seen.add(function)
        for name in _globals_of(function.__code__):
            value = function.__globals__.get(name, MISSING)
            if isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, type):
                self._class(value)
            else:
                self._value(name, function.__globals__, name)

    def _value(self, name: str, held: Mapping[str, Any], key: str) -> None:
        value = held.get(key, MISSING)
        if is_plain(value) or isinstance(value, (list, dict, tuple, torch.Tensor)):
            self._places[id(held), key] = name, held, key


def _globals_of(code: CodeType) -> set[str]:
    """The names of globals that a function and those inside it read."""
    found = {str(i.argval) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return found.union(*(_globals_of(c) for c in code.co_consts if isinstance(c, CodeType)))


def _mark(value: Any, depth: int) -> Any:
    if isinstance(value, (list, tuple, dict)) and not is_plain(value) and depth and len(value) <= LONGEST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((key, _mark(item, depth - 1)) for key, item in items)
    return mark_of(value)
