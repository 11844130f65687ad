"""Constants that depend on random numbers: a step draws other ones than the captured pass, so no size may depend on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner_core.models.capture.checks.refusals import reads_values, refusal
from planner_core.models.hooks import draws_random_numbers

_PICKING = frozenset({"masked_select", "nonzero", "argwhere", "unique"})
_HELP = "each step would be another graph; draw no number there (set the rate at which layers are left out to 0), or multiply by a mask"


class RandomConstants:
    """The constants of one pass that were drawn, or computed from such ones."""

    def __init__(self) -> None:
        # id -> the tensor, and the function that drew it: "" for a tensor computed from a drawn one
        self._sources: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    def _random_source(self, tensor: torch.Tensor) -> str | None:
        """Return the function that drew a tensor, "" if it was computed from drawn ones, None for any other."""
        reference, fn = self._sources.get(id(tensor), (None, ""))
        return fn if reference is not None and reference() is tensor else None

    def check(
        self,
        scope: str,
        func: Callable[..., Any],
        fn: str | None,
        args: Sequence[Any],
        operands: Sequence[torch.Tensor],
    ) -> None:
        """Refuse control flow, and sizes, that depend on random numbers."""
        drawn = [t for t in operands if self._random_source(t) is not None] if self._sources else []
        if fn is None and drawn and reads_values(func):
            raise refusal(scope, "decides by random numbers", _HELP)
        if any(t.dtype == torch.bool and (fn in _PICKING or (fn == "getitem" and t is not args[0])) for t in drawn):
            raise refusal(scope, "picks a random number of elements", _HELP)

    def depends_on_chance(self, fn: str, args: Sequence[Any], operands: Sequence[torch.Tensor]) -> bool:
        """Return whether the result of a call differs from step to step.

        `torch.rand(n) < 1.1` does not: LayerDrop at rate 0 compares in this way, and all its answers are equal.
        """
        sources = [source for t in operands if (source := self._random_source(t)) is not None]
        return draws_random_numbers(fn) or (bool(sources) and not ("rand" in sources and _has_one_answer(fn, args)))

    def note(self, tensor: torch.Tensor, fn: str) -> None:
        """Remember a result, of the function `fn`, that depends on chance."""
        self._sources[id(tensor)] = weakref.ref(tensor), fn if draws_random_numbers(fn) else ""


def _has_one_answer(fn: str, args: Sequence[Any]) -> bool:
    """Return whether a comparison with numbers of `torch.rand` has one answer: they lie in [0, 1)."""
    # A limit that is a tensor counts as one inside the range, so that both answers may come.
    limit = args[1] if len(args) == 2 and isinstance(args[1], (int, float)) else 0.5
    return (fn in ("lt", "ge") and not 0 < limit < 1) or (fn in ("le", "gt") and not 0 <= limit < 1)
