"""Run user code and large configs in a process of their own, within limits of time and memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.models.sandbox.memory_limit import limit_memory

__all__ = ["limit_memory"]
_HOME = {
    "limit_memory": "planner_core.models.sandbox.memory_limit",
}


def __getattr__(name: str) -> Any:
    """Import a module when a name of it is used for the first time, since these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
