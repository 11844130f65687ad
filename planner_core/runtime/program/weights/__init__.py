"""The weights of one rank: their forms (`weight`), the buckets that gather them (`gathering`), and the order of fused ones
(`plan_tensor`)."""

from planner_core.runtime.program.weights.gathering import GatherBucket, RefreshBucket, WeightBucket
from planner_core.runtime.program.weights.weight import (
    GatheredWeight,
    SeparatelyReducedUse,
    Weight,
    bucket_stages,
    find_weight,
)
