"""Operators: how each may be split over one mesh axis, and what it costs. Importing this package registers them all."""

from planner_core.ops import catalog

__all__ = ["catalog"]
