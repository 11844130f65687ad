"""The best plan of one mesh, proven: a cost network, its elimination, and bounds (docs/SEARCH.md explains the whole).

network/     the tables of costs of each block (variables, states, factors), and the folded network of a model
algebra/     elimination, (min, +) powers, Pareto points: arithmetic on plain tables
units/       the least cost of one copy of a block, whose time is a maximum and not a sum
budget/      a limit on memory: closing the gap, the Pareto front, budgets held against the memory simulation
candidates/  every choice of one block's matrices
folded_solver, lagrangian, restricted_states: the search itself, from the inside to the outside
"""

from planner_core.search.budget.memory_fit import ABOVE, exceeds_budget_by_far, fit, infeasible_answer, quick_plan_fits
from planner_core.search.budget.pareto_front import corners_below, front
from planner_core.search.extract_plan import assemble
from planner_core.search.folded_solver import RunTable, block_totals, run_tables, solve
from planner_core.search.lagrangian import (
    fastest,
    gap_note,
    least_memory,
    least_value,
    memory_of,
    objective_of,
    quick,
    quick_bound,
    search,
)
from planner_core.search.network.search_cache import Answer, Assignment
from planner_core.search.objective import OBJECTIVES, TIE, Objective, value_of
from planner_core.search.restricted_states import NO_BOUND, NOTE, bounded, narrow
from planner_core.search.units.dual_shares import best_shares

__all__ = [
    "ABOVE",
    "NOTE",
    "NO_BOUND",
    "OBJECTIVES",
    "TIE",
    "Answer",
    "Assignment",
    "Objective",
    "RunTable",
    "assemble",
    "best_shares",
    "block_totals",
    "bounded",
    "corners_below",
    "exceeds_budget_by_far",
    "fastest",
    "fit",
    "front",
    "gap_note",
    "infeasible_answer",
    "least_memory",
    "least_value",
    "memory_of",
    "narrow",
    "objective_of",
    "quick",
    "quick_bound",
    "quick_plan_fits",
    "run_tables",
    "search",
    "solve",
    "value_of",
]
