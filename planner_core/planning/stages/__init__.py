"""Find the best plan with pipeline stages, and compare it with the best plan of one stage.

degrees  number of stages, the mesh of each, number of micro-batches
estimates  which of them to search first, and where the pipeline lies among the axes of the mesh
pieces   time and memory of each copy as a part of a stage; the least seconds of any range of copies
cuts     the best cut of a model into stages, and its plan
interleaved  the copies of each stage where ranks have several
rank_bound  the copies that each rank has time and memory for, and the bound that follows
tool_forms  the stages that a tool can be told
search   the degrees that may be quicker, and the best plan of them
answer   the best plan beside that of one stage, and beside that of a stock tool
trace    the simulated step, one row for each rank
"""

from planner_core.planning.stages.answer import (
    STOCK_PLAN_NAME,
    STOCK_TOOL,
    add_stages_without_tool,
    find_first_staged_plan,
    find_staged_plans,
    find_stages_in_budget,
    may_gain_much,
    may_use_stages,
)
from planner_core.planning.stages.cuts import LEAST_MEMORY_NAME, STAGES_PLAN_NAME
from planner_core.planning.stages.search import StagedPlan, search_stages
from planner_core.planning.stages.trace import stage_trace
