"""What a plan does and a program cannot be told: each difference with its kind and the layers that it is about."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from planner_core.core import InputError, list_names, named_form

MAX_NAMED_MODULES = 6
WHOLE_PLANS = named_form("torchrun")
"""The form that holds every plan, for a sentence."""


class DifferenceKind(Enum):
    """What a difference is about, as far as a form decides by it."""

    TOKENS = "tokens are split between the blocks"
    GATHERED = "a result that stays split is gathered"
    AXIS = "another axis than that of tensor parallelism"
    EXPERTS = "whole experts lie on single tensor ranks"
    OTHER = "anything else"


TOKENS_OR_GATHERED = (DifferenceKind.TOKENS, DifferenceKind.GATHERED)
"""What a program whose layers are its own does as the plan does."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a plan does and a program cannot be told, as a sentence. `modules`: the layers or weights that it is about, with `*` for
    numbers."""

    text: str
    kind: DifferenceKind = DifferenceKind.OTHER
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def of(names: Iterable[str], what: str, kind: DifferenceKind = DifferenceKind.OTHER) -> Difference:
        """Return a difference of some layers or weights."""
        modules = list(names)
        return Difference(
            f"{describe_modules(modules)}: {what}", kind, tuple(dict.fromkeys(map(star_numbers, modules)))
        )


class CannotHold(InputError):
    """A form cannot hold a plan. `why`: the reason, without the way out, which is the form that runs every plan."""

    def __init__(self, why: str) -> None:
        super().__init__(why, "; use ", WHOLE_PLANS)
        self.why = why


def describe_modules(names: Iterable[str]) -> str:
    """Return names for people: numbers as `*`, doubles once, a few of many."""
    return list_names(list(dict.fromkeys(map(star_numbers, names))), MAX_NAMED_MODULES)


def star_numbers(name: str) -> str:
    """`layers.3.mlp` -> `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
