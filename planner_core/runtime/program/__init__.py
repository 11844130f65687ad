"""The functions that generated code calls at run time: collectives, weights that are gathered and freed, gradients in buckets.

Exported scripts import from here the functions that their blocks call. Nothing but torch is imported.
"""

from planner_core.runtime.program import names
from planner_core.runtime.program.gradients import GradientBucket, ReductionQueue
from planner_core.runtime.program.names import *  # noqa: F403  # the list of them is there
from planner_core.runtime.program.names import EditableFunctions, plan_digest
from planner_core.runtime.program.torch_private import fake_store, supports_meta
from planner_core.runtime.program.units import UnitCall
from planner_core.runtime.program.weights import WeightBucket

IN_FLIGHT = (
    (WeightBucket, "issue"),
    (WeightBucket, "wait"),
    (GradientBucket, "add_gradient"),
    (ReductionQueue, "push"),
    (ReductionQueue, "advance"),
)
"""The methods that gather weights ahead of their use and reduce gradients. What they allocate counts as in flight."""

__all__ = ["IN_FLIGHT", "EditableFunctions", "UnitCall", "fake_store", "plan_digest", "supports_meta"]
__all__ += names.__all__
