"""The settings of a tool, read field by field, so that fields that were not read can be reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner_core.core import InputError, listed, short
from planner_core.planning.methods import Layout

MOST = 10**9
UNSAID = ("auto", None, "")
"""Values that mean: the tool chooses."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a tool's file says about a run: the layout, options of the statement by name, and notes about what was ignored."""

    layout: Layout
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass
class Fields:
    """Settings by dotted path (`parallelism.tensor_parallel_degree`). A field counts as read when its value was asked for."""

    where: str
    values: dict[str, Any]
    read: set[str] = field(default_factory=set)

    @staticmethod
    def of(data: Mapping[str, Any], where: str) -> Fields:
        """The leaves of nested settings."""
        return Fields(where, dict(_leaves(data, "")))

    def has(self, name: str) -> bool:
        """Whether a field is there and has a value."""
        return self.values.get(name) not in UNSAID

    def _get(self, name: str, default: Any) -> Any:
        self.read.add(name)
        value = self.values.get(name)
        return default if value in UNSAID else value

    def whole(self, name: str, default: int, least: int = 1) -> int:
        """A whole number; raises InputError for anything else."""
        value = self._get(name, default)
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = least - 1
        if (
            isinstance(value, bool)
            or number < least
            or number > MOST
            or number != (float(value) if number >= least else number)
        ):
            raise self.wrong(name, value, f"a whole number from {least}")
        return number

    def number(self, name: str, default: float) -> float:
        """A number; raises InputError for anything else."""
        value = self._get(name, default)
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        if isinstance(value, bool) or not math.isfinite(found):
            raise self.wrong(name, value, "a number")
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false, also as text."""
        value = self._get(name, default)
        found = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(value).lower())
        if found is None:
            raise self.wrong(name, value, "true or false")
        return found

    def text(self, name: str, default: str, choices: tuple[str, ...] = ()) -> str:
        """A word in lower case; one of `choices` if there are any."""
        value = str(self._get(name, default)).lower()
        if choices and value not in choices:
            raise self.wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def only(self, name: str, wanted: int, what: str) -> None:
        """Raise InputError if a number other than `wanted` asks for `what`, which cannot be priced."""
        if self.has(name) and self.whole(name, wanted, least=0) not in (0, wanted):
            raise InputError(
                f"{self.where}: {name} {self.values[name]} asks for {what}, which cannot be priced; set it to {wanted}"
            )

    def off(self, name: str, what: str) -> None:
        """Raise InputError if a flag asks for `what`, which cannot be priced."""
        if self.has(name) and str(self.values[name]).lower() not in ("false", "none", "0", "no"):
            raise InputError(f"{self.where}: {name} asks for {what}, which cannot be priced; switch it off")
        self.read.add(name)

    def wrong(self, name: str, value: Any, wanted: str) -> InputError:
        """The error for an impossible value."""
        return InputError(f"{self.where}: {name} is {short(value)}, but must be {wanted}")

    def unread(self) -> tuple[str, ...]:
        """A note about the fields that were not read, if there are any."""
        rest = sorted(name for name in self.values if name not in self.read)
        return (
            (f"{self.where}: not read, since they do not change the layout or are not known: {listed(rest)}",)
            if rest
            else ()
        )


def _leaves(data: Mapping[str, Any], path: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        name = f"{path}.{key}" if path else str(key)
        found += _leaves(value, name) if isinstance(value, Mapping) and value else [(name, value)]
    return found


def shared_out(fields: Fields, name: str, num_gpus: int, others: int) -> int:
    """`num_gpus` divided by `others`: the ranks that are left for a degree. Raises InputError if that is not a whole number."""
    if num_gpus % others:
        raise InputError(
            f"{fields.where}: {name} makes groups of {others} ranks, but {num_gpus} GPUs do not divide by that"
        )
    return num_gpus // others


def accumulation(fields: Fields, name: str, micro_batch: int, ranks: int) -> int | None:
    """Micro-batches of a step, from the field with the samples of a whole step; None if that field has no value."""
    if not fields.has(name):
        return None
    batch = fields.whole(name, 1)
    if batch % (micro_batch * ranks):
        raise InputError(
            f"{fields.where}: {name} {batch} is not a multiple of {micro_batch} samples on each of {ranks} data-parallel ranks"
        )
    return batch // (micro_batch * ranks)
