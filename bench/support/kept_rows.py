"""Rows of a benchmark in a file of JSON lines, so that a sweep can be stopped, taken up again, and made again in parts.

A row says on which day and at which commit it was made. `--before DAY` makes rows anew that are of an earlier day, part by part: a
part loses its old rows when it is measured, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "support" / "results"
Row = dict[str, Any]


@dataclass(frozen=True)
class KeptRows:
    """The file `bench/support/results/NAME.jsonl`. Rows with equal values of `key` are the same measurement, and the last counts."""

    name: str
    key: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file."""
        return RESULTS / f"{self.name}.jsonl"

    def read(self) -> dict[tuple[str, ...], Row]:
        """Return the last row of each key, in the order in which they were first made."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return {tuple(row[k] for k in self.key): row for row in map(json.loads, lines)}

    def append(self, row: Row) -> None:
        """Keep a row, with the day and the commit."""
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "date": f"{datetime.date.today()}", "commit": commit}) + "\n")

    def forget(self, before: str, **part: str) -> None:
        """Leave out rows of days earlier than `before` (2026-11-23) whose fields have the values of `part`, and rows that others replaced."""

        def old(row: Row) -> bool:
            return row.get("date", "") < before and all(row[k] == v for k, v in part.items())

        if before:
            rows = [row for row in self.read().values() if not old(row)]
            self.path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def add_before(parser: argparse.ArgumentParser) -> None:
    """The option `--before DAY`; an empty day leaves every row."""
    parser.add_argument(
        "--before", default="", metavar="DAY", help="make rows of earlier days anew, such as 2026-11-23"
    )


def describe_dates(rows: list[Row]) -> str:
    """On which days and at which commits the rows were made, for the head of a page."""
    days: dict[str, list[Row]] = {}
    for row in rows:
        days.setdefault(row.get("date", ""), []).append(row)
    parts = []
    for day, rows_of_day in sorted(days.items(), reverse=True):
        commits = ", ".join(sorted({row["commit"] for row in rows_of_day if "commit" in row}))
        parts.append(f"{len(rows_of_day)} on {day} at {commits}" if day else f"{len(rows_of_day)} at an unknown commit")
    return "Rows were made: " + "; ".join(parts) + "."
