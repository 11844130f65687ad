"""From a recording and a plan to Python: one function for each kind of block, its collectives in place."""

from planner_core.runtime.write.wrapping import wrapped

__all__ = ["wrapped"]
