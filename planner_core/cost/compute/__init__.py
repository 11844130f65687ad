"""How long one operator takes on one GPU."""

from planner_core.cost.compute.roofline import op_time, op_work

__all__ = ["op_time", "op_work"]
