"""Record a model's forward pass, place it on a mesh as the plan says, and write it as one rank's program. It needs no
processes.

A pass is recorded on a copy of the model whose weights are on meta, so the model itself is neither run nor changed. It is
recorded with the samples of the whole micro-batch and, if ranks may hold different samples, with those of one rank: a size that
differs between the two is a number of samples. If the code mixes samples, each rank makes the constants of the whole
micro-batch and takes its part of them.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.core import STANDIN_LOSS, STANDIN_SCOPE, CallSite, CaptureError, Op, Plan, SitePlan, Value, named
from planner_core.models.hooks import ModuleState
from planner_core.models.sources import (
    argument_name,
    is_in_four_bits,
    is_unknown_input,
    lacks_samples,
    positional_names,
)
from planner_core.ops import rows
from planner_core.runtime.mismatch import (
    MixesSamples,
    PlanMismatch,
    describe_other_versions,
    other_model_error,
)
from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.setup import choose_dtypes, plan_precision
from planner_core.runtime.record import Tape, record
from planner_core.runtime.record.batch import (
    adopt_numbers,
    find_batch_dims,
    find_input_write,
    find_sample_leaves,
    find_sample_numbering,
    map_marked_leaves,
    repeat_samples,
    results_without_tensors,
    uses_sample_count,
)
from planner_core.runtime.record.frozen import FrozenModel
from planner_core.runtime.record.tape import INPUT
from planner_core.runtime.write.placed_tape import (
    PlannedTape,
    batch_questions,
    block_copies,
)
from planner_core.runtime.write.program import write_program
from planner_core.runtime.write.specs import Program

GatherBatch = Callable[[torch.Tensor], torch.Tensor]
"""Gathers the global batch from this rank's own part."""


