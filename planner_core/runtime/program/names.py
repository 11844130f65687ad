"""The names that generated code uses: torch, mesh axes, redistributions, and operators on parts of tensors.

An exported script imports them from here. It names its axes, as in `Axis("data")`; `apply` gives them their ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from planner_core.core import Plan, plan_to_json
from planner_core.models.hooks import preserve_version
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.collectives import Axis, AxisMove, MoveKind, move
from planner_core.runtime.program.operators.attention import causal_attention
from planner_core.runtime.program.operators.chunks import chunked
from planner_core.runtime.program.operators.dropout import attention, dropout, masked
from planner_core.runtime.program.operators.experts import dispatched_experts, own_experts
from planner_core.runtime.program.operators.functions import (
    batch_norm,
    cross_entropy,
    embedding,
    histc,
    laid_out,
    nll_loss,
)
from planner_core.runtime.program.operators.ring import ring_attention
from planner_core.runtime.program.operators.selective import keep

__all__ = [
    "Axis",
    "F",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "batch_norm",
    "causal_attention",
    "chunked",
    "cross_entropy",
    "dispatched_experts",
    "divide",
    "dropout",
    "embedding",
    "expect",
    "histc",
    "keep",
    "laid_out",
    "masked",
    "move",
    "nll_loss",
    "own_experts",
    "pad",
    "reduce_scatter",
    "ring_attention",
    "shard",
    "torch",
    "with_item",
    "write",
]


@dataclass(frozen=True)
class EditableFunctions:
    """The functions of a program in an exported script, whose globals are `names`. If a user edits them, the edit runs.

    They were written for training calls with inputs of the shapes `inputs`, under the plan with this digest (`plan_digest`).
    """

    plan: str
    inputs: Mapping[str, tuple[int, ...]]
    names: MutableMapping[str, Any]

    def check(self, plan: Plan) -> None:
        """Raise PlanMismatch if the functions were written for another plan."""
        if self.plan != plan_digest(plan):
            raise PlanMismatch(
                "the script's blocks were written for another plan than the one that is read here; export it again, or leave its blocks "
                "out (--no-blocks)"
            )

    def adopt(self, axis: Axis) -> Axis:
        """Return the script's axis of that name, with this rank's group and index. An axis that the script does not name is
        returned itself."""
        axis_of_script = self.names.get(axis.name.upper())
        if not isinstance(axis_of_script, Axis):
            return axis
        axis_of_script.__dict__.update(vars(axis))
        return axis_of_script


def plan_digest(plan: Plan) -> str:
    """Return a digest of what a plan says about a run: its mesh, and how each block is stored and computed."""
    # Neither its name nor its price, which may change without making the blocks wrong.
    data = plan_to_json(plan)
    text = json.dumps([data["mesh"], data["blocks"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class GuardFailed(RuntimeError):
    """A constant decided which path the model's code took when it was recorded, and its value is another one now."""


def expect(value: Any, answer: Any, before: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
    """Raise GuardFailed if `value`, computed from constants, differs from the recorded `answer`.

    `before`: tensors that outlive the step and are written already, with their values before. They are restored, since the pass
    that follows writes them again.
    """
    if value != answer:
        for tensor, previous in before:
            tensor.copy_(previous)
        raise GuardFailed(f"{value!r} where {answer!r} was recorded")


def with_item(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Return a copy of `x` with `x[index] = value`."""
    # torch writes no tensor on meta into one that has values, so the copy is on meta then, as the value is.
    copy = torch.empty_like(x, device="meta") if isinstance(value, torch.Tensor) and value.is_meta else x.clone()
    copy[index] = value
    return copy


@torch.no_grad()
def write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Write the value that forward computed for a buffer, after all reads of the old one. Backward reads the new one, as after
    a write through `.data`."""
    with preserve_version(buffer):
        buffer.copy_(value)


def _move_constructor(kind: MoveKind) -> Callable[..., AxisMove]:
    """Return a function that makes a move of one kind: `all_gather(TENSOR, 1)`, `all_to_all(TENSOR, 1, 2)`."""

    def make(axis: Axis, *dims: int) -> AxisMove:
        if kind == "all_to_all":
            return AxisMove(axis, kind, *dims)
        leaves_shard = kind in ("all_gather", "pad")
        return AxisMove(
            axis, kind, dims[0] if leaves_shard and dims else None, dims[0] if dims and not leaves_shard else None
        )

    return make


all_gather, all_reduce = _move_constructor("all_gather"), _move_constructor("all_reduce")
reduce_scatter, all_to_all = _move_constructor("reduce_scatter"), _move_constructor("all_to_all")
pad, divide, shard = _move_constructor("pad"), _move_constructor("divide"), _move_constructor("slice")
