"""Run a model's own forward once, with parameters on meta, and keep every call with its arguments."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.models.capture import ForeignTensors, Recorder
from planner_core.models.sources import positional_names
from planner_core.runtime.record.frozen import FrozenModel
from planner_core.runtime.record.source_names import RefuseCollectives
from planner_core.runtime.record.tape import Tape
from planner_core.runtime.record.tape_writer import TapeWriter


def record(frozen: FrozenModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tape:
    """Record one forward pass of a model's copy. Constants are computed on the CPU.

    Raises CaptureError and PlanMismatch.
    """
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t if t.is_meta else t.detach().cpu(), (args, dict(kwargs))
    )
    frozen.types.restore()
    with torch.random.fork_rng(), RefuseCollectives():
        # Nothing is replayed: a replayed call has no arguments, of which the program is written.
        recorder = Recorder(frozen.twin, replay=False, foreign=ForeignTensors(frozen.originals))
        recorder.listener = writer = TapeWriter(recorder.values)
        writer.add_arguments(positional_names(frozen.twin.forward), args, kwargs)
        # torch runs the model's own hooks around the forward of the plan.
        out = recorder.run(dict(kwargs), args=args, with_hooks=False)
        return writer.finish(out)
