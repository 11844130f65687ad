"""Memory of one GPU through a step, simulated along forward and backward."""

from planner_core.cost.memory.at_peak import Held, tensors_at_peak
from planner_core.cost.memory.forward import Layout, Moment
from planner_core.cost.memory.peak import Walk, layouts, walk
from planner_core.cost.memory.saved import Rerun, computes_again, kept_results, run_again, viewed
from planner_core.cost.memory.terms import has_working_copy, weight_bytes

__all__ = [
    "Held",
    "Layout",
    "Moment",
    "Rerun",
    "Walk",
    "computes_again",
    "has_working_copy",
    "kept_results",
    "layouts",
    "run_again",
    "tensors_at_peak",
    "viewed",
    "walk",
    "weight_bytes",
]
