"""Sizes that the values of a model's inputs say: how many elements a mask picks (`x[labels != -100]`), how many different values there are,
how often each is repeated. They are other numbers in each batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

_PICKING = frozenset({"getitem", "setitem", "masked_select", "nonzero", "argwhere"})
_COUNTING = frozenset({"unique", "unique_consecutive", "bincount", "one_hot", "repeat_interleave"})


class Picks:
    """Follows what depends on the inputs. With `fewer`, a mask of theirs picks one element less than it would; one that picks none or
    one picks another. In the same way there is one value less, and one repetition.

    `where` has the lines at which values say a size; `line()` gives the present one.
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

    def taken(self, fn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which a call is run."""
        if fn in _COUNTING:
            return self._counted(fn, args, kwargs)
        if fn not in _PICKING:
            return args, kwargs
        if fn in ("nonzero", "argwhere"):  # of numbers, too
            return (self._mask(args[0]), *args[1:]), kwargs
        index = args[1]
        found = tuple(map(self._index, index)) if isinstance(index, tuple) else self._index(index)
        return (args[0], found, *args[2:]), kwargs

    def _counted(
        self, fn: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if fn == "repeat_interleave" and type(kwargs.get("repeats", args[1] if len(args) > 1 else None)) is int:
            return args, kwargs
        if fn == "repeat_interleave" and isinstance(kwargs.get("repeats"), torch.Tensor):
            return args, {**kwargs, "repeats": self._other(kwargs["repeats"], one_repetition_less)}
        if fn == "repeat_interleave":
            at = [isinstance(a, torch.Tensor) for a in args].count(True) - 1  # x and repeats, or repeats alone
            change: Callable[[torch.Tensor], torch.Tensor] = one_repetition_less
        elif fn in ("bincount", "one_hot"):
            most = next((n for n in (*args[1:], *kwargs.values()) if type(n) is int), -1)
            if not args or args[0].is_meta or not args[0].numel() or int(args[0].max()) < most:
                return args, kwargs  # the model says how many there are
            change, at = one_value_less, 0
        else:
            change, at = (one_run_less if fn == "unique_consecutive" else one_value_less), 0
        return tuple(self._other(a, change) if i == at else a for i, a in enumerate(args)), kwargs

    def _other(self, item: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if not isinstance(item, torch.Tensor) or item.is_meta or not item.numel() or not self.varies(item):
            return item
        self.where.append(self.line())
        return change(item) if self.fewer else item

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


def one_value_less(x: torch.Tensor) -> torch.Tensor:
    """Whole numbers without their largest, or one more if all are equal."""
    values = torch.unique(x)
    if len(values) > 1:
        return torch.where(x == values[-1], values[-2], x)
    other = _own(x)
    other.view(-1)[0] = _another(other.view(-1)[0])
    return other


def one_run_less(x: torch.Tensor) -> torch.Tensor:
    """The last run of equal numbers joined to the one before, or one more run if there is only one."""
    other = _own(x)
    flat = other.view(-1)
    starts = (flat[1:] != flat[:-1]).nonzero()
    if len(starts):
        last = int(starts[-1]) + 1
        flat[last:] = flat[last - 1].clone()
    else:
        flat[-1] = _another(flat[-1])
    return other


def one_repetition_less(repeats: torch.Tensor) -> torch.Tensor:
    """The most repeated is repeated once less, or the first once more if none is repeated."""
    other = _own(repeats)
    flat = other.view(-1)
    at = int(flat.argmax())
    flat[at] += -1 if flat[at] > 0 else 1
    return other


def _own(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _another(number: torch.Tensor) -> torch.Tensor:
    return ~number if number.dtype == torch.bool else number + 1