@dataclass(frozen=True)
class PreparedProgram:
    """A program for one way to call a model.

    `global_batch`: the program takes the global batch. `gathered`: for each leaf of a call whether the parts of all callers are
    gathered first; empty if callers bring what the program takes.
    """

    program: Program
    layout: PlannedTape
    global_batch: bool
    gathered: Sequence[bool]

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that the program takes, by their names in it."""
        numbers = (n for n, t in enumerate(self.layout.tape.tensors) if t.kind == INPUT)
        return {
            name: tuple(self.layout.tape.tensors[n].shape) for name, n in zip(self.program.inputs, numbers, strict=True)
        }

    def check_sites(self, versions: str) -> None:
        """Raise PlanMismatch if the plan has an operator that the model does not run here.

        The opposite, an operator without a row in the plan, was refused when the recording was placed.
        """
        sites = {call.site for call in self.layout.ops}
        planned = (s for s in self.layout.rows if CallSite.parse(s).scope != STANDIN_SCOPE)
        missing = next((s for s in planned if s not in sites), None)
        if missing is not None:
            raise other_model_error(missing, "is in the plan, but the model does not run it here", versions)


class PlannedForward:
    """The forward pass of a model under a plan. Make it before the model's parameters are sharded.

    `data_axes`: the mesh axes of more than one rank along which callers hold different samples.
    """

    def __init__(self, model: nn.Module, plan: Plan, axes: Sequence[Axis]) -> None:
        if is_in_four_bits(plan.model.config):
            raise PlanMismatch(
                "the plan keeps frozen weights in 4 bits, which is priced and not run here; peft with bitsandbytes runs it, or plan ",
                "without ",
                named("nf4"),
            )
        self.plan, self.axes = plan, list(axes)
        self.data_axes = tuple(a for a in plan.data_axes if axes[a].size > 1)
        self.argument_names = positional_names(model.forward)
        self.config = plan.model.config
        self.is_table = functools.partial(lacks_samples, config=self.config)
        self.rows, self.stored, self.block_copies = plan.site_plans(), plan.param_plans(), block_copies(plan)
        self.recompute = {label: block.recompute for label, block in plan.blocks.items()}
        self.dtypes, self.precision = choose_dtypes(model, plan, self.stored), plan_precision(plan)
        self.recorded = False
        self.record = record
        """Makes a recording. A fake run of several ranks in one process replaces it, to record once for all of them."""
        self.frozen = FrozenModel(model, lambda param: self.dtypes(param).working)

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, global_batch: bool, gather: GatherBatch
    ) -> PreparedProgram:
        """Return the program for such a call. `args` are this rank's own samples, or with `global_batch` all samples."""
        sample_leaves = self.sample_leaves(args, kwargs, global_batch=global_batch)
        if not global_batch and torch.is_grad_enabled():
            self._warn_if_global(args, kwargs, sample_leaves)
        axes = tuple(range(len(self.axes))) if global_batch else self.data_axes
        with self.frozen.with_current_buffers():
            all_samples = self._record_pass(args, kwargs) if global_batch else None
            sample_dims: dict[int, int | None] = {}
            try:
                prepared = self._prepare_by_samples((args, kwargs), axes, sample_leaves, all_samples, sample_dims)
            except MixesSamples:
                prepared = None
            if prepared is not None:
                return prepared
            # The program takes the whole batch, and each rank makes every constant of it. Its operators still run on shards alone.
            tape = all_samples or self._record_pass(*map_marked_leaves((args, kwargs), sample_leaves, gather))
            layout = self._place_tape(tape, [sample_dims.get(n) for n in range(len(tape.tensors))], ())
            self._check_calls(layout, tape)
            gathered = () if global_batch else sample_leaves
            return PreparedProgram(self._write_program(layout), layout, global_batch=True, gathered=gathered)

    def _prepare_by_samples(
        self,
        call: Any,
        axes: Sequence[int],
        sample_leaves: Sequence[bool],
        all_samples: Tape | None,
        sample_dims: dict[int, int | None],
    ) -> PreparedProgram | None:
        """Return the program of a rank that has its own samples only; None if ranks cannot have different samples along any
        axis.

        `all_samples`: the recording with the samples of all ranks, if `call` has them. `sample_dims` is filled with the dims of
        its tensors that hold samples. Raises MixesSamples.
        """
        global_batch = all_samples is not None
        # Fewer axes are tried, the innermost dropped first, until samples divide and every operator cuts them along all of these.
        while axes := tuple(a for a in axes if self.axes[a].size > 1):
            parts = math.prod(self.axes[a].size for a in axes)
            if global_batch and any(
                len(x) % parts for x in itertools.compress(pytree.tree_leaves(call), sample_leaves)
            ):
                axes = axes[:-1]
                continue
            with _failures_as_mixed_samples():
                tape = self._record_pass(
                    *(map_marked_leaves(call, sample_leaves, self._part_along(axes)) if global_batch else call)
                )
                # The same samples several times: a question about all of them (`mask.all()`) has the same answer, and a table of them
                # is a repetition of this rank's, so any other difference comes of their number (`find_sample_numbering`).
                all_samples = all_samples or self._record_pass(*repeat_samples(call, sample_leaves, parts))
            pairs, sources, mixed = find_batch_dims(tape, all_samples, parts)
            sample_dims.update({pairs[n]: dim for n, dim in enumerate(sources)})
            if mixed:
                raise MixesSamples(mixed)
            layout = self._place_tape(tape, sources, axes)
            if layout.data_axes == axes:
                return self._check_and_write(layout, all_samples, global_batch)
            # Callers have cut the batch along all of `axes` already. An operator that wants it whole along one cannot have it from them.
            if not global_batch:
                return None
            axes = layout.data_axes
        return None

    def _part_along(self, axes: Sequence[int]) -> GatherBatch:
        return lambda x: local_samples(x, 0, axes, self.axes)

    def _check_and_write(self, layout: PlannedTape, all_samples: Tape, global_batch: bool) -> PreparedProgram:
        """Check a placed recording of one rank's samples, and write its program. `all_samples`: the recording with those of all
        ranks."""
        tape = layout.tape
        self._check_calls(layout, all_samples)
        line = next(iter(batch_questions(layout)), "") or find_sample_numbering(
            tape, all_samples, layout.samples, layout.num_parts
        )
        if line or results_without_tensors(tape) != results_without_tensors(all_samples):
            raise MixesSamples(line)
        # 4 ranks with 2 samples each: `loss.sum() / len(x)` divides by 8 in the plan, and by 2 in the recording of one rank.
        if uses_sample_count(tape, all_samples, layout.takes_all):
            adopt_numbers(tape, all_samples, layout.takes_all)
        if global_batch and (line := find_input_write(tape)):
            warnings.warn(
                f"forward writes into an input in place at {line.rpartition('/')[2]}: a rank writes its own samples of that, and the "
                "others in the tensor that it was given stay as they were; let forward write into a copy if the loop reads it",
                stacklevel=6,
            )
        return PreparedProgram(self._write_program(layout), layout, global_batch, ())

    def _warn_if_global(self, args: Any, kwargs: Any, sample_leaves: Sequence[bool]) -> None:
        """Warn if a rank seems to bring the whole batch as its own part."""
        samples = next(itertools.compress(pytree.tree_leaves((args, kwargs)), sample_leaves), None)
        planned, ranks = self.plan.graph_batch, math.prod(self.axes[a].size for a in self.data_axes)
        if samples is not None and ranks > 1 and len(samples) == planned:
            warnings.warn(
                f"dim 0 of this rank's inputs has {planned} samples, as many as the plan has for all ranks: {ranks} parts make "
                f"{ranks * planned}, more memory and time than was planned; give a rank its own part, or the whole batch with "
                "global_batch=True",
                stacklevel=6,
            )

    def sample_leaves(self, args: Any, kwargs: Any, *, global_batch: bool) -> list[bool]:
        """Return for each leaf of a call whether it has samples. Raises PlanMismatch if `args` are a rank's own and nothing
        says so."""
        for path, x in () if global_batch else pytree.tree_flatten_with_path((args, kwargs))[0]:
            name = argument_name(path, self.argument_names)
            if isinstance(x, torch.Tensor) and x.dim() and is_unknown_input(name, self.config):
                raise PlanMismatch(
                    f"{name} is not among the inputs that were planned, some of which have no samples, so that nothing says whether it has "
                    "some; give inputs by place or by name as they were planned, or the whole batch with global_batch=True"
                )
        return find_sample_leaves(args, kwargs, self.argument_names, self.is_table)

    def _write_program(self, layout: PlannedTape) -> Program:
        return write_program(layout, self._program_title(), self.recompute, kept_sites=self.plan.kept_sites())

    def _check_calls(self, layout: PlannedTape, tape: Tape) -> None:
        """Raise PlanMismatch if an operator cannot run by its row with the arguments of a recording."""
        for call in (c for c in tape.calls if c.kind == "op"):
            op = Op(call.site, call.fn, call.inputs, call.outputs, dict(call.attrs or {}))
            _check_call(op, tape.values, layout.row(call), layout.sizes)
        for number, name in layout.parameters.items():
            if number in layout.with_gradient and name in self.stored and not self.stored[name].trained:
                # No sum over ranks was planned for it.
                raise PlanMismatch(
                    f"the loss sends {name} a gradient, which it did not when it was planned (it ran under torch.no_grad then, or "
                    "detached); plan it again"
                )

    def _place_tape(self, tape: Tape, samples: Sequence[int | None], axes: Sequence[int]) -> PlannedTape:
        sizes, names = tuple(a.size for a in self.axes), tuple(a.name for a in self.axes)
        return PlannedTape(
            tape,
            samples,
            self.rows,
            self.stored,
            self.block_copies,
            sizes,
            names,
            self.plan.model.loss == STANDIN_LOSS,
            describe_other_versions(self.plan),
            data_axes=tuple(axes),
        )

    def _record_pass(self, args: Any, kwargs: Any) -> Tape:
        """Record a pass. The first recording of all may fill tables that later passes read (docs/SUPPORT.md), so it is repeated
        then."""
        state = ModuleState(self.frozen.twin)
        tape = self.record(self.frozen, args, kwargs)
        changed, first, self.recorded = state.first_change(), not self.recorded, True
        if changed and not first:
            raise PlanMismatch(
                f"forward sets {changed} at this call, so a step depends on those before; call the model with its longest inputs before "
                "apply, or keep it in a buffer that forward writes in place"
            )
        return self.record(self.frozen, args, kwargs) if changed else tape

    def _program_title(self) -> str:
        sizes = "x".join(str(a.size) for a in self.axes)
        return f"{self.plan.model.name} under the plan {self.plan.name!r} on a mesh of {sizes}: one rank's program."


