"""Masks of the model's inputs that pick elements (`x[labels != -100]`): how many they pick is another number in each batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

_PICKING = frozenset({"getitem", "setitem", "masked_select", "nonzero", "argwhere"})


class Picks:
    """Follows what depends on the inputs. With `fewer`, a mask of theirs picks one element less than it would; one that picks none or
    one picks another.

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
        if fn in ("nonzero", "argwhere"):  # of numbers, too
            return (self._mask(args[0]), *args[1:])
        index = args[1]
        found = tuple(map(self._index, index)) if isinstance(index, tuple) else self._index(index)
        return (args[0], found, *args[2:])

    def _index(self, item: Any) -> Any:
        return self._mask(item) if isinstance(item, torch.Tensor) and item.dtype == torch.bool else item

    def _mask(self, item: torch.Tensor) -> torch.Tensor:
        if item.is_meta or not item.dim() or not self.varies(item):
            return item
        picked, left = item.nonzero(), (item == 0).nonzero()
        less = len(picked) > 1
        if not less and not len(left):
            return item
        self.where.append(self.line())
        if not self.fewer:
            return item
        other = item.clone()
        other[tuple(picked[-1] if less else left[0])] = 0 if less else 1
        return other
