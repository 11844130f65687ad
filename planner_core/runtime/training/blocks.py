"""The generated program of a plan's training step as text, for an exported script. It is generated without processes."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from planner_core.core import InputError, Plan
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program import Axis, plan_digest
from planner_core.runtime.record.batch import map_sample_leaves
from planner_core.runtime.training.start import Start, model_of, split_arguments
from planner_core.runtime.write.planned import PlannedForward


@dataclass(frozen=True)
class Blocks:
    """The generated functions of a plan as text.

    `source` is the text, `plan` a digest of the plan, `inputs` are the shapes that the functions take by name, and `foreign`
    the names of objects of the model's own code.
    """

    source: str = ""
    plan: str = ""
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()


def blocks_of(plan: Plan) -> Blocks:
    """Write the program that `apply` will generate for a rank's own part of a micro-batch.

    Raises InputError if the model cannot be built here, or if `apply` would refuse the plan.
    """
    start = model_of(plan)
    axes = [Axis(n, None, size) for n, size in zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)]
    forward = PlannedForward(start.model, plan, axes)
    parts = 1
    for axis in forward.data_axes:
        parts *= axes[axis].size
    args, kwargs = split_arguments(map_sample_leaves(example_batch(start), lambda x: x[: len(x) // parts]))
    try:
        prepared = forward.prepare(args, kwargs, global_batch=False, gather=lambda x: torch.cat([x] * parts))
    except PlanMismatch as error:
        raise InputError("no run can follow this plan: ", error.sentence) from None
    program = prepared.program
    source = program.source.partition("\n")[2].strip("\n")  # without the title
    return Blocks(source, plan_digest(plan), prepared.inputs, tuple(program.foreign))


def example_batch(start: Start) -> dict[str, Any]:
    """Return the global micro-batch: the user's own example, otherwise tokens of the vocabulary."""
    if start.from_user_code:
        return dict(start.inputs)
    random = torch.Generator().manual_seed(0)

    def fill_tokens(name: str, x: torch.Tensor) -> torch.Tensor:
        below = start.limits.get(name)
        return x if below is None else torch.randint(0, below, x.shape, generator=random)

    return {name: fill_tokens(name, x) for name, x in start.inputs.items()}
