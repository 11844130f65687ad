"""Rows for other programs, as CSV and JSON. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence

Row = Mapping[str, object]
"""A row: names with their units (`step_time_s`), and plain numbers or text."""


def csv_text(rows: Sequence[Row]) -> str:
    """Write the rows with a head; a name that some rows lack is left empty there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def json_text(rows: Sequence[Row]) -> str:
    """Write the rows as a list of objects."""
    return json.dumps(list(rows), indent=1, ensure_ascii=False) + "\n"
