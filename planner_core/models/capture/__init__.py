"""Capture: run a model's own forward on fake tensors and record what it does, repeated parts once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner_core import lazy_exports

if TYPE_CHECKING:
    from planner_core.models.capture.attributes import describe
    from planner_core.models.capture.checks.writes import storage_id
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
]

__getattr__, __dir__ = lazy_exports(__name__)  # these modules import torch
