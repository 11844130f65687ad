"""What a model's modules hold beside weights and buffers: generated code has it as it was when it was written.

These are numbers, words and flags, lists and dicts of them, those of a config, and tensors that are not buffers. A user may set one
between two steps (`model.beta = 0.1`), and then the code is written again. If the model's own code sets one in each forward pass
(`self.steps += 1`), only that code can run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from planner_core.runtime.plan_reader import PlanMismatch

PLAIN = (bool, int, float, str, type(None))
MOST_STATES = 32
"""So many times the code is written for other values of attributes, then a step is refused."""
LONGEST = 64
"""A list or dict that is longer is data, and not watched."""
DEPTH = 2
"""Configs inside of configs are looked at so deep."""
Holder = tuple[str, dict[str, Any]]
"""A module or config: its name, and its own attributes."""


def _plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(_plain, value)))


class _Same:
    """A tensor by its identity. It is kept, so that no other takes its place in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def _frozen(value: Any) -> Any:
    """A list or dict of plain values as they are now, a tensor by its identity; None for all else."""
    if isinstance(value, (list, dict)):
        items = list(value.items()) if isinstance(value, dict) else value
        return (type(value), *items) if len(items) <= LONGEST and all(map(_plain, items)) else None
    return _Same(value) if isinstance(value, torch.Tensor) else None


def _holders(modules: Iterable[tuple[str, nn.Module]]) -> list[Holder]:
    """The modules, and every config that one of them holds."""
    found: dict[int, Holder] = {}
    todo = [(name, module.__dict__, DEPTH) for name, module in modules]
    while todo:
        name, held, depth = todo.pop()
        if id(held) in found:
            continue
        found[id(held)] = name, held
        for key, value in held.items() if depth else ():
            if not key.startswith("_") and hasattr(value, "__dict__") and not isinstance(value, _NO_CONFIG):
                todo.append((f"{name}.{key}".lstrip("."), value.__dict__, depth - 1))
    return list(found.values())


_NO_CONFIG = (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType)


class Attributes:
    """The attributes of every module and config."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.modules = list(modules)
        self.seen: dict[Any, int] = {}
        self.number = 0
        self._notice()

    def _notice(self) -> None:
        """Note which attributes there are, and their values."""
        self.holders = _holders(self.modules)
        self.getters: list[tuple[dict[str, Any], list[str], Any]] = []
        self.values: list[tuple[Any, ...]] = []
        self.others: list[tuple[str, dict[str, Any], str, Any]] = []
        for name, held in self.holders:
            names = [n for n, v in held.items() if _plain(v)]
            get = _getter(names)
            self.getters.append((held, names, get))
            self.values.append(get(held))
            others = ((n, _frozen(v)) for n, v in held.items() if not n.startswith("_"))
            self.others += [(name, held, n, kept) for n, kept in others if kept is not None]
        self.sizes = [len(held) for _, held in self.holders]

    def state(self) -> int:
        """A number for the present values: the same number for the same values. Raises PlanMismatch if they change with each step."""
        if self.seen and self._as_noted():
            return self.number
        before = self.table()
        self._notice()
        table = self.table()
        self.number = self.seen.setdefault(tuple(sorted(table.items(), key=itemgetter(0))), len(self.seen))
        if self.number >= MOST_STATES:
            raise PlanMismatch(
                f"{differing(before, table)} of the model has had more than {MOST_STATES} values, and the code of a step is written "
                "anew for each; keep it in a buffer, whose values a step reads, or give it to forward as a tensor"
            )
        return self.number

    def _as_noted(self) -> bool:
        try:
            now = [get(held) for held, _, get in self.getters]
        except KeyError:
            return False
        return (
            now == self.values
            and self.sizes == [len(held) for _, held in self.holders]
            and all(_frozen(held.get(n)) == kept for _, held, n, kept in self.others)
        )

    def table(self) -> dict[str, Any]:
        """The noted values, by module and attribute."""
        rows = zip(self.holders, self.getters, self.values, strict=True)
        plain = {
            f"{m}.{n}".lstrip("."): v for (m, _), (_, names, _), got in rows for n, v in zip(names, got, strict=True)
        }
        return plain | {f"{m}.{n}".lstrip("."): kept for m, _, n, kept in self.others}


def _getter(names: list[str]) -> Any:
    """Gives the values of these keys as a tuple. An itemgetter of one name gives none, and there is none of no names."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda held: tuple([held[n] for n in names])


@dataclass(frozen=True, slots=True)
class Noted:
    """The attributes of every module at one time: its name, its own attributes, and a copy of them."""

    modules: list[tuple[str, dict[str, Any], dict[str, Any]]]

    @classmethod
    def of(cls, model: nn.Module) -> Noted:
        """The present ones."""
        return cls([(n, m.__dict__, dict(m.__dict__)) for n, m in model.named_modules()])

    def changed(self) -> str:
        """The name of an attribute that has another plain value now; empty if there is none."""
        found = (f"{m}.{k}".lstrip(".") for m, held, before in self.modules for k in _changed(held, before, _plain))
        return next(found, "")

    def kept(self) -> str:
        """The name of an attribute that has become a tensor without values, so a computed one; empty if there is none."""
        found = (f"{m}.{k}".lstrip(".") for m, held, before in self.modules for k in _changed(held, before, _on_meta))
        return next(found, "")

    def put_back(self) -> None:
        """Give every module the plain values and tensors that it had."""
        for _, held, before in self.modules:
            for name in list(_changed(held, before, lambda v: _plain(v) or isinstance(v, torch.Tensor))):
                if name in before:
                    held[name] = before[name]
                else:
                    del held[name]


def _on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _changed(held: Mapping[str, Any], before: Mapping[str, Any], kind: Any) -> Iterator[str]:
    """The names of attributes whose values are of a kind, and other ones than before."""
    for name, value in held.items():
        if not kind(value):
            continue
        then = before.get(name, _changed)
        if value is not then and (not _plain(value) or not _plain(then) or value != then):
            yield name


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The name of an attribute that has another value."""
    return next((n for n in {**after, **before} if before.get(n, differing) != after.get(n, differing)), "an attribute")