def _check_call(op: Op, values: Sequence[Value], row: SitePlan, sizes: Sequence[int]) -> None:
    """Raise PlanMismatch if `op` cannot run by `row` on a mesh of `sizes`. `values` have global shapes, or those of some samples."""
    # Arguments may have changed since the model was planned, as its code reads them from attributes. Example: x.softmax(self.dim) was
    # planned with the last dim, and split by samples. With dim = 0 the same row would give each rank a softmax of its own samples.
    possible_rows = [[*map(str, (p for p, _ in (*r.inputs, *r.outputs)))] for r in rows(op, values)]
    for axis, size in enumerate(sizes):
        takes = [str(e.dst.forward[axis]) for e in row.inputs]
        makes = [str(e.src.forward[axis]) for e in row.outputs]
        if size > 1 and [*takes, *makes] not in possible_rows:
            raise PlanMismatch(
                f"{op.name} is planned to take {', '.join(takes) or 'nothing'} and make {', '.join(makes)} on mesh axis {axis}, which is "
                f"not one of the ways in which {op.fn} can run with the arguments and shapes that the model gives it now; set the model "
                "as it was when it was planned, or plan it again"
            )


def local_samples(x: torch.Tensor, dim: int, data_axes: Sequence[int], axes: Sequence[Axis]) -> torch.Tensor:
    """Return this rank's samples of the global batch."""
    for axis in data_axes:
        x = axes[axis].slice(x, dim)
    return x


@contextlib.contextmanager
def _failures_as_mixed_samples() -> Iterator[None]:
    """Inside, a failure counts as MixesSamples: code may take the number of samples for granted."""
    try:
        yield
    except CaptureError as error:
        raise MixesSamples(str(error)) from error
