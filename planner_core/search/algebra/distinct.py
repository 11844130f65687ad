"""The distinct entries of an array.

`numpy.unique` imports `numpy.ma` at its first call. That takes about as long as a whole search.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.int64, np.float64)


def sorted_distinct(values: NDArray[Number]) -> NDArray[Number]:
    """Return the entries of an array of one dim, sorted, each once."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]
