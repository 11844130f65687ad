"""A plan in the form of another program.

`TARGETS` has one entry for each form: what it is called, who writes it, what it cannot say. `export_text` writes the plan
or says in a sentence why the form cannot hold it; `nearest_text` then finds the best plan that the form can hold.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner_core.exporters.targets import TARGETS, Target

if TYPE_CHECKING:
    from planner_core.exporters.api import export, export_text, nearest_text, write_export

__all__ = ["TARGETS", "Target", "export", "export_text", "nearest_text", "write_export"]
_HOME = {
    "export": "planner_core.exporters.api",
    "export_text": "planner_core.exporters.api",
    "nearest_text": "planner_core.exporters.api",
    "write_export": "planner_core.exporters.api",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
