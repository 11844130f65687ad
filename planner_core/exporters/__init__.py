"""Write a plan in the form of another program.

`TARGETS` has one entry for each form: its name, its writer, its limits. `export_text` writes the plan, or raises an error that
says why the form cannot hold it. `nearest_text` writes the best plan that the form can hold.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner_core.exporters.targets import TARGETS, TARGETS_WITH_STAGES, Target

if TYPE_CHECKING:
    from planner_core.exporters.api import export, export_text, nearest_text, write_export

__all__ = ["TARGETS", "TARGETS_WITH_STAGES", "Target", "export", "export_text", "nearest_text", "write_export"]
_HOME = {
    "export": "planner_core.exporters.api",
    "export_text": "planner_core.exporters.api",
    "nearest_text": "planner_core.exporters.api",
    "write_export": "planner_core.exporters.api",
}


def __getattr__(name: str) -> Any:
    """Import a module when a name of it is used for the first time, since these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
