"""A recording under a plan: which unit each call belongs to, how every tensor lies, and which ranks hold which samples.

A tensor's *delivered* placements are those that its producer's row hands on. `data_axes` are the mesh axes along which
every constant of the batch (ids, labels, masks) is wanted split by samples: along them each rank brings its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import Partial, Replicate, Shard

from planner_core.runtime.plan_reader import Edge, PlanMismatch, Row, Stored
from planner_core.runtime.plan_reader import Placements as Placements
from planner_core.runtime.record import Call, CannotRewrite, Tape
from planner_core.runtime.record.reach import reached, trained_on
from planner_core.runtime.record.tape import COMPUTED, PARAMETER

Place = tuple[str, str]
"""Label of a block in the plan and the prefix of one copy; ("", "") for the top."""


@dataclass
class Layout:
    """What the writers ask for. Numbers are those of the tape."""

    tape: Tape
    samples: Sequence[int | None]
    rows: Mapping[str, Row]
    stored: Mapping[str, Stored]
    places: Mapping[str, Place]
    sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    versions: str = ""
    delivered: dict[int, Placements] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    data_axes: tuple[int, ...] = ()
    """Given: those along which ranks may hold different samples."""

    def __post_init__(self) -> None:
        self.whole: Placements = (Replicate(),) * len(self.sizes)
        self.data_axes = tuple(a for a in self.data_axes if self.sizes[a] > 1)
        for call in self.ops:
            self._check(call, self.row(call))
        for number, tensor in enumerate(self.tape.tensors):
            if tensor.kind == PARAMETER:
                self.parameters[number] = tensor.name
        self._walk()
        self.reached = self._reached()

    @property
    def ops(self) -> list[Call]:
        """Calls that the plan has a row for."""
        return [c for c in self.tape.calls if c.kind == "op"]

    def row(self, call: Call) -> Row:
        """The row of a call; raises PlanMismatch."""
        row = self.rows.get(call.site)
        if row is None:
            raise PlanMismatch(
                f"{call.site} is not in the plan: the running model is not the one that was planned{self.versions}"
            )
        return row

    def place(self, call: Call) -> Place:
        """The block copy that a call belongs to."""
        return self.places.get(call.site, ("", ""))

    def _check(self, call: Call, row: Row) -> None:
        have, want = (len(call.inputs), len(call.outputs)), (len(row.inputs), len(row.outputs))
        if have != want:
            raise PlanMismatch(
                f"{call.site} has {have[0]} operands and {have[1]} results, the plan {want[0]} and {want[1]}{self.versions}"
            )

    def _walk(self) -> None:
        """Delivered placements, in order; axes that want a constant of the batch otherwise than by samples are no data axes."""
        for call in self.tape.calls:
            if call.kind == "dropout":
                self.delivered[call.outputs[0]] = self.delivered[call.inputs[0]]
            if call.kind != "op":
                continue
            row = self.row(call)
            for number, edge in zip(call.inputs, row.inputs, strict=True):
                kind = self.tape.tensors[number].kind
                if kind == COMPUTED and self.delivered[number] != edge.src:
                    raise PlanMismatch(
                        f"{call.site} expects an operand placed {edge.src}, but it is placed {self.delivered[number]}"
                    )
                if kind not in (COMPUTED, PARAMETER):
                    self._constant(number, edge)
            for number, edge in zip(call.outputs, row.outputs, strict=True):
                self.delivered[number] = edge.dst

    def _constant(self, number: int, edge: Edge) -> None:
        dim = self.samples[number]
        if dim is not None:
            self.data_axes = tuple(a for a in self.data_axes if edge.dst[a] == Shard(dim))

    def _reached(self) -> set[int]:
        """What gets a gradient: from the planned loss, and from other results to which the plan lets one through."""
        found = reached(self.tape, trained_on(self.tape))
        for number in self.tape.results():
            if number not in found and self.tape.tensors[number].grad:
                path = reached(self.tape, number) - found
                if all(self._differentiable(c) for c in self.ops if any(n in path for n in c.outputs)):
                    found |= path
        return found

    def _differentiable(self, call: Call) -> bool:
        row = self.row(call)
        edges = [*zip(call.inputs, row.inputs, strict=True), *zip(call.outputs, row.outputs, strict=True)]
        return all(e.differentiable for n, e in edges if self.tape.tensors[n].grad)

    # --- shapes ---------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """Among how many ranks the samples are dealt."""
        return math.prod(self.sizes[a] for a in self.data_axes)

    def local(self, number: int, placements: Iterable[object]) -> tuple[int, ...]:
        """This rank's shape of a tensor that lies so; the recording saw one rank's samples, and all else whole."""
        shape = list(self.tape.tensors[number].shape)
        dim = self.samples[number]
        if dim is not None:
            shape[dim] *= self.num_parts
        for size, placement in zip(self.sizes, placements, strict=True):
            if isinstance(placement, Shard):
                if shape[placement.dim] % size:
                    raise PlanMismatch(
                        f"dim {placement.dim} of a tensor of shape {tuple(shape)} cannot be split evenly over {size} ranks"
                    )
                shape[placement.dim] //= size
        return tuple(shape)

    def axes(self, placements: Placements, dim: int | None = None) -> list[int]:
        """Axes of more than one rank that split `dim` (None: any)."""
        return [
            a for a, p in enumerate(placements)
            if isinstance(p, Shard) and (dim is None or p.dim == dim) and self.sizes[a] > 1
        ]  # fmt: skip

    def partial(self, placements: Placements) -> list[int]:
        """Axes of more than one rank over which a tensor is a sum of terms."""
        return [a for a, p in enumerate(placements) if isinstance(p, Partial) and self.sizes[a] > 1]

    def slices(self, number: int, placements: Placements) -> list[tuple[int, int]]:
        """How a constant is cut to what this rank needs: (axis, dim), the samples of data axes being cut already."""
        dim = self.samples[number]
        return [
            (a, p.dim) for a, p in enumerate(placements)
            if isinstance(p, Shard) and self.sizes[a] > 1 and not (p.dim == dim and a in self.data_axes)
        ]  # fmt: skip

    def mixed(self) -> set[int]:
        """Constants for which several samples were reckoned up into one number: they differ from rank to rank."""
        found: set[int] = set()
        if not self.data_axes:
            return found
        for call in self.tape.calls:
            if call.kind == "constant":
                lost = any(self.samples[i] is not None for i in call.inputs)
                for number in call.outputs:
                    if any(i in found for i in call.inputs) or (lost and self.samples[number] is None):
                        found.add(number)
        return found


def places(plan: Mapping[str, object]) -> dict[str, Place]:
    """site -> the block copy it belongs to."""
    found: dict[str, Place] = {}
    blocks: Mapping[str, Mapping[str, Sequence[str]]] = plan["blocks"]  # type: ignore[assignment]
    for label, block in blocks.items():
        if label:
            for prefix in block["prefixes"]:
                for name in block["sites"]:
                    found[prefix + name if name.startswith("/") else f"{prefix}.{name}"] = (label, prefix)
    return found


def refuse_mixed(layout: Layout, needed: Iterable[int]) -> None:
    """Raises CannotRewrite where a constant that the model computes with speaks of all samples of the batch."""
    mixed = layout.mixed()
    wrong = next((n for n in needed if n in mixed), None)
    if wrong is not None:
        made = next(c for c in layout.tape.calls if wrong in c.outputs)
        raise CannotRewrite(
            f"{made.fn} at {made.line.rpartition('/')[2]} reckons over all samples of the batch, and ranks hold parts of it"
        )
