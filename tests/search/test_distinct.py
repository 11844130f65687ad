"""Distinct entries are those that numpy finds."""

from __future__ import annotations

import numpy as np
import pytest

from planner_core.search.algebra.distinct import sorted_distinct


@pytest.mark.parametrize("values", [[], [3], [2, 1, 2, 2], [0.5, -1.0, 0.5]])
def test_distinct_entries_are_those_that_numpy_finds(values: list[float]) -> None:
    given = np.array(values, dtype=np.int64 if all(isinstance(v, int) for v in values) else np.float64)
    np.testing.assert_array_equal(sorted_distinct(given), np.unique(given), strict=True)
