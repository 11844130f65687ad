"""The numbers, words and flags that a model's modules hold: generated code has them as they were when it was written.

A user may set one between two steps (`model.beta = 0.1`), and then the code is written again. If the model's own code sets one in
each forward pass (`self.steps += 1`), only that code can run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import nn

from planner_core.runtime.plan_reader import PlanMismatch

PLAIN = (bool, int, float, str, type(None))
MOST_STATES = 32
"""So many times the code is written for other values of attributes, then a step is refused."""


def _plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(_plain, value)))


@dataclass(frozen=True, slots=True)
class Noted:
    """The plain attributes of every module at one time: its name, its own attributes, and a copy of the plain ones."""

    modules: list[tuple[str, dict[str, Any], dict[str, Any]]]

    @classmethod
    def of(cls, modules: Iterable[tuple[str, nn.Module]]) -> Noted:
        """The present ones of named modules."""
        return cls([(n, m.__dict__, {k: v for k, v in m.__dict__.items() if _plain(v)}) for n, m in modules])

    def changed(self) -> str:
        """The name of an attribute that has another value now; empty if there is none."""
        found = (f"{module}.{k}".lstrip(".") for module, held, before in self.modules for k in _changed(held, before))
        return next(found, "")

    def put_back(self) -> None:
        """Give every module the attributes that it had."""
        for _, held, before in self.modules:
            for name in list(_changed(held, before)):
                if name in before:
                    held[name] = before[name]
                else:
                    del held[name]


def _changed(held: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """The names of attributes that have other plain values than before. One that has become a tensor is not among them."""
    for name, value in held.items():
        if _plain(value) and (name not in before or before[name] != value):
            yield name


class Attributes:
    """Gives each set of values that the modules' plain attributes have had a number."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.modules = list(modules)
        self.seen: dict[Any, int] = {}
        self.number = 0
        self._notice()

    def _notice(self) -> None:
        """Note which attributes there are, and their values."""
        self.noted = Noted.of(self.modules)
        # an itemgetter of one name gives no tuple, and there is none of no names; every module has `training`
        self.getters = [(held, itemgetter("training", *before)) for _, held, before in self.noted.modules]
        self.values = [get(held) for held, get in self.getters]
        self.sizes = [len(held) for held, _ in self.getters]

    def state(self) -> int:
        """A number for the present values: the same number for the same values. Raises PlanMismatch if they change with each step."""
        if self.seen and self._as_noted():
            return self.number
        changed = self.noted.changed()
        self._notice()
        key = tuple(tuple(plain.items()) for _, _, plain in self.noted.modules)
        self.number = self.seen.setdefault(key, len(self.seen))
        if self.number >= MOST_STATES:
            raise PlanMismatch(
                f"{changed or 'an attribute'} of the model has had more than {MOST_STATES} values, and the code of a step is written "
                "anew for each; keep it in a buffer, whose values a step reads, or give it to forward as a tensor"
            )
        return self.number

    def _as_noted(self) -> bool:
        try:
            now = [get(held) for held, get in self.getters]
        except KeyError:
            return False
        return now == self.values and self.sizes == [len(held) for held, _ in self.getters]
