"""One forward pass of a live model, written down call by call: what a plan's rewriting needs beyond the graph."""

from planner_core.runtime.record.recorder import CannotRewrite, record
from planner_core.runtime.record.tape import DEVICE, Call, Ref, Tape, Tensor

__all__ = ["DEVICE", "Call", "CannotRewrite", "Ref", "Tape", "Tensor", "record"]
