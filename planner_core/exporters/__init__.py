"""A plan in the form of another program."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.exporters.api import export_text, nearest_text, write_export

__all__ = ["export_text", "nearest_text", "write_export"]
_HOME = {
    "export_text": "planner_core.exporters.api",
    "nearest_text": "planner_core.exporters.api",
    "write_export": "planner_core.exporters.api",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
