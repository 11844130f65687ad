"""A mesh: devices in a grid with named axes. It is a plain value, so planning works without a process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from planner_core.core.errors import InputError, Term
from planner_core.core.workload.options import named

_Of = TypeVar("_Of")
MAX_AXES = 4
"""Axes of a mesh that is searched or priced (docs/SEARCH.md, section 9). On more an operator has too many strategies, and a weight too many
states."""


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """`axis_sizes[i]` devices along the axis `axis_names[i]`. Ranks are row-major, so the last axis joins adjacent ranks."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Product of the axis sizes."""
        return math.prod(self.axis_sizes)

    def stride(self, axis: int) -> int:
        """Distance in ranks between neighbours along `axis`."""
        # On 2 × 4, ranks 0 to 3 are the first row: neighbours on the first axis are 4 apart, on the second 1.
        return math.prod(self.axis_sizes[axis + 1 :])

    def name_of(self, axes: tuple[int, ...]) -> str:
        """Return the name of an axis, or of several as one: their names joined by _, as torch names a flattened mesh."""
        return "_".join(self.axis_names[axis] for axis in axes)

    @property
    def term(self) -> Term:
        """The mesh for a sentence: in Python `16 world` or `2 data×8 tensor`; the page has no name for the one axis."""
        return Term("mesh", "", self.axis_sizes, str(self))

    def __str__(self) -> str:
        return "×".join(f"{s} {n}" for n, s in zip(self.axis_names, self.axis_sizes, strict=True))


@dataclass(frozen=True, slots=True)
class PipelineAxis:
    """The axis of a pipeline's ranks in the mesh of all GPUs, whose other axes are those of one rank's mesh.

    `outer`: how many axes of the rank's mesh lie outside of it. Example: 2 ranks, each with a mesh of 4 data and 2 tensor. With 0 the
    GPUs are 2 pipeline × 4 data × 2 tensor, and the ranks lie furthest apart; with 2 they are neighbours, 4 data × 2 tensor × 2 pipeline.
    """

    ranks: int = 1
    outer: int = 0

    def insert(self, axes: tuple[_Of, ...], pipeline: _Of) -> tuple[_Of, ...]:
        """Return what the whole mesh has by axis, from what the rank's mesh has and the pipeline axis has."""
        return (*axes[: self.outer], pipeline, *axes[self.outer :])

    def rank_in_mesh(self, mesh: DeviceMesh, gpu: int) -> int:
        """Return the place of a GPU in the mesh of its pipeline rank."""
        # Example: 2 ranks of 2 data × 2 tensor, outer 1. The GPUs are 2 data × 2 pipeline × 2 tensor, so GPU 7 is at (1, 1, 1): place 3.
        inside = math.prod(mesh.axis_sizes[self.outer :])
        return gpu // (inside * self.ranks) * inside + gpu % inside


ONE_RANK = PipelineAxis()
"""The axis of a plan that has no stages."""


def parse_mesh(text: str, num_devices: int) -> DeviceMesh:
    """`8` or `2x8` as a mesh with axes (world,) or (data, tensor). Raises InputError if it does not fill the cluster."""
    try:
        sizes = tuple(int(part) for part in text.lower().replace("×", "x").split("x"))
    except ValueError:
        raise InputError(f"mesh {text!r} is not of the form 8 or 2x8") from None
    if any(s < 1 for s in sizes):
        raise InputError(f"mesh {text!r} needs positive sizes, e.g. 2x8")
    if len(sizes) > MAX_AXES:
        # The outer axes are joined in the example, since tensor parallelism is meant by the inner ones.
        joined = "x".join(map(str, (math.prod(sizes[: 1 - MAX_AXES]), *sizes[1 - MAX_AXES :])))
        raise InputError(
            f"mesh {text[:80]!r} has {len(sizes)} axes, but at most {MAX_AXES} are searched: with more there are too many ways from one ",
            "placement to another; join the outer axes, as in ",
            named("mesh", joined),
        )
    if math.prod(sizes) != num_devices:
        raise InputError(
            f"mesh {text!r} has {math.prod(sizes)} devices but the cluster has {num_devices} GPUs; "
            f"sizes must multiply to {num_devices}"
        )
    return DeviceMesh(axis_names(len(sizes)), sizes)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending. Example: 6 has 1, 2, 3, 6."""
    # The loop ends at the root, since d divides n together with n / d. The root of a square has itself as its partner, and counts once.
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n < number]


def nearest_multiple(number: int, of: int) -> int:
    """Return the positive multiple of `of` that is nearest to a number, the lower of two. Example: 30 has 32 of 16."""
    below = number // of * of
    return below if below and number - below <= below + of - number else below + of


def mesh_shapes(num_devices: int) -> list[tuple[int, ...]]:
    """Return the shapes of every mesh of one or two axes with `num_devices` devices. Example: 4 can be (4,) or (2, 2)."""
    return [(num_devices,), *((n, num_devices // n) for n in divisors(num_devices)[1:-1])]


def axis_names(num_axes: int) -> tuple[str, ...]:
    """Return the names of the axes, by position. They are only names: any axis may shard the batch, weights or tokens."""
    return {
        1: ("world",),
        2: ("data", "tensor"),
        3: ("data", "shard", "tensor"),
        4: ("data", "shard", "context", "tensor"),
    }[num_axes]
