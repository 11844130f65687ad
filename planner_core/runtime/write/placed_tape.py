"""A recording under a plan: the unit of each call, the placements of every tensor, and the samples of each rank.

A tensor's *delivered* placements are those in which the row of its producer delivers it. `data_axes` are the mesh axes along
which every constant of the batch (ids, labels, masks) is sharded by samples. Along these axes each rank brings its own samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from planner_core.core import Edge, Op, ParamPlan, Partial, Placements, Plan, Replicate, Shard, SitePlan, join_name
from planner_core.models.hooks import is_inplace
from planner_core.ops import Local, operator, rows
from planner_core.runtime.mismatch import PlanMismatch, other_model_error
from planner_core.runtime.program.collectives import describe_uneven_split
from planner_core.runtime.record import MixesSamples, Tape, TapeCall
from planner_core.runtime.record.reach import find_ancestors, find_loss
from planner_core.runtime.record.recorder import DIM_MERGING
from planner_core.runtime.record.tape import COMPUTED, INPUT, PARAMETER

_INDEX_READERS = frozenset({"embedding", "cross_entropy", "nll_loss"})
"""Operators whose whole numbers are places in a table, or among classes."""
_VALUE_PRESERVING = DIM_MERGING | {"getitem", "pad", "contiguous", "to", "squeeze", "unsqueeze", "transpose", "clone"}
"""Functions whose result has the numbers that they are given, and no others but a fill."""
BlockCopy = tuple[str, str]
"""Label of a block in the plan and the prefix of one copy; ("", "") for the top."""


@dataclass
class PlannedTape:
    """A tape under a plan, with what the writers need of it. Values have their numbers on the tape."""

    tape: Tape
    samples: Sequence[int | None]
    rows: Mapping[str, SitePlan]
    stored: Mapping[str, ParamPlan]
    block_copies: Mapping[str, BlockCopy]
    sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    versions: str = ""
    delivered: dict[int, Placements] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    data_axes: tuple[int, ...] = ()
    """At first the axes along which ranks may hold different samples; then those along which they do."""
    owned: frozenset[int] = frozenset()
    """The inputs that a program of all samples takes as callers bring them: each rank its own samples, along `callers_axes`."""
    callers_axes: tuple[int, ...] = ()
    batches: list[tuple[Shard, Placements]] = field(default_factory=list)
    """For each constant of the batch that an operator reads: the cut of its samples, and its placements there."""

    def __post_init__(self) -> None:
        self.whole: Placements = (Replicate(),) * len(self.sizes)
        self.data_axes = tuple(a for a in self.data_axes if self.sizes[a] > 1)
        for call in self.ops:
            self._check(call, self.row(call))
        for number, tensor in enumerate(self.tape.tensors):
            if tensor.kind == PARAMETER:
                self.parameters[number] = tensor.name
        self.inner = self._inner()
        self._walk()
        self.data_axes = self._outermost()
        self.trained = find_loss(self.tape)
        """The loss, or the result of which one is made outside."""
        self.planned = find_ancestors(self.tape, self.trained)
        """The tensors to which the planned loss sends a gradient."""
        self.reached = self._reached()

    @property
    def ops(self) -> list[TapeCall]:
        """The calls that have a row in the plan."""
        return [c for c in self.tape.calls if c.kind == "op"]

    def row(self, call: TapeCall) -> SitePlan:
        """The row of a call; raises PlanMismatch."""
        row = self.rows.get(call.site)
        if row is None:
            raise other_model_error(call.site, "is not in the plan", self.versions, call.line)
        return row

    def takes_all(self, call: TapeCall) -> bool:
        """Whether a call takes samples whole of which a rank has a part, and is not written by the shapes that it has on a rank."""
        if call.kind != "op" or operator(call.fn).local is Local.SIZES:
            return False
        ends = [(self.samples[n], edge.dst.forward) for n, edge in zip(call.inputs, self.row(call).inputs, strict=True)]
        return any(dim is not None and dst[a] != Shard(dim) for dim, dst in ends for a in self.data_axes)

    def place(self, call: TapeCall) -> BlockCopy:
        """The block copy that a call belongs to."""
        return self.block_copies.get(call.site, ("", ""))

    def _check(self, call: TapeCall, row: SitePlan) -> None:
        have, want = (len(call.inputs), len(call.outputs)), (len(row.inputs), len(row.outputs))
        if have != want:
            told = f"has {have[0]} operands and {have[1]} results, the plan {want[0]} and {want[1]}"
            raise other_model_error(call.site, told, self.versions, call.line)

    def _walk(self) -> None:
        """Find the delivered placements, in order. An axis is not a data axis if some operator needs a constant of the batch with
        other placements than by samples."""
        summed: dict[int, Placements] = {}
        for call in self.tape.calls:
            if call.kind == "dropout":
                self.delivered[call.outputs[0]] = self.delivered[call.inputs[0]]
                summed[call.outputs[0]] = summed[call.inputs[0]]
            if call.kind != "op":
                continue
            row = self.row(call)
            for number, edge in zip(call.inputs, row.inputs, strict=True):
                kind = self.tape.tensors[number].kind
                if kind == COMPUTED and self.delivered[number] != edge.src.forward:
                    raise other_model_error(
                        call.site, "takes another operand than in the plan", self.versions, call.line
                    )
                if kind not in (COMPUTED, PARAMETER):
                    self._constant(number, edge)
                if kind == COMPUTED and self.tape.tensors[number].grad:
                    _check_gradient_placements(call.site, edge, summed[number])
            for number, edge in zip(call.outputs, row.outputs, strict=True):
                self.delivered[number], summed[number] = edge.dst.forward, edge.dst.gradient
        if not self.batches:  # no operator of the plan takes samples, as of `x[0]`
            self.data_axes = ()

    def _constant(self, number: int, edge: Edge) -> None:
        dim = self.samples[number]
        if number in self.inner:  # a part of this dim is no part of the samples
            self.data_axes = ()
        if dim is not None:
            self.data_axes = tuple(a for a in self.data_axes if edge.dst.forward[a] == Shard(dim))
            self.batches.append((Shard(dim), edge.dst.forward))

    def _outermost(self) -> tuple[int, ...]:
        """The data axes that cut samples before any other axis does. A mesh cuts a dim by its outer axis first: of 8 samples on 2 x 2
        the ranks hold 01, 23, 45, 67. If an operator alone cuts by the outer axis, who holds the samples of the inner one, 0123 or 4567,
        would cut 01, 45, 23, 67."""
        kept: list[int] = []
        for a in self.data_axes:
            if all(o in kept or self.sizes[o] == 1 or dst[o] != cut for cut, dst in self.batches for o in range(a)):
                kept.append(a)
        return tuple(kept)

    def _reached(self) -> set[int]:
        """The tensors that get a gradient: from the planned loss, and from other results whose edges let a gradient through."""
        found = set(self.planned)
        for number in self.tape.results():
            if number not in found and self.tape.tensors[number].grad:
                path = find_ancestors(self.tape, number) - found
                ways = (c for c in self.ops if any(n in path for n in c.outputs))
                if all(map(self._differentiable, ways)) and all(self._trains(n) for n in path):
                    found |= path
        return found

    def _trains(self, number: int) -> bool:
        """Whether a gradient for a tensor is summed over ranks: of a weight, if the planned loss sends it one."""
        stored = self.stored.get(self.parameters.get(number, ""))
        return stored is None or stored.trained

    def _differentiable(self, call: TapeCall) -> bool:
        """Whether a gradient of the results becomes that of the operands: one that a rank has whole gets a sum of terms from shards."""
        row, trained = self.row(call), [t.grad for t in self.tape.tensors]
        taken = [e for n, e in zip(call.inputs, row.inputs, strict=True) if trained[n]]
        made = [e for n, e in zip(call.outputs, row.outputs, strict=True) if trained[n]]
        return all(
            all(_differentiable(e, a) for e in (*taken, *made))
            and not (any(_is_replicated(e, a) for e in taken) and any(e.src.forward[a] != Replicate() for e in made))
            for a, size in enumerate(self.sizes)
            if size > 1
        )

    # --- shapes ---------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """The number of parts into which the samples are divided."""
        return math.prod(self.sizes[a] for a in self.data_axes)

    def local(self, number: int, placements: Iterable[object]) -> tuple[int, ...]:
        """This rank's shape of a tensor with these placements. The recording has one rank's samples, and all other dims whole."""
        shape = list(self.tape.tensors[number].shape)
        dim = self.samples[number]
        if dim is not None:
            shape[dim] *= self.num_parts
        for size, placement in zip(self.sizes, placements, strict=True):
            if isinstance(placement, Shard):
                if shape[placement.dim] % size:
                    raise PlanMismatch(describe_uneven_split(placement.dim, shape, size))
                shape[placement.dim] //= size
        return tuple(shape)

    def axes(self, placements: Placements, dim: int | None = None) -> list[int]:
        """The axes of more than one rank that shard `dim` (None: any dim)."""
        return [
            a
            for a, p in enumerate(placements)
            if isinstance(p, Shard) and (dim is None or p.dim == dim) and self.sizes[a] > 1
        ]

    def partial(self, placements: Placements) -> list[int]:
        """The axes of more than one rank on which a tensor is Partial."""
        return [a for a, p in enumerate(placements) if isinstance(p, Partial) and self.sizes[a] > 1]

    def slices(self, number: int, placements: Placements) -> list[tuple[int, int]]:
        """The cuts (axis, dim) of a constant to this rank's part. Along data axes the samples are this rank's already."""
        dim = self.samples[number]
        parted = self.callers_axes if number in self.owned else self.data_axes
        return [
            (a, p.dim)
            for a, p in enumerate(placements)
            if isinstance(p, Shard) and self.sizes[a] > 1 and not (p.dim == dim and a in parted)
        ]

    def _inner(self) -> set[int]:
        """The constants whose samples are merged with dims outside of them, as those of `labels.t().flatten()`."""
        found: set[int] = set()
        for call in self.tape.calls:
            if call.kind == "constant":
                merged = call.fn in DIM_MERGING and self.mixes(call)
                kept = any(n in found for n in call.inputs)
                found.update(n for n in call.outputs if (merged or kept) and self.samples[n] is not None)
        return found

    def mixes(self, call: TapeCall) -> bool:
        """Whether a call on a part of the samples makes another result than that part of its result, as a rule says."""
        if call.attrs is None or all(self.samples[n] is None for n in call.inputs):
            return False
        numbers = (*call.inputs, *call.outputs)
        values = []
        for number in numbers:  # with two samples at least, so that they may be split
            value, dim = self.tape.values[number], self.samples[number]
            shape = tuple(n * 2 if d == dim else n for d, n in enumerate(value.meta.shape))
            values.append(replace(value, meta=replace(value.meta, shape=shape)))
        ids = tuple(range(len(numbers)))
        op = Op(call.fn, call.fn, ids[: len(call.inputs)], ids[len(call.inputs) :], dict(call.attrs))
        wanted = [None if self.samples[n] is None else f"S({self.samples[n]})" for n in numbers]
        return not any(
            all(w is None or w == str(p) for w, (p, _) in zip(wanted, (*row.inputs, *row.outputs), strict=True))
            for row in rows(op, values)
            if not row.within  # which needs that the dims outside of it are cut, too
        )

    def mixed(self) -> set[int]:
        """The constants in which one number depends on several samples: they differ from rank to rank."""
        found: set[int] = set()
        if not self.data_axes:
            return found
        for call in self.tape.calls:
            if call.kind == "constant":
                lost = any(self.samples[i] is not None for i in call.inputs)
                mixes = call.fn not in DIM_MERGING and self.mixes(call)
                for number in call.outputs:
                    if mixes or any(i in found for i in call.inputs) or (lost and self.samples[number] is None):
                        found.add(number)
        return found


def _check_gradient_placements(site: str, edge: Edge, summed: Placements) -> None:
    """Raise PlanMismatch if an operator gives the gradient of an operand in other placements than those in which it is summed: the
    operand is another one than when it was planned."""
    if edge.src.gradient != summed:
        raise other_model_error(site, "gives an operand another gradient than in the plan", "")


def _differentiable(edge: Edge, axis: int) -> bool:
    """Whether the steps along an axis bring the gradient back as it leaves the edge, and a shard gets the gradient of that shard. Not so
    if no planned loss sends a gradient here."""
    ends = [(state.forward[axis], state.gradient[axis]) for state in (edge.src, edge.dst)]
    (_, leaving), (_, coming) = ends
    alike = all(not isinstance(placement, Shard) or placement == gradient for placement, gradient in ends)
    return alike and (coming == leaving or any(s.axis == axis for s in edge.backward))


def _is_replicated(edge: Edge, axis: int) -> bool:
    """Whether each rank takes all of the tensor, and its gradient is not a sum over ranks."""
    return edge.dst.forward[axis] == edge.dst.gradient[axis] == Replicate()


def block_copies(plan: Plan) -> dict[str, BlockCopy]:
    """For each call site: the block copy to which it belongs."""
    return {
        join_name(prefix, name): (label, prefix)
        for label, block in plan.blocks.items()
        if label
        for prefix in block.prefixes
        for name in block.sites
    }


def refuse_mixed_samples(planned: PlannedTape, needed: Iterable[int]) -> None:
    """Raise MixesSamples if a needed constant depends on all samples of the batch."""
    mixed = planned.mixed()
    wrong = next((n for n in needed if n in mixed), None)
    if wrong is not None:
        made = next(c for c in planned.tape.calls if wrong in c.outputs)
        raise MixesSamples(f"{made.fn} at {made.line.rpartition('/')[2]} computes over all samples of the batch")


def inputs_with_samples(planned: PlannedTape) -> set[int]:
    """The inputs of a call that hold samples."""
    tensors = enumerate(planned.tape.tensors)
    return {n for n, t in tensors if t.kind == INPUT and planned.samples[n] is not None}


def inputs_read_by_owner(planned: PlannedTape, axes: Sequence[int]) -> set[int]:
    """The inputs of which every rank reads nothing but the samples that it brings, if callers bring different ones along `axes`.

    All that is made of such an input is made sample by sample, and goes to operators that take it cut along `axes` and nowhere else. The
    labels of a loss whose logits lie by samples are so, where the ids of the same call are looked up in a table that ranks share.
    """
    live = [a for a, size in enumerate(planned.sizes) if size > 1]
    inputs = inputs_with_samples(planned)
    made_of = {n: {n} for n in inputs}
    read: set[int] = set().union(*(made_of.get(n, set()) for n in planned.tape.results()))
    for call in planned.tape.calls:
        if call.kind == "op":
            ends = zip(call.inputs, planned.row(call).inputs, strict=True)
            for number, edge in ends:
                dim = planned.samples[number]
                if dim is None or any((edge.dst.forward[a] == Shard(dim)) != (a in axes) for a in live):
                    read |= made_of.get(number, set())
            continue
        given: set[int] = set().union(*(made_of.get(n, set()) for n in call.inputs))
        if given:
            lost = any(planned.samples[n] is None or n in planned.inner for n in call.outputs)
            mixes = call.fn not in DIM_MERGING and planned.mixes(call)
            if call.kind != "constant" or is_inplace(call.fn) or lost or mixes:
                read |= given
        made_of.update((n, made_of.get(n, set()) | given) for n in call.outputs if given)
    return inputs - read


def inputs_read_by_operators_only(planned: PlannedTape) -> set[int]:
    """The inputs that operators alone read, of which no constant is made, and which the code does not ask."""
    others = {n for c in planned.tape.calls if c.kind != "op" or is_inplace(c.fn) for n in c.inputs}
    return inputs_with_samples(planned) - others


def index_inputs(planned: PlannedTape) -> set[int]:
    """The inputs in 64 bits whose numbers are looked up in tables and are nothing else: 32 bits hold each place in a table."""
    tensors = planned.tape.tensors
    inputs = {n for n in inputs_with_samples(planned) if tensors[n].dtype == torch.int64}
    made_of = {n: {n} for n in inputs}
    other: set[int] = set().union(*(made_of.get(n, set()) for n in planned.tape.results()))
    for call in planned.tape.calls:
        given: set[int] = set().union(*(made_of.get(n, set()) for n in call.inputs))
        same = call.kind == "constant" and call.fn in _VALUE_PRESERVING
        if same and all(tensors[n].dtype == torch.int64 for n in call.outputs):
            made_of.update(dict.fromkeys(call.outputs, given))
        elif call.kind != "op" or call.fn not in _INDEX_READERS:
            other |= given
    return inputs - other


def batch_questions(planned: PlannedTape) -> list[str]:
    """The lines at which the model asks for a yes or no that depends on all samples of the batch. A rank would answer for its own."""
    mixed = planned.mixed()
    asked = (c for c in planned.tape.calls if c.kind == "guard" and isinstance(c.answer, bool))
    return list(dict.fromkeys(c.line for c in asked if any(n in mixed for n in c.inputs)))
