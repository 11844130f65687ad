"""Masks of the model's inputs that pick elements (`x[labels != -100]`): how many they pick is another number in each batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

_PICKING = frozenset({"getitem", "setitem", "masked_select", "nonzero", "argwhere"})


class Picks:
    """Follows what depends on the inputs. With `fewer`, a mask of theirs picks one element less than it would.

    `where` has the lines at which masks pick; `line()` gives the present one.
    """

    def __init__(self, line: Callable[[], str], *, fewer: bool = False) -> None:
        self.line, self.fewer, self.where = line, fewer, list[str]()
        self._varying: dict[int, weakref.ref[torch.Tensor]] = {}

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """These depend on the values of the inputs."""
        self._varying.update((id(t), weakref.ref(t)) for t in tensors)

    def varies(self, tensor: torch.Tensor) -> bool:
        """Whether a constant depends on the values of the inputs."""
        known = self._varying.get(id(tensor))
        return known is not None and known() is tensor

    def taken(self, fn: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with which a call is run."""
        if fn not in _PICKING:
            return args
        at = 0 if fn in ("nonzero", "argwhere") else 1
        index = args[at]
        found = tuple(map(self._mask, index)) if isinstance(index, tuple) else self._mask(index)
        return (*args[:at], found, *args[at + 1 :])

    def _mask(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or item.dtype != torch.bool or item.is_meta or not self.varies(item):
            return item
        if not item.dim() or int(item.sum()) < 2:
            return item
        self.where.append(self.line())
        if not self.fewer:
            return item
        less = item.clone()
        less[tuple(item.nonzero()[-1])] = False
        return less
