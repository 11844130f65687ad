"""Constants that depend on random numbers: a step draws other ones than the captured pass, so no size may depend on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner_core.models.capture.checks import refusals
from planner_core.models.hooks import draws_random_numbers


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
        if self._sources:
            refusals.check_chance(scope, func, fn, args, [t for t in operands if self._random_source(t) is not None])

    def depends_on_chance(self, fn: str, args: Sequence[Any], operands: Sequence[torch.Tensor]) -> bool:
        """Return whether the result of a call differs from step to step.

        `torch.rand(n) < 1.1` does not: LayerDrop at rate 0 compares in this way, and all its answers are equal.
        """
        sources = [source for t in operands if (source := self._random_source(t)) is not None]
        return draws_random_numbers(fn) or (
            bool(sources) and not ("rand" in sources and refusals.has_one_answer(fn, args))
        )

    def note(self, tensor: torch.Tensor, fn: str) -> None:
        """Remember a result, of the function `fn`, that depends on chance."""
        self._sources[id(tensor)] = weakref.ref(tensor), fn if draws_random_numbers(fn) else ""
