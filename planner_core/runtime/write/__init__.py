"""From a recording and a plan to Python code: one function for each unique block, with its collectives in place."""

from planner_core.runtime.write.syntax import wrap_lines
