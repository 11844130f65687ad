"""The best plan with pipeline stages, beside the best plan of one stage.

degrees  how many stages, on what, in how many micro-batches
pieces   what each copy takes as a part of a stage; the least seconds of any range of copies
cuts     the best cut of a model into stages, and its plan
search   the degrees that may be quicker, and the best plan of them
trace    the simulated step as rows of ranks
"""

from planner_core.planning.stages.cuts import STAGES
from planner_core.planning.stages.search import (
    Found,
    best_with_stages,
    may_win,
    plan_with_stages,
    with_stages,
)
from planner_core.planning.stages.trace import stage_trace

__all__ = ["STAGES", "Found", "best_with_stages", "may_win", "plan_with_stages", "stage_trace", "with_stages"]
