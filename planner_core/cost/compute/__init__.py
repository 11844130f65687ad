"""How long one operator, and the optimizer, take on one GPU."""

from planner_core.cost.compute.optimizer import optimizer_seconds
from planner_core.cost.compute.roofline import op_time, op_work

__all__ = ["op_time", "op_work", "optimizer_seconds"]
