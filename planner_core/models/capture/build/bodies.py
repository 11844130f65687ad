"""A module call in canonical form, and its key: equal keys, equal calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
