"""Float literals in repeated blocks. Layers that differ only in them are one block, and each call keeps its own literals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner_core.core import PER_CALL, Attr
from planner_core.models.capture.recording import Record


def without_float_values(attrs: Mapping[str, Attr]) -> tuple[tuple[str, Attr], ...]:
    """Drop the values of float literals: layers that differ only in these (DiffLlama's `lambda_init`) have the same plans."""
    return tuple((k, "float" if isinstance(v, float) else v) for k, v in sorted(attrs.items()))


def list_per_call(records: Sequence[Record]) -> dict[str, Attr]:
    """Return the attributes of one op in all copies of its block. Floats that differ are listed call by call (`graph.PER_CALL`)."""
    first = dict(records[0].attrs)
    for name, value in records[0].attrs.items():
        if any(r.attrs is not records[0].attrs and r.attrs[name] != value for r in records):
            first[name] = (PER_CALL, *(r.attrs[name] for r in records))
    return first
