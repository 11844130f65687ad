"""The weights of one rank: their forms (`weight`), and the buckets in which they come to the units that use them (`arriving`)."""

from planner_core.runtime.program.weights.arriving import GatherBucket, Refresh, WeightBucket
from planner_core.runtime.program.weights.weight import Apart, Gathered, Weight, caught, owner_of, staged

__all__ = [
    "Apart",
    "GatherBucket",
    "Gathered",
    "Refresh",
    "Weight",
    "WeightBucket",
    "caught",
    "owner_of",
    "staged",
]
