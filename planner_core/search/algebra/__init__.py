"""Elimination, (min, +) powers and Pareto points on plain tables. Nothing here knows what a model is."""

from planner_core.search.algebra.convex_hull import lower_hull as lower_hull
from planner_core.search.algebra.convex_hull import slope as slope
from planner_core.search.algebra.elimination_order import TooWide
from planner_core.search.algebra.incumbent import Incumbent, best_first
from planner_core.search.algebra.pareto_points import MAX_UNIT_POINTS, PointAllowance
from planner_core.search.algebra.partition import StageOption, best_partition
