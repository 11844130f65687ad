"""Record one forward pass of a live model, call by call. The rewriting needs more of it than the graph has."""

from planner_core.runtime.record.recorder import CannotRewrite, record
from planner_core.runtime.record.tape import DEVICE, Call, Ref, Tape, Tensor

__all__ = ["DEVICE", "Call", "CannotRewrite", "Ref", "Tape", "Tensor", "record"]
