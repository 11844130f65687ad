"""Read the plan file into the values that the runtime needs: placements, steps, edges and rows, with torch's placement types."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from planner_core.core import PlannerError, data_axes_of

Placements = tuple[Placement, ...]
Segments = Mapping[int, tuple[int, ...]]


class PlanMismatch(PlannerError, RuntimeError):
    """The running model is not the one for which the plan was made. The message names the operator."""


def other_model(site: str, what: str, versions: str, line: str = "") -> PlanMismatch:
    """The error for an operator that is not as it was planned. `line`: the place in the model's code; `versions`: see `other_versions`."""
    at = f" at {line.rpartition('/')[2]}" if line else ""
    return PlanMismatch(
        f"{site}{at} {what}: the model does other operations than when it was planned (in eval mode, with other attributes, lengths, "
        f"inputs or values); set it as it was, or plan it again{versions}"
    )


def check_gradient(site: str, edge: Edge, summed: Placements) -> None:
    """Raise PlanMismatch if an operator gives the gradient of an operand in other placements than those in which it is summed: the
    operand is another one than when it was planned."""
    if edge.wanted != summed:
        raise other_model(site, "gives an operand another gradient than in the plan", "")


def refuse_gradient(name: str) -> None:
    """Raise PlanMismatch: nothing would sum the gradient over ranks."""
    raise PlanMismatch(
        f"the loss sends {name} a gradient, which it did not when it was planned (it ran under torch.no_grad then, or detached); plan "
        "it again"
    )


def unplanned(name: str) -> PlanMismatch:
    """The error for a gradient of a weight in a unit that has no use for it."""
    return PlanMismatch(
        f"{name} gets a gradient that the plan does not expect: the planned loss does not depend on it; "
        "plan the model with the loss that is trained on"
    )


def check_order(name: str, segments: Segments) -> None:
    """Raise PlanMismatch for a weight with a fused dim, if a term of the loop has a gradient that torch made of it as a whole."""
    if any(len(sizes) > 1 for sizes in segments.values()):
        raise PlanMismatch(
            f"a term of the loop (a penalty) takes {name} whole, but several parts of it (q, k and v) are one tensor, whose rows the plan "
            "keeps in another order; take .full_tensor() of the weight first"
        )


REPLACED = "_replaced_by_a_plan"
"""The attribute of a parameter that this rank's part has taken the place of: its name."""


@dataclass(frozen=True)
class Step:
    """One move of a tensor along one mesh axis."""

    axis: int
    src: Placement
    dst: Placement


@dataclass(frozen=True)
class Edge:
    """A redistribution of one tensor: its placements before (`src`) and after (`dst`), and the steps that it and its gradient take.

    `gradient`: the placements in which the gradient comes back to the edge. `wanted`: those in which it leaves the edge. `chunks`: into
    how many parts the product that makes the tensor is cut.
    """

    src: Placements
    dst: Placements
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    segments: Segments = field(default_factory=dict)
    gradient: Placements = ()
    wanted: Placements = ()
    chunks: int = 1

    def differentiable(self, axis: int) -> bool:
        """Whether the steps bring a gradient to `wanted`, and shards of a tensor get shards. Not so if no planned loss sends one here."""
        ends = ((self.src, self.wanted), (self.dst, self.gradient))
        alike = all(not isinstance(held[axis], Shard) or held[axis] == back[axis] for held, back in ends)
        return alike and (self.gradient[axis] == self.wanted[axis] or any(s.axis == axis for s in self.backward))

    def whole(self, axis: int) -> bool:
        """Whether each rank takes all of the tensor, and its gradient is not a sum over ranks."""
        return isinstance(self.dst[axis], Replicate) and isinstance(self.gradient[axis], Replicate)


@dataclass(frozen=True)
class Row:
    """How one operator runs: an edge for every tensor operand and every result."""

    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]


@dataclass(frozen=True)
class Stored:
    """The placements of one parameter: of the stored form that the optimizer keeps, of the working copy that is kept between uses,
    and of the gradient that accumulates over micro-batches."""

    placements: Placements
    working: Placements
    gradient: Placements
    segments: Segments
    refresh: tuple[Step, ...] | None = None
    """Steps of once a step from what is stored to the working copy; None: one for each axis, in `leading`'s order."""
    reduce: tuple[Step, ...] | None = None
    """Steps of once a step from the accumulated gradient to what is stored."""
    trained: bool = True
    """Whether the planned loss sends it a gradient."""
    gathered: tuple[int, ...] = ()
    """The axes on which it is sharded between uses, and whole while it is used."""

    @property
    def sync(self) -> tuple[int, ...]:
        """The axes over which the gradient is summed once a step."""
        return tuple(a for a, p in enumerate(self.gradient) if not isinstance(p, (Replicate, Shard)))


