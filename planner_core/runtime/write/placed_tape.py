"""A recording under a plan: the unit of each call, the placements of every tensor, and the samples of each rank.

The *delivered placements* of a tensor are those that the row of its producer ends with. `data_axes` are the mesh axes along
which every constant of the batch (ids, labels, masks) is sharded by samples. Along these axes each rank brings its own samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner_core.core import Edge, Op, ParamPlan, Partial, Placements, Plan, Shard, SitePlan, join_name
from planner_core.ops import LocalExecution, operator, rows
from planner_core.runtime.mismatch import MixesSamples, PlanMismatch, other_model_error
from planner_core.runtime.program.collectives import describe_uneven_split
from planner_core.runtime.record import Tape, TapeCall
from planner_core.runtime.record.reach import find_ancestors, find_loss
from planner_core.runtime.record.tape import COMPUTED, PARAMETER

_DIM_MERGING = frozenset({"view", "reshape", "flatten", "view_as", "reshape_as", "ravel"})
BlockCopy = tuple[str, str]
"""Label of a block in the plan and the prefix of one copy; ("", "") for the top."""


@dataclass
class PlannedTape:
    """A tape under a plan, with what the writers need of it. Tensors have their numbers on the tape."""

    tape: Tape
    samples: Sequence[int | None]
    rows: Mapping[str, SitePlan]
    stored: Mapping[str, ParamPlan]
    block_copies: Mapping[str, BlockCopy]
    sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    trains_all_results: bool = False
    """Whether the planned loss is the stand-in, which is made of all that the model returns."""
    other_versions: str = ""
    delivered_placements: dict[int, Placements] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    data_axes: tuple[int, ...] = ()
    """At first the axes along which ranks may hold different samples, then those along which they do."""
    sample_cuts: list[tuple[Shard, Placements]] = field(default_factory=list)
    """For each constant of the batch that an operator reads: the shard of its samples, and its placements there."""

    def __post_init__(self) -> None:
        self.data_axes = tuple(a for a in self.data_axes if self.sizes[a] > 1)
        for call in self.ops:
            self._check_arity(call, self.row(call))
        for number, tensor in enumerate(self.tape.tensors):
            if tensor.kind == PARAMETER:
                self.parameters[number] = tensor.name
        self.merged_inner = self._find_merged_inner()
        self._find_delivered_placements()
        # After `_find_delivered_placements`, which has dropped the axes along which some operator takes a constant otherwise than
        # by samples.
        self.data_axes = self._outermost_data_axes()
        self.loss = find_loss(self.tape)
        """The loss, or the result from which a loss outside is computed."""
        trained = self.tape.results() if self.trains_all_results else [self.loss]
        self.with_gradient = find_ancestors(self.tape, (n for n in trained if n is not None))
        """The tensors to which the planned loss sends a gradient."""

    @property
    def ops(self) -> list[TapeCall]:
        """The calls that have a row in the plan."""
        return [c for c in self.tape.calls if c.kind == "op"]

    def row(self, call: TapeCall) -> SitePlan:
        """Return the row of a call. Raises PlanMismatch."""
        row = self.rows.get(call.site)
        if row is None:
            raise other_model_error(call.site, "is not in the plan", self.other_versions, call.line)
        return row

    def takes_all(self, call: TapeCall) -> bool:
        """Return whether a call takes all samples where a rank has a part of them, and its sizes are not written for the rank."""
        if call.kind != "op" or operator(call.fn).local_execution is LocalExecution.SIZES:
            return False
        ends = [(self.samples[n], edge.dst.forward) for n, edge in zip(call.inputs, self.row(call).inputs, strict=True)]
        return any(dim is not None and dst[a] != Shard(dim) for dim, dst in ends for a in self.data_axes)

    def place(self, call: TapeCall) -> BlockCopy:
        """Return the block copy of a call."""
        return self.block_copies.get(call.site, ("", ""))

    def _check_arity(self, call: TapeCall, row: SitePlan) -> None:
        have, want = (len(call.inputs), len(call.outputs)), (len(row.inputs), len(row.outputs))
        if have != want:
            difference = f"has {have[0]} operands and {have[1]} results, the plan {want[0]} and {want[1]}"
            raise other_model_error(call.site, difference, self.other_versions, call.line)

    def _find_delivered_placements(self) -> None:
        """Find the delivered placements, in order. An axis along which an operator takes a constant of the batch otherwise than
        by samples is no data axis."""
        summed: dict[int, Placements] = {}
        for call in self.tape.calls:
            if call.kind == "dropout":
                self.delivered_placements[call.outputs[0]] = self.delivered_placements[call.inputs[0]]
                summed[call.outputs[0]] = summed[call.inputs[0]]
            if call.kind != "op":
                continue
            row = self.row(call)
            for number, edge in zip(call.inputs, row.inputs, strict=True):
                kind = self.tape.tensors[number].kind
                if kind == COMPUTED and self.delivered_placements[number] != edge.src.forward:
                    raise other_model_error(
                        call.site, "takes another operand than in the plan", self.other_versions, call.line
                    )
                if kind not in (COMPUTED, PARAMETER):
                    self._read_constant(number, edge)
                if kind == COMPUTED and self.tape.tensors[number].grad:
                    _check_gradient_placements(call.site, edge, summed[number])
            for number, edge in zip(call.outputs, row.outputs, strict=True):
                self.delivered_placements[number], summed[number] = edge.dst.forward, edge.dst.gradient
        if not self.sample_cuts:  # no operator of the plan takes samples, as of `x[0]`
            self.data_axes = ()

    def _read_constant(self, number: int, edge: Edge) -> None:
        dim = self.samples[number]
        if number in self.merged_inner:  # a part of this dim is no part of the samples
            self.data_axes = ()
        if dim is not None:
            self.data_axes = tuple(a for a in self.data_axes if edge.dst.forward[a] == Shard(dim))
            self.sample_cuts.append((Shard(dim), edge.dst.forward))

    def _outermost_data_axes(self) -> tuple[int, ...]:
        """Return the data axes that cut samples before any other axis does.

        A mesh cuts a dim by its outer axis first: of 8 samples on 2 x 2 the ranks hold 01, 23, 45, 67. If only an operator cuts
        by the outer axis, callers bring 0123 or 4567 along the inner one, and the operator would cut them into 01, 45, 23, 67.
        """
        inherited: list[int] = []
        for a in self.data_axes:
            if all(
                o in inherited or self.sizes[o] == 1 or dst[o] != cut for cut, dst in self.sample_cuts for o in range(a)
            ):
                inherited.append(a)
        return tuple(inherited)

    # --- shapes ---------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """The number of parts into which the samples are divided."""
        return math.prod(self.sizes[a] for a in self.data_axes)

    def local_shape(self, number: int, placements: Iterable[object]) -> tuple[int, ...]:
        """Return this rank's shape of a tensor with these placements. The recording has one rank's samples, and every other dim
        whole."""
        shape = list(self.tape.tensors[number].shape)
        dim = self.samples[number]
        if dim is not None:
            # Example: 2 samples were recorded and 4 ranks share the samples: 8 in all, and a Shard over these ranks gives 2 again.
            shape[dim] *= self.num_parts
        for size, placement in zip(self.sizes, placements, strict=True):
            if isinstance(placement, Shard):
                if shape[placement.dim] % size:
                    raise PlanMismatch(describe_uneven_split(placement.dim, shape, size))
                shape[placement.dim] //= size
        return tuple(shape)

    def axes(self, placements: Placements, dim: int | None = None) -> list[int]:
        """Return the axes of more than one rank that shard `dim` (None: any dim)."""
        return [
            a
            for a, p in enumerate(placements)
            if isinstance(p, Shard) and (dim is None or p.dim == dim) and self.sizes[a] > 1
        ]

    def partial(self, placements: Placements) -> list[int]:
        """Return the axes of more than one rank on which a tensor is Partial."""
        return [a for a, p in enumerate(placements) if isinstance(p, Partial) and self.sizes[a] > 1]

    def cuts(self, number: int, placements: Placements) -> list[tuple[int, int]]:
        """Return the cuts (axis, dim) of a constant to this rank's part. Along data axes the samples are this rank's already."""
        dim = self.samples[number]
        return [
            (a, p.dim)
            for a, p in enumerate(placements)
            if isinstance(p, Shard) and self.sizes[a] > 1 and not (p.dim == dim and a in self.data_axes)
        ]

    def _find_merged_inner(self) -> set[int]:
        """Return the constants whose samples are merged with dims outside of them, as in `labels.t().flatten()`."""
        merged_constants: set[int] = set()
        for call in self.tape.calls:
            if call.kind == "constant":
                merged = call.fn in _DIM_MERGING and self.mixes_samples(call)
                inherited = any(n in merged_constants for n in call.inputs)
                merged_constants.update(
                    n for n in call.outputs if (merged or inherited) and self.samples[n] is not None
                )
        return merged_constants

    def mixes_samples(self, call: TapeCall) -> bool:
        """Return whether a call on a part of the samples gives another result than that part of its result, by the operator's
        rule."""
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

    def constants_mixing_samples(self) -> set[int]:
        """Return the constants in which one number depends on several samples: they differ from rank to rank."""
        mixing: set[int] = set()
        if not self.data_axes:
            return mixing
        for call in self.tape.calls:
            if call.kind == "constant":
                lost = any(self.samples[i] is not None for i in call.inputs)
                mixes_samples = call.fn not in _DIM_MERGING and self.mixes_samples(call)
                for number in call.outputs:
                    if (
                        mixes_samples
                        or any(i in mixing for i in call.inputs)
                        or (lost and self.samples[number] is None)
                    ):
                        mixing.add(number)
        return mixing


def _check_gradient_placements(site: str, edge: Edge, summed: Placements) -> None:
    """Raise PlanMismatch if an operator gives an operand a gradient in other placements than those in which it is reduced.

    The operand is another one then than when it was planned.
    """
    if edge.src.gradient != summed:
        raise other_model_error(site, "gives an operand another gradient than in the plan", "")


def block_copies(plan: Plan) -> dict[str, BlockCopy]:
    """Return the block copy of each call site."""
    return {
        join_name(prefix, name): (label, prefix)
        for label, block in plan.blocks.items()
        if label
        for prefix in block.prefixes
        for name in block.sites
    }


def refuse_mixed_samples(planned: PlannedTape, needed: Iterable[int]) -> None:
    """Raise MixesSamples if a needed constant depends on all samples of the batch."""
    constants_mixing_samples = planned.constants_mixing_samples()
    number = next((n for n in needed if n in constants_mixing_samples), None)
    if number is not None:
        producer = next(c for c in planned.tape.calls if number in c.outputs)
        raise MixesSamples(
            f"{producer.fn} at {producer.line.rpartition('/')[2]} computes over all samples of the batch"
        )


def batch_questions(planned: PlannedTape) -> list[str]:
    """Return the lines at which the model asks for a yes or no that depends on all samples. A rank would answer for its own."""
    constants_mixing_samples = planned.constants_mixing_samples()
    asked = (c for c in planned.tape.calls if c.kind == "guard" and isinstance(c.answer, bool))
    return list(dict.fromkeys(c.line for c in asked if any(n in constants_mixing_samples for n in c.inputs)))
