"""Generated code has what a model's modules hold as it was when it was written.

A user may set a value between two steps (`model.beta = 0.1`), and then the code is written again. If the model's own code sets one in
each forward pass (`self.steps += 1`), only that code can run. Caches are kept as that code would keep them: a table for the longest
length so far may have other values than one for a shorter length.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.models.hooks import (
    MISSING,
    Content,
    Noted,
    Same,
    inside,
    is_plain,
    kept_tensors,
    mark_of,
    raw_values,
    set_or_delete,
)
from planner_core.runtime.plan_reader import PlanMismatch
from planner_core.runtime.record.outside import Outside
from planner_core.runtime.record.recorder import CannotRewrite
from planner_core.runtime.record.tape import Cache, Named, Tape, same_values

MOST_STATES = 32
"""So many times the code is written for other values of attributes, then a step is refused."""


def put(cache: Cache) -> None:
    """Let a cache be what its place holds."""
    held, key, value = cache
    if isinstance(held, type):
        setattr(held, key, value)
    else:
        set_or_delete(held, key, value)


def caches_of(before: Noted, after: Noted) -> list[Named]:
    """The tensors with values, each with its name, that a recording between the two has put in the place of others, or of none."""
    found: list[Named] = []
    known = {id(h.held): h.values for h in before.holders}
    for holder in after.holders:
        was = known.get(id(holder.held), holder.values)
        if isinstance(holder.held, list) and len(was) != len(holder.values) and _has_values([*holder.values.values()]):
            found.append((holder.name, (holder.held, slice(None), [*holder.values.values()])))
            continue
        for key in {**was, **holder.values}:
            old, new = was.get(key, MISSING), holder.values.get(key, MISSING)
            if old is not new and _has_values([old, new]):
                found.append((holder.path(key), (holder.held, key, new)))
    return found


def caches_outside(before: Iterable[Named], after: Iterable[Named]) -> list[Named]:
    """As `caches_of`, of values outside of modules."""
    pairs = zip(before, after, strict=True)
    return [now for (_, was), now in pairs if was[2] is not now[1][2] and _has_values([was[2], now[1][2]])]


def rebound_buffers(tape: Tape) -> list[Named]:
    """The buffers whose names forward has given to tensors of other values."""
    return [(key, (held, key, now)) for held, key, now in tape.rebound if not alike_values(held[key], now)]


def settled(found: Iterable[Named], tape: Tape, again: Tape) -> list[Cache]:
    """Those of the caches that the recording `tape` has left which the next one, `again`, has left as they were. What each makes anew is
    none, but for buffers, which are saved. Raises CannotRewrite if they depend on inputs, or change in each pass."""
    kept, anew = [], {(id(held), str(key)): value for held, key, value in again.rebound}
    for name, (held, key, value) in found:
        now = anew.get((id(held), str(key)), _at(held, key))
        stays = _is(now, value)
        saved = any(held is table for table, *_ in tape.rebound)
        tensors = _tensors(value)
        read = any(t.value is v for t in again.tensors for v in tensors)
        moves = any(t.is_meta or any(t is m for m in tape.moving) for t in tensors)
        if (not stays and (read or not alike_values(now, value))) or ((stays or saved) and moves):
            raise CannotRewrite(f"its forward pass sets {name}, which generated code would not do")
        if stays or saved:
            kept.append((held, key, value))
    return kept


def _is(now: Any, value: Any) -> bool:
    """Whether a place still holds a cache; what a list holds is compared, as it is looked up anew."""
    return now is value or (type(now) is type(value) is list and len(now) == len(value) and all(map(is_, now, value)))


def alike_values(a: Any, b: Any) -> bool:
    """Whether two caches have tensors of the same values."""
    mine, theirs = _tensors(a), _tensors(b)
    return (type(a), len(mine)) == (type(b), len(theirs)) and all(map(_alike, mine, theirs))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and same_values(a, b)


def _at(held: Any, key: Any) -> Any:
    if isinstance(held, list):
        return held[key]
    return vars(held).get(key, MISSING) if isinstance(held, type) else held.get(key, MISSING)


def _has_values(items: list[Any]) -> bool:
    """Whether there are tensors, and none that a recording has computed."""
    tensors = _tensors(items)
    return bool(tensors) and not any(t.is_meta for t in tensors)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, also those that a config or another object holds."""
    items = value if isinstance(value, list) else [value]
    return [t for item in items for t in kept_tensors(inside(item) or item)]


class Attributes:
    """Gives each set of values that the modules' attributes have had a number."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], outside: Outside) -> None:
        self.modules, self.outside = list(modules), outside
        self.seen: dict[Any, int] = {}
        self.number = 0
        self.caches: dict[tuple[int, str], list[Cache]] = {}  # what each has been
        self.buffers: list[tuple[dict[str, Any], str]] = []  # those that are caches
        self.by_caches = 0  # states that caches have made, and no user
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
        self.places += self.buffers
        self.objects += [held.get(key) for held, key in self.buffers]
        marks = (m for m in self.noted.marks.values() if isinstance(m, (Content, Same)))
        self.written = [(m.value, m) for m in marks if isinstance(m, Content) or isinstance(m.value, torch.Tensor)]

    def state(self) -> int:
        """A number for the present values: the same number for the same values. Raises PlanMismatch if they change with each step."""
        if self.seen and self._as_noted():
            return self.number
        before, outer = self.noted, self.outer
        self._number()
        if self.number - self.by_caches >= MOST_STATES:
            changed = before.changed(self.noted) or next(
                (n for n, m in outer.items() if self.outer.get(n) != m), "an attribute"
            )
            raise PlanMismatch(
                f"{changed} of the model has had more than {MOST_STATES} values, and the code of a "
                "step is written anew for each; keep it in a buffer, whose values a step reads, or give it to forward as a tensor"
            )
        return self.number

    def _number(self) -> None:
        self._notice()
        inner = tuple(sorted(self.noted.marks.items(), key=itemgetter(0)))
        buffers = tuple([id(held.get(key)) for held, key in self.buffers])  # `caches` keeps them: ids stay theirs
        self.number = self.seen.setdefault((inner, tuple(self.outer.items()), buffers), len(self.seen))

    def known(self, left: Iterable[Cache], device: torch.device) -> list[Cache]:
        """Caches that a recording has left, each as the one that was there before with the same values."""
        found: list[Cache] = []
        for held, key, value in left:
            if any(m._buffers is held for _, m in self.modules):
                value = value.to(device)
                if all(table is not held or name != key for table, name in self.buffers):
                    self.buffers.append((held, key))
            been = self.caches.setdefault((id(held), str(key)), [(held, key, _at(held, key))])
            same = next((cache for cache in been if alike_values(cache[2], value)), None)
            if same is None:
                been.append(same := (held, key, value))
            found.append(same)
        return found

    def keep(self, left: Iterable[Cache]) -> None:
        """Let caches be as a step leaves them."""
        moved = [(held, key, value) for held, key, value in left if not _is(_at(held, key), value)]
        before = len(self.seen)
        for cache in moved:
            put(cache)
        if moved:
            self._number()
            self.by_caches += len(self.seen) - before

    def move_caches(self, device: torch.device) -> None:
        """Let caches be where the model's own code computes; recordings make them on the CPU."""
        for held, key, _ in [been[0] for been in self.caches.values()]:
            now = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), _at(held, key))
            put((held, key, now))

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
