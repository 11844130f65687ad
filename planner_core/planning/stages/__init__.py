"""The best plan with pipeline stages, beside the best plan of one stage.

pieces   what each copy takes as a part of a stage; the least seconds of any range of copies
search   degrees, micro-batches and cuts
trace    the simulated step as rows of ranks
"""

from planner_core.planning.stages.search import (
    STAGES,
    Found,
    best_with_stages,
    may_win,
    plan_with_stages,
    with_stages,
)
from planner_core.planning.stages.trace import stage_trace

__all__ = ["STAGES", "Found", "best_with_stages", "may_win", "plan_with_stages", "stage_trace", "with_stages"]
