"""Generated code has what a model's modules hold as it was when it was written.

A user may set a value between two steps (`model.beta = 0.1`), and then the code is written again. If the model's own code sets one in
each forward pass (`self.steps += 1`), only that code can run.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from planner_core.models.hooks import MISSING, Content, Noted, Place, Same, is_plain, mark_of, raw_values, set_or_delete
from planner_core.runtime.plan_reader import PlanMismatch
from planner_core.runtime.record.not_computed import NotComputed
from planner_core.runtime.record.outside import Outside

MOST_STATES = 32
"""So many times the code is written for other values of attributes, then a step is refused."""


def refuse_kept(places: Iterable[Place], before: Noted) -> None:
    """Let attributes of what there was before, in which a recording has left computed tensors, refuse to be used."""
    known = {id(h.held) for h in before.holders}
    for at, key in places:
        while at.parent and (id(at.held) not in known or isinstance(at.held, list)):
            at, key = at.parent
        if isinstance(at.held, dict) and not isinstance(at.held.get(key), NotComputed):
            at.held[key] = NotComputed(at.path(key), at.held.get(key, MISSING))


def allow_kept(noted: Noted) -> None:
    """Undo `refuse_kept`, so that forward can be recorded again."""
    for held in [h.held for h in noted.holders]:
        for key, value in list(held.items()) if isinstance(held, dict) else ():
            if isinstance(value, NotComputed):
                set_or_delete(held, key, value.instead)


class Attributes:
    """Gives each set of values that the modules' attributes have had a number."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], outside: Outside) -> None:
        self.modules, self.outside = list(modules), outside
        self.seen: dict[Any, int] = {}
        self.number = 0
        self._notice()

    def _notice(self) -> None:
        """Note which attributes there are, and their values, in forms that are compared fast."""
        self.noted = Noted.of(self.modules)
        self.outer = self.outside.marks()
        helds = [h.held for h in self.noted.holders]
        raw = [(held, raw_values(held)) for held in helds]
        self.helds, self.sizes = helds, list(map(len, helds))
        keys = [(held, [k for k, v in values.items() if is_plain(v)]) for held, values in raw]
        # an itemgetter of one key gives no tuple, and there is none of no keys
        self.getters = [(itemgetter(*names, names[0]), held) for held, names in keys if names]
        self.values = [get(held) for get, held in self.getters]
        self.places = [(held, k) for held, values in raw for k, v in values.items() if not is_plain(v)]
        self.objects = [held[key] for held, key in self.places]
        marks = (m for m in self.noted.marks.values() if isinstance(m, (Content, Same)))
        self.written = [(m.value, m) for m in marks if isinstance(m, Content) or isinstance(m.value, torch.Tensor)]

    def state(self) -> int:
        """A number for the present values: the same number for the same values. Raises PlanMismatch if they change with each step."""
        if self.seen and self._as_noted():
            return self.number
        before, outer = self.noted, self.outer
        self._notice()
        inner = tuple(sorted(self.noted.marks.items(), key=itemgetter(0)))
        self.number = self.seen.setdefault((inner, tuple(self.outer.items())), len(self.seen))
        if self.number >= MOST_STATES:
            changed = before.changed(self.noted) or next(
                (n for n, m in outer.items() if self.outer.get(n) != m), "an attribute"
            )
            raise PlanMismatch(
                f"{changed} of the model has had more than {MOST_STATES} values, and the code of a "
                "step is written anew for each; keep it in a buffer, whose values a step reads, or give it to forward as a tensor"
            )
        return self.number

    def _as_noted(self) -> bool:
        try:
            same = (
                list(map(len, self.helds)) == self.sizes
                and [get(held) for get, held in self.getters] == self.values
                and all(map(is_, [held[key] for held, key in self.places], self.objects))
            )
        except (LookupError, RuntimeError, ValueError):  # gone, or compared with a tensor or array
            return False
        same = same and self.outside.marks() == self.outer
        return same and all(mark_of(value) == mark for value, mark in self.written)
