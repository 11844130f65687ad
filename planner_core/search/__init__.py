"""The best plan of one mesh, proven: a cost network, its elimination, and bounds (docs/SEARCH.md explains the whole).

network/     the tables of costs of each block (variables, states, factors), and the folded network of a model
algebra/     elimination, (min, +) powers, Pareto points: arithmetic on plain tables
units/       the least cost of one copy of a block, whose time is a maximum and not a sum
budget/      a limit on memory: closing the gap, the Pareto front, budgets held against the memory simulation
candidates/  every choice of one block's matrices
folded_solver, lagrangian, restricted_states: the search itself, from the inside to the outside
"""

from planner_core.search.budget.limits import TO_THE_END as TO_THE_END
from planner_core.search.budget.limits import UNPROVEN as UNPROVEN
from planner_core.search.budget.limits import SearchLimits as SearchLimits
from planner_core.search.budget.memory_fit import (
    FIRST_BUDGET_FACTOR,
    bound_of_walk,
    exceeds_budget_by_far,
    fit_simulated_memory,
    infeasible_answer,
    least_sum_peak,
    no_plan_fits,
    rough_plan_fits,
    simulated_peak,
    walk_memory,
)
from planner_core.search.budget.pareto_front import find_corners_below, find_pareto_front, least_seconds_within
from planner_core.search.extract_plan import make_block_plans
from planner_core.search.folded_solver import (
    RunTable,
    least_copy_costs,
    least_costs_at_ends,
    run_tables,
    solve_folded,
    total_of_copies,
)
from planner_core.search.lagrangian import (
    check_bound,
    describe_excess,
    describe_gap,
    find_least_memory,
    least_value_bound,
    make_objective,
    memory_bytes,
    possible_winners,
    rough_bound,
    search_roughly,
    search_within_budget,
)
from planner_core.search.network.folded import Problem as Problem
from planner_core.search.network.search_cache import Answer, Assignment
from planner_core.search.objective import OBJECTIVES, TIE, Objective, objective_value
from planner_core.search.restricted_states import (
    NO_BOUND_NOTE,
    RESTRICTED_NOTE,
    bound_of_whole_space,
    restrict_states,
    with_relaxed_bound,
)
from planner_core.search.units.dual_shares import best_shares
from planner_core.search.units.least_entries import LeastEntries as LeastEntries
