"""Operators: how each may be split over one mesh axis, and what it costs. Importing this package registers them all."""

from planner_core.ops import catalog
from planner_core.ops.grouping import CoarseBlock, CoarseGraph, Group, coarsen, coarsen_block
from planner_core.ops.registry import Pair, Row, is_heavy, rows, rule_of
from planner_core.ops.strategy import BlockStrategies, GroupStrategy, SegmentMap, block_strategies

__all__ = [
    "BlockStrategies",
    "CoarseBlock",
    "CoarseGraph",
    "Group",
    "GroupStrategy",
    "Pair",
    "Row",
    "SegmentMap",
    "block_strategies",
    "catalog",
    "coarsen",
    "coarsen_block",
    "is_heavy",
    "rows",
    "rule_of",
]
