"""Runs a plan on stock PyTorch. Applying a plan decides nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.runtime.collective_counter import CountCollectives
    from planner_core.runtime.dispatch_mode import Steered, Steering
    from planner_core.runtime.initialize import initializer
    from planner_core.runtime.library import apply
    from planner_core.runtime.optimizers import make_optimizer
    from planner_core.runtime.parallelize import steer
    from planner_core.runtime.parameters import Init
    from planner_core.runtime.plan_reader import PlanMismatch

__all__ = [
    "CountCollectives",
    "Init",
    "PlanMismatch",
    "Steered",
    "Steering",
    "apply",
    "initializer",
    "make_optimizer",
    "steer",
]
_HOME = {
    "apply": "planner_core.runtime.library",
    "steer": "planner_core.runtime.parallelize",
    "CountCollectives": "planner_core.runtime.collective_counter",
    "Steered": "planner_core.runtime.dispatch_mode",
    "Steering": "planner_core.runtime.dispatch_mode",
    "initializer": "planner_core.runtime.initialize",
    "make_optimizer": "planner_core.runtime.optimizers",
    "Init": "planner_core.runtime.parameters",
    "PlanMismatch": "planner_core.runtime.plan_reader",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
