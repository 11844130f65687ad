"""The placement of a tensor on a mesh: Replicate, Shard or Partial on every mesh axis.

The three names are those of torch.distributed.tensor. In text and in JSON they are `R`, `S(0)` and `P`. A `State` pairs the
placements of a tensor with those of its gradient, since a plan moves both. Example: a weight that is Replicate while the batch is
sharded has the state (R, P). To sum the P is what data parallelism calls gradient synchronisation.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from planner_core.core.errors import ShardingError

CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Each device along the axis holds one slice of tensor dim `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each device along the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each device along the axis holds one term. The tensor is the sum of the terms."""

    def __str__(self) -> str:
        return "P"


Placement: TypeAlias = Shard | Replicate | Partial
Placements: TypeAlias = tuple[Placement, ...]
"""One placement per mesh axis, outermost axis first."""

R = Replicate()
P = Partial()


@dataclass(frozen=True, slots=True)
class State:
    """The placements of a tensor, and those of its gradient: one of each per mesh axis."""

    forward: Placements
    gradient: Placements

    def __str__(self) -> str:
        return f"{format_placements(self.forward)}|{format_placements(self.gradient)}"


def parse_placement(text: str) -> Placement:
    """`R`, `P` or `S(dim)`; raises ShardingError for anything else."""
    if text == "R":
        return R
    if text == "P":
        return P
    # Two digits: no tensor has a hundred dims, and a plan file is outside input.
    match = re.fullmatch(r"S\((\d{1,2})\)", text)
    if not match:
        raise ShardingError(f"placement {text!r} is not one of R, P, S(0), S(1), ...")
    return Shard(int(match.group(1)))


def format_placements(placements: Iterable[Placement]) -> str:
    """`S(0),R`: one placement per mesh axis."""
    return ",".join(str(p) for p in placements)


def parse_placements(text: str) -> Placements:
    """Return the inverse of `format_placements`."""
    return tuple(parse_placement(part) for part in text.split(","))


def parse_state(text: str) -> State:
    """Return the inverse of `str(state)`."""
    forward, _, gradient = text.partition("|")
    return State(parse_placements(forward), parse_placements(gradient))


def local_shape(shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that one device holds. Raises ShardingError if a dim cannot be sharded evenly."""
    local = list(shape)
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            if placement.dim >= len(local) or local[placement.dim] % size:
                raise ShardingError(
                    f"{format_placements(placements)} cannot split shape {shape} evenly over a mesh of sizes {sizes}; "
                    f"choose sizes that divide dim {placement.dim}"
                )
            local[placement.dim] //= size
    return tuple(local)


def largest_local_shape(shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape on the device that holds most. A dim that has no equal parts is cut as `torch.chunk` does.

    Example: 10 rows over 4 devices are 3, 3, 3 and 1, so the largest part has 3.
    """
    local = list(shape)
    # The largest part of the largest part is the largest of all: ceil(ceil(10 / 2) / 4) = ceil(10 / 8) = 2 rows on a mesh of 2 x 4.
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // size)
    return tuple(local)


def needs_uneven_split(shape: tuple[int, ...], segments: Mapping[int, tuple[int, ...]], dim: int, size: int) -> bool:
    """Tell whether a weight that is gathered before use may be cut along `dim` into `size` parts whose last ones are shorter.

    It may if no dim of it has that many equal parts (else an equal cut is as good), and if it has an element for each device. A message
    carries a short part padded to the length of the others, as FSDP2 does.
    """
    # A dim of fused parts (q, k, v) is cut part by part. Unequal parts of each would not lie together after a gather.
    if size == 1 or dim in segments:
        return False
    equal = any(e > 1 and all(part % size == 0 for part in segments.get(d, (e,))) for d, e in enumerate(shape))
    return not equal and shape[dim] >= size


def unevenly_split_dims(
    shape: tuple[int, ...], forms: Iterable[Placements], sizes: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    """Return the dims that one of the placements cuts into parts of different length, each with its whole extent."""
    return {
        p.dim: (shape[p.dim],)
        for placements in forms
        for p, size in zip(placements, sizes, strict=True)
        if isinstance(p, Shard) and shape[p.dim] % size
    }


@dataclass(frozen=True, slots=True)
class Step:
    """One move of one tensor on one mesh axis."""

    axis: int
    src: Placement
    dst: Placement

    @property
    def collective(self) -> CollectiveKind | None:
        """The collective that runs, or None for a local move (slice, pad with zeros, divide)."""
        if isinstance(self.src, Partial):
            return "all_reduce" if isinstance(self.dst, Replicate) else "reduce_scatter"
        # A shard becomes a term of a sum without a message: each device pads its part with zeros. That sum is the whole tensor.
        if isinstance(self.src, Shard) and not isinstance(self.dst, Partial):
            return "all_gather" if isinstance(self.dst, Replicate) else "all_to_all"
        return None

    def __str__(self) -> str:
        return f"{self.axis}:{self.src}>{self.dst}"


def shortest_steps(src: Placements, dst: Placements) -> tuple[Step, ...]:
    """Return one step for each axis that changes: gathers from the innermost axis outwards, then the others inwards."""
    # If two axes shard one dim, the inner axis holds the pieces of an outer piece. Example: 8 rows on 2 x 4 devices, both axes on dim 0.
    # The inner gather joins 4 rows that lie together; an outer gather before it would interleave rows 0, 4, 1, 5, ...
    changed = [Step(a, s, d) for a, (s, d) in enumerate(zip(src, dst, strict=True)) if s != d]
    gathers = [s for s in changed if isinstance(s.src, Shard)]
    return (*reversed(gathers), *(s for s in changed if not isinstance(s.src, Shard)))


def group_sums(steps: Iterable[Step]) -> tuple[tuple[Step, ...], ...]:
    """Return the steps of a weight or of its gradient in groups, each of which is one move: an all_reduce over several axes is one.

    Example: a gradient is summed over 2 data × 4 context. By two all_reduces a GPU would send 2 · 1/2 B and 2 · 3/4 B, and in one group of
    8 it sends 2 · 7/8 B, of which less leaves the node. DDP, FSDP2 and Megatron-LM sum over such a group too.
    """
    return tuple(
        run
        for is_sum, group in itertools.groupby(steps, lambda step: step.collective == "all_reduce")
        for run in ([tuple(group)] if is_sum else [(step,) for step in group])
    )


def joint_axes(group: Iterable[Step]) -> tuple[int, ...]:
    """Return the mesh axes of one group of `group_sums`, in the order of the mesh."""
    return tuple(sorted(step.axis for step in group))
