"""The best plan of one mesh, exactly: a cost network, its elimination, and bounds."""

from planner_core.search.budget.memory_fit import fit, hopeless
from planner_core.search.extract_plan import assemble
from planner_core.search.folded_solver import Assignment, block_totals, solve
from planner_core.search.lagrangian import OBJECTIVES, Answer, least_memory, memory_of, search, value_of, weights
from planner_core.search.pareto_front import corners, front
from planner_core.search.repeated_block import Weights
from planner_core.search.restricted_states import NO_BOUND, NOTE, bounded, narrow

__all__ = [
    "NOTE",
    "NO_BOUND",
    "OBJECTIVES",
    "Answer",
    "Assignment",
    "Weights",
    "assemble",
    "block_totals",
    "bounded",
    "corners",
    "fit",
    "front",
    "hopeless",
    "least_memory",
    "memory_of",
    "narrow",
    "search",
    "solve",
    "value_of",
    "weights",
]
