"""Capture: run a model's own forward on fake tensors and record what it does, repeated parts once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.models.capture.attributes import describe
    from planner_core.models.capture.checks.writes import storage_id
    from planner_core.models.capture.constants import with_picked_indices
    from planner_core.models.capture.fused_kernels import FlashAttention
    from planner_core.models.capture.loss import returned_loss, standin_loss
    from planner_core.models.capture.module import capture_module
    from planner_core.models.capture.recorder import Recorder

__all__ = [
    "FlashAttention",
    "Recorder",
    "capture_module",
    "describe",
    "returned_loss",
    "standin_loss",
    "storage_id",
    "with_picked_indices",
]
_HOME = {
    "FlashAttention": "planner_core.models.capture.fused_kernels",
    "describe": "planner_core.models.capture.attributes",
    "with_picked_indices": "planner_core.models.capture.constants",
    "returned_loss": "planner_core.models.capture.loss",
    "standin_loss": "planner_core.models.capture.loss",
    "capture_module": "planner_core.models.capture.module",
    "Recorder": "planner_core.models.capture.recorder",
    "storage_id": "planner_core.models.capture.checks.writes",
}


def __getattr__(name: str) -> Any:
    """Import a module when a name of it is used for the first time, since these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
