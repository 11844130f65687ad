"""Float literals in repeated blocks. Layers that differ only in them are one block.

No price depends on such a number, and a rule asks only whether it is 0 (padding, label smoothing): "varies" is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner_core.core import VARIES, Attr
from planner_core.models.capture.recording import Record


def without_float_values(attrs: Mapping[str, Attr]) -> tuple[tuple[str, Attr], ...]:
    """Drop the values of float literals: layers that differ only in these (DiffLlama's `lambda_init`) have the same plans."""
    return tuple((k, "float" if isinstance(v, float) else v) for k, v in sorted(attrs.items()))


def common_attrs(records: Sequence[Record]) -> dict[str, Attr]:
    """Return the attributes of one op in all copies of its block, with VARIES for a float that differs."""
    first = records[0].attrs
    return {k: v if all(r.attrs is first or r.attrs[k] == v for r in records) else VARIES for k, v in first.items()}
