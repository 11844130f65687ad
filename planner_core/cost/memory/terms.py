"""Every term of the memory that weights take, defined once: the search adds them up, the walk along a step does too.

For a weight of `item` bytes per element in compute dtype, with w, g and s elements of its working copy, its accumulated
gradient and its stored form on one GPU:

    params      s * kept_item, and w * item where a working copy stands beside the stored parameter
    gradients   g * kept_item, from the first backward of a step to the optimizer
    optimizer   s * moments * kept_item

`kept_item` is 4 bytes in mixed precision. A working copy stands beside the stored parameter where the two differ in dtype
or placement, unless it is gathered at each use: then it is made for the use and freed.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner_core.core import Workload


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes per element of each form of a weight; `working` holds for a copy that stands beside the stored parameter."""

    stored: int
    working: int
    gradient: int
    moments: int


def weight_bytes(item: int, trained: bool, workload: Workload) -> WeightBytes:
    """Bytes per element of a weight; one that is not trained is kept in its own dtype, without gradient and moments."""
    if not trained:
        return WeightBytes(item, item, 0, 0)
    return WeightBytes(workload.kept_item(item), item, workload.kept_item(item), workload.moment_bytes(item))


def has_working_copy(item: int, trained: bool, workload: Workload, same_placement: bool) -> bool:
    """Whether a working copy that is kept takes memory of its own."""
    return trained and not (same_placement and workload.kept_item(item) == item)
