"""A module call in canonical form, and its key: equal keys, equal calls.

Layers that differ only in float literals are one block: no price depends on such a number, and a rule asks only whether it is 0
(padding, label smoothing), which "varies" is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner_core.core import VARIES, Attr
from planner_core.models.capture.recording import Record, Replay, Scope

ScopeNode = Scope | Replay


@dataclass(slots=True)
class CanonicalBody:
    """A module call in canonical form: its records, and its values numbered in order of first use."""

    node: ScopeNode
    records: list[Record]
    key: Any = None
    order: dict[int, int] = field(default_factory=dict)  # value -> its number in the body
    hoisted: list[Record] = field(default_factory=list)


class BodyKey:
    """The rows of a canonical body, hashed once: they are compared often, and long."""

    __slots__ = ("hash", "rows")

    def __init__(self, rows: tuple[Any, ...]) -> None:
        self.rows, self.hash = rows, hash(rows)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, BodyKey) and self.hash == other.hash and self.rows == other.rows)

    def __iter__(self) -> Any:
        return iter(self.rows)


def without_float_values(attrs: Mapping[str, Attr]) -> tuple[tuple[str, Attr], ...]:
    """Drop the values of float literals: layers that differ only in these (DiffLlama's `lambda_init`) have the same plans."""
    return tuple((k, "float" if isinstance(v, float) else v) for k, v in sorted(attrs.items()))


def common_attrs(records: Sequence[Record]) -> dict[str, Attr]:
    """Return the attributes of one op in all copies of its block, with VARIES for a float that differs."""
    first = records[0].attrs
    return {k: v if all(r.attrs is first or r.attrs[k] == v for r in records) else VARIES for k, v in first.items()}
