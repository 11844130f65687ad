"""The page of measured times: a measurement writes its tables and leaves all else."""

from __future__ import annotations

import pytest

from bench.pages import put_table, spread

PAGE = (
    "# How fast\n\nby hand\n\n## Measured\n\nold figures\n\n## What it says\n\nby hand too\n\n## What stays\n\nthat\n"
)


def test_a_measurement_writes_its_tables_alone() -> None:
    """It wrote the whole page: the hand-written parts came behind a heading that the page no longer had, and were lost."""
    rows = [{**spread("a click", [80.0, 120.0], "150"), "day": "2026-11-29", "load": 1.5}]
    page = put_table(PAGE, rows)
    assert "| a click | 2 | 100 | 118 | 120 | 150 | 2026-11-29 | 1.5 |" in page and "old figures" not in page
    kept = PAGE.split("old figures")
    assert page.startswith(kept[0]) and page.endswith(kept[1])
    assert put_table(page, rows) == page


def test_a_page_without_the_heading_is_not_written() -> None:
    with pytest.raises(AssertionError, match="Measured"):
        put_table("# How fast\n\nby hand\n", [])
