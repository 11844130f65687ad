"""The weights of one rank: their forms (`weight`), and the buckets in which they come to the units that use them (`gathering`)."""

from planner_core.runtime.program.weights.gathering import GatherBucket, RefreshBucket, WeightBucket
from planner_core.runtime.program.weights.weight import (
    GatheredWeight,
    SeparatelyReducedUse,
    Weight,
    bucket_stages,
    find_weight,
    redirect_gradient,
)

__all__ = [
    "GatherBucket",
    "GatheredWeight",
    "RefreshBucket",
    "SeparatelyReducedUse",
    "Weight",
    "WeightBucket",
    "bucket_stages",
    "find_weight",
    "redirect_gradient",
]
