"""Redistributions of one tensor along one mesh axis, and their gradients.

P>R all_reduce    P>S reduce_scatter    S>R all_gather    S>S all_to_all    R>S slice    S>P pad with zeros    R>P divide
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from planner_core.core import CollectiveKind, Shard, Step
from planner_core.runtime.program.collectives.axis import Axis
from planner_core.runtime.program.collectives.dim_parts import NO_SEGMENTS, Segments

MoveKind: TypeAlias = CollectiveKind | Literal["slice", "pad", "divide"]


@dataclass(frozen=True)
class AxisMove:
    """One move along one mesh axis, from the placement `src` to `dst`: the sharded dim, or None if it is Replicate or Partial
    (`kind` says which)."""

    axis: Axis
    kind: MoveKind
    src: int | None = None
    dst: int | None = None

    def apply(self, x: torch.Tensor, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
        """Return the tensor after the move."""
        axis, kind = self.axis, self.kind
        if axis.size == 1:
            return x
        if kind == "all_reduce":
            return axis.all_reduce(x)
        if kind == "divide":
            return axis.divide(x)
        if kind == "all_to_all":
            return axis.all_to_all(x, require_dim(self.src), require_dim(self.dst), segments)
        if kind in ("slice", "reduce_scatter"):
            axis_method = axis.slice if kind == "slice" else axis.reduce_scatter
            return axis_method(x, require_dim(self.dst), segments)
        axis_method = axis.all_gather if kind == "all_gather" else axis.pad
        return axis_method(x, require_dim(self.src), segments)

    @property
    def collective(self) -> bool:
        """Whether the move communicates."""
        return self.kind not in ("slice", "pad", "divide")


def step_kind(step: Step) -> MoveKind:
    """Return the kind of move of a plan's step: its collective, or what a rank does alone."""
    if isinstance(step.dst, Shard):
        return step.collective or "slice"
    return step.collective or ("pad" if isinstance(step.src, Shard) else "divide")


def require_dim(dim: int | None) -> int:
    """Return the dim of a Shard. Every kind of move that asks for it has one."""
    assert dim is not None
    return dim


def apply_moves(x: torch.Tensor, steps: Iterable[AxisMove], segments: Segments = NO_SEGMENTS) -> torch.Tensor:
    """Return the tensor after all moves, in order."""
    for move in steps:
        x = move.apply(x, segments)
    return x


def move(
    forward: Sequence[AxisMove], backward: Sequence[AxisMove], segments: Segments = NO_SEGMENTS
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that takes a tensor along the moves `forward`, and its gradient along `backward`, which may differ."""
    ahead, back = tuple(forward), tuple(backward)

    class Move(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            moved = apply_moves(x, ahead, segments)
            return x.view_as(x) if moved is x else moved

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return apply_moves(gradient, back, segments)

    return Move.apply