def other_versions(plan: Mapping[str, Any]) -> str:
    """The end of a sentence: which libraries have another version now than when the plan was made. Empty if none has."""
    made = plan.get("model", {}).get("versions", {})
    here = {"torch": torch.__version__, "transformers": getattr(sys.modules.get("transformers"), "__version__", None)}
    told = [
        f"{name} {made[name]}, here is {version}"
        for name, version in here.items() if version and name in made and made[name].partition("+")[0] != version.partition("+")[0]
    ]  # fmt: skip
    return f" (it was planned with {' and '.join(told)}: plan it again)" if told else ""


def read_rows(plan: Mapping[str, Any]) -> dict[str, Row]:
    """Every op of the unfolded model by its site."""
    rows: dict[str, Row] = {}
    for block in plan["blocks"].values():
        sites = {name: _row(ins, outs) for name, (ins, outs) in block["sites"].items()}
        for prefix in block["prefixes"]:
            rows.update({_join(prefix, name): row for name, row in sites.items()})
    return rows


def read_data_axes(plan: Mapping[str, Any]) -> tuple[int, ...]:
    """The mesh axes along which ranks hold different samples, as `Plan.data_axes` says."""
    rows = (_row(ins, outs) for block in plan["blocks"].values() for ins, outs in block["sites"].values())
    made = [row.outputs[0].src for row in rows if row.outputs]
    return data_axes_of([[p.dim if isinstance(p, Shard) else None for p in one] for one in made], plan["mesh"]["sizes"])


def read_params(plan: Mapping[str, Any]) -> dict[str, Stored]:
    """Every parameter of the unfolded model by its name."""
    stored: dict[str, Stored] = {}
    for block in plan["blocks"].values():
        for name, (kept, working, gradient, gathered, segments, *rest) in block["params"].items():
            three = (_placements(kept), _placements(working), _placements(gradient))
            trained = False not in rest
            refresh, reduce = map(_steps, rest) if rest and trained else (None, None)
            entry = Stored(*three, _segments(segments), refresh, reduce, trained, tuple(gathered))
            stored.update({_join(prefix, name): entry for prefix in block["prefixes"]})
    return stored


@dataclass(frozen=True)
class Precision:
    """The dtypes of the stored parameter, of the working copy, and of the accumulated gradient."""

    stored: torch.dtype
    working: torch.dtype
    gradient: torch.dtype


def read_precision(plan: Mapping[str, Any]) -> Precision:
    """The dtypes of the plan's workload. Master weights are float32, unless the optimizer does not keep any."""
    load = plan["workload"]
    working: torch.dtype = getattr(torch, load["dtype"])
    masters = str(load["optimizer"]).endswith("-fp32") or load.get("precision") == "mixed"
    stored = torch.float32 if masters and working.itemsize < 4 else working
    return Precision(stored, working, getattr(torch, load.get("gradient_dtype") or "", stored))


def kept_sites(plan: Mapping[str, Any]) -> frozenset[str]:
    """The call sites of the unfolded model whose results are kept although their block is recomputed."""
    blocks = plan["blocks"].values()
    return frozenset(
        _join(prefix, name) for block in blocks for prefix in block["prefixes"] for name in block.get("kept", ())
    )


def _join(prefix: str, name: str) -> str:
    return prefix + name if not prefix or name.startswith("/") else f"{prefix}.{name}"


def _row(inputs: list[Any], outputs: list[Any]) -> Row:
    return Row(tuple(map(_edge, inputs)), tuple(map(_edge, outputs)))


def _edge(row: list[Any]) -> Edge:
    src, dst, forward, backward, segments, *chunks = row
    return Edge(
        _placements(src.partition("|")[0]), _placements(dst.partition("|")[0]), _steps(forward), _steps(backward),
        _segments(segments), _placements(dst.partition("|")[2]), _placements(src.partition("|")[2]), *chunks,
    )  # fmt: skip


def _segments(data: Mapping[str, list[int]]) -> dict[int, tuple[int, ...]]:
    return {int(dim): tuple(sizes) for dim, sizes in data.items()}


@functools.cache
def _placements(text: str) -> Placements:
    return tuple(map(_placement, text.split(",")))


def _placement(text: str) -> Placement:
    if text in ("R", "P"):
        return Replicate() if text == "R" else Partial()
    return Shard(int(text[2:-1]))


@functools.cache
def _steps(text: str) -> tuple[Step, ...]:
    steps = []
    for part in text.split():
        axis, _, change = part.partition(":")
        src, _, dst = change.partition(">")
        steps.append(Step(int(axis), _placement(src), _placement(dst)))
    return tuple(steps)
