"""The parts that capture and run share: names of call sites, and mixture-of-experts and scan layers as single calls."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.models.hooks.callsites import (
        DROPOUTS,
        Frame,
        Scopes,
        canonical,
        drops,
        is_inplace,
        outputs,
        parts_to_put_back,
        tensors,
        took_part,
        without_like,
        without_out,
        wrote_part,
    )
    from planner_core.models.hooks.finite import TakenFinite

__all__ = [
    "DROPOUTS",
    "Frame",
    "Scopes",
    "TakenFinite",
    "canonical",
    "drops",
    "is_inplace",
    "outputs",
    "parts_to_put_back",
    "tensors",
    "took_part",
    "without_like",
    "without_out",
    "wrote_part",
]
_HOME = {
    "DROPOUTS": "planner_core.models.hooks.callsites",
    "Frame": "planner_core.models.hooks.callsites",
    "Scopes": "planner_core.models.hooks.callsites",
    "TakenFinite": "planner_core.models.hooks.finite",
    "canonical": "planner_core.models.hooks.callsites",
    "drops": "planner_core.models.hooks.callsites",
    "is_inplace": "planner_core.models.hooks.callsites",
    "parts_to_put_back": "planner_core.models.hooks.callsites",
    "took_part": "planner_core.models.hooks.callsites",
    "wrote_part": "planner_core.models.hooks.callsites",
    "outputs": "planner_core.models.hooks.callsites",
    "tensors": "planner_core.models.hooks.callsites",
    "without_like": "planner_core.models.hooks.callsites",
    "without_out": "planner_core.models.hooks.callsites",
}


def __getattr__(name: str) -> Any:
    """Import a module when a name of it is used for the first time, since these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
