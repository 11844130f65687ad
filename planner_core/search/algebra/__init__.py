"""Elimination, (min, +) powers and Pareto points on plain tables. Nothing here knows what a model is."""

from planner_core.search.algebra.elimination_order import TooWide
from planner_core.search.algebra.pareto_points import ALL_WORK, MAX_WORK, Allowance
from planner_core.search.algebra.partition import Partition, StageOption, best_partition

__all__ = ["ALL_WORK", "MAX_WORK", "Allowance", "Partition", "StageOption", "TooWide", "best_partition"]
