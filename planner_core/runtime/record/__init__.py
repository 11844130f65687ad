"""Record one forward pass of a live model, call by call. The rewriting needs more of it than the graph has."""

from planner_core.runtime.record.recorder import record
from planner_core.runtime.record.tape import DEVICE, Ref, Tape, TapeCall, TapeTensor
