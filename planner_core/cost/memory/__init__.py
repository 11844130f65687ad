"""Memory of one GPU through a step, simulated along forward and backward."""

from planner_core.cost.memory.backward import Backward, Gradient
from planner_core.cost.memory.forward import Layout, Moment
from planner_core.cost.memory.peak import arriving, layouts, moments, walk
from planner_core.cost.memory.saved import computes_again, kept_results, root, run_again, viewed
from planner_core.cost.memory.storages import Key
from planner_core.cost.memory.terms import has_working_copy, weight_bytes

__all__ = [
    "Backward",
    "Gradient",
    "Key",
    "Layout",
    "Moment",
    "arriving",
    "computes_again",
    "has_working_copy",
    "kept_results",
    "layouts",
    "moments",
    "root",
    "run_again",
    "viewed",
    "walk",
    "weight_bytes",
]
