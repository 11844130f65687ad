"""Capture: run a model's own forward on fake tensors and record what it does, repeated parts once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner_core import lazy_exports

if TYPE_CHECKING:
    from planner_core.models.capture.attributes import describe
    from planner_core.models.capture.loss import returned_loss, standin_loss
    from planner_core.models.capture.module import capture_module
    from planner_core.models.capture.record.fused_kernels import FlashAttention
    from planner_core.models.capture.record.listener import CallKind, FunctionCall, PassListener
    from planner_core.models.capture.record.recorder import ForeignTensors, Recorder
    from planner_core.models.capture.recording import Record, Scope
    from planner_core.models.capture.values import ValueTable

__getattr__, __dir__ = lazy_exports(__name__)  # these modules import torch
