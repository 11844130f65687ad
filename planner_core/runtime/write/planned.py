"""Record a model's forward pass, place it on a mesh as the plan says, and write it as one rank's program. It needs no processes.

A pass is recorded on a copy of the model whose weights are on meta, so the model itself is never run, nor changed. It is recorded with
the samples of the whole micro-batch and, if ranks may hold different samples, with those of one rank: a size that differs between the
two is a number of samples. If the code mixes samples, each rank makes the constants of the whole micro-batch and takes its part of them.
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
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.core import CaptureError, Op, Plan
from planner_core.models.hooks import ModuleState
from planner_core.models.sources import is_new, is_table, positional, spelled
from planner_core.runtime.mismatch import (
    PlanMismatch,
    describe_other_versions,
    other_model_error,
    refuse_planned_gradient,
)
from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.setup import choose_dtypes, plan_precision
from planner_core.runtime.record import MixesSamples, Tape, record
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
from planner_core.runtime.record.by_rules import check_call_by_rules
from planner_core.runtime.record.frozen import FrozenModel
from planner_core.runtime.record.tape import INPUT
from planner_core.runtime.write.placed_tape import (
    PlannedTape,
    batch_questions,
    block_copies,
    index_inputs,
    inputs_read_by_operators_only,
    inputs_read_by_owner,
)
from planner_core.runtime.write.program import write_program
from planner_core.runtime.write.specs import Program

GatherBatch = Callable[[torch.Tensor], torch.Tensor]
"""Gathers the global batch from this rank's own part."""


class InputSource(Enum):
    """What is done first with a leaf of a call, if the program takes the global batch and callers bring their own parts."""

    AS_IT_IS = "it holds no samples"
    GATHERED = "the parts of all callers are gathered"
    GATHERED_INDICES = "the same, in 32 bits: the numbers are places in a table"
    OWN = "each rank takes its own samples, which are all that it reads"
    PLACED = "it is put at its place in a batch of zeros, of which a rank reads its own samples alone"


@dataclass(frozen=True)
class PreparedProgram:
    """A program for one way to call a model. `whole`: the program takes the global batch. `brought`: what is done with each leaf of a
    call first; empty if callers bring what the program takes."""

    program: Program
    layout: PlannedTape
    whole: bool
    brought: Sequence[InputSource]

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that the program takes, by the names that it gives them."""
        numbers = (n for n, t in enumerate(self.layout.tape.tensors) if t.kind == INPUT)
        return {
            name: tuple(self.layout.tape.tensors[n].shape) for name, n in zip(self.program.inputs, numbers, strict=True)
        }

    def check_sites(self, versions: str) -> None:
        """Raise PlanMismatch if the plan has an operator that the model does not run here. (Of one more its row is missed before.)"""
        here = {call.site for call in self.layout.ops}
        gone = next((s for s in self.layout.rows if s not in here and not s.startswith("loss/")), None)
        if gone is not None:
            raise other_model_error(gone, "is in the plan, but the model does not run it here", versions)


class PlannedForward:
    """The forward pass of a model under a plan. Make it before the model's parameters are sharded.

    `data_axes`: the mesh axes of more than one rank along which callers hold different samples.
    """

    def __init__(self, model: nn.Module, plan: Plan, axes: Sequence[Axis]) -> None:
        if any("/LinearNF4" in site for block in plan.blocks.values() for site in block.sites):
            raise PlanMismatch(
                "the plan keeps frozen weights in 4 bits, which is priced and not run here; peft with bitsandbytes runs it, or plan "
                "without --nf4"
            )
        self.plan, self.axes = plan, list(axes)
        self.data_axes = tuple(a for a in plan.data_axes if axes[a].size > 1)
        self.names = positional(model.forward)
        self.config = plan.model["config"] or {}
        self.is_table = functools.partial(is_table, config=self.config)
        self.rows, self.stored, self.block_copies = plan.site_plans(), plan.param_plans(), block_copies(plan)
        self.recompute = {label: block.recompute for label, block in plan.blocks.items()}
        self.dtypes, self.precision = choose_dtypes(model, plan, self.stored), plan_precision(plan)
        self.recorded = False
        self.frozen = FrozenModel(model, lambda param: self.dtypes(param).working)

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool, gathered: GatherBatch
    ) -> PreparedProgram:
        """The program for such a call. `args` are this rank's own samples; with `whole` they are the global batch."""
        held = self.held(args, kwargs, whole=whole)
        if not whole and torch.is_grad_enabled():
            self._tell_if_whole(args, kwargs, held)
        axes = tuple(range(len(self.axes))) if whole else self.data_axes
        with self.frozen.current():
            every = self._record(args, kwargs) if whole else None
            dims: dict[int, int | None] = {}
            try:
                made = self._by_own_samples((args, kwargs), axes, held, every, dims)
            except MixesSamples:
                made = None
            if made is not None:
                return made
            tape = every or self._record(*map_marked_leaves((args, kwargs), held, gathered))
            layout = self._planned(tape, [dims.get(n) for n in range(len(tape.tensors))], ())
            if not whole:
                layout.callers_axes = self.data_axes
                layout.owned = frozenset(
                    inputs_read_by_owner(layout, self.data_axes) & inputs_read_by_operators_only(layout)
                )
            self._check(layout, tape)
            return PreparedProgram(
                self._written(layout), layout, whole=True, brought=() if whole else self._brought(layout, held)
            )

    def _brought(self, layout: PlannedTape, held: Sequence[bool]) -> list[InputSource]:
        refs = pytree.tree_leaves(layout.tape.arguments)
        found = dict.fromkeys(index_inputs(layout), InputSource.GATHERED_INDICES)
        found.update(dict.fromkeys(inputs_read_by_owner(layout, self.data_axes), InputSource.PLACED))
        found.update(dict.fromkeys(layout.owned, InputSource.OWN))
        return [
            found.get(getattr(ref, "number", -1), InputSource.GATHERED) if has else InputSource.AS_IT_IS
            for ref, has in zip(refs, held, strict=True)
        ]

    def _by_own_samples(
        self, call: Any, axes: Sequence[int], held: Sequence[bool], every: Tape | None, dims: dict[int, int | None]
    ) -> PreparedProgram | None:
        """The program of a rank that has its own samples alone; None if no axis can be one along which ranks have different samples.

        `every`: the recording with the samples of all ranks, if `call` has them. `dims` gets the dims of its tensors that hold samples.
        Raises MixesSamples.
        """
        whole = every is not None
        while axes := tuple(a for a in axes if self.axes[a].size > 1):
            parts = math.prod(self.axes[a].size for a in axes)
            if whole and any(len(x) % parts for x in itertools.compress(pytree.tree_leaves(call), held)):
                axes = axes[:-1]
                continue
            with _failures_as_mixed_samples():
                tape = self._record(*(map_marked_leaves(call, held, self._part_along(axes)) if whole else call))
                every = every or self._record(*repeat_samples(call, held, parts))
            pairs, found, mixed = find_batch_dims(tape, every, parts)
            dims.update({pairs[n]: dim for n, dim in enumerate(found)})
            if mixed:
                raise MixesSamples(mixed)
            layout = self._planned(tape, found, axes)
            if layout.data_axes == axes:
                return self._checked(layout, every, whole)
            if not whole:
                return None
            axes = layout.data_axes
        return None

    def _part_along(self, axes: Sequence[int]) -> GatherBatch:
        return lambda x: local_samples(x, 0, axes, self.axes)

    def _checked(self, layout: PlannedTape, every: Tape, whole: bool) -> PreparedProgram:
        """The program of one rank's samples. `every`: the recording with those of all ranks."""
        tape = layout.tape
        self._check(layout, every)
        line = next(iter(batch_questions(layout)), "") or find_sample_numbering(
            tape, every, layout.samples, layout.num_parts
        )
        if line or results_without_tensors(tape) != results_without_tensors(every):
            raise MixesSamples(line)
        if uses_sample_count(tape, every, layout.takes_all):  # the plan is for the samples of all ranks
            adopt_numbers(tape, every, layout.takes_all)
        if whole and (line := find_input_write(tape)):
            warnings.warn(
                f"forward writes into an input in place at {line.rpartition('/')[2]}: a rank writes its own samples of that, and the "
                "others in the tensor that it was given stay as they were; let forward write into a copy if the loop reads it",
                stacklevel=6,
            )
        return PreparedProgram(self._written(layout), layout, whole, ())

    def _tell_if_whole(self, args: Any, kwargs: Any, held: Sequence[bool]) -> None:
        own = next(itertools.compress(pytree.tree_leaves((args, kwargs)), held), None)
        workload, ranks = self.plan.workload, math.prod(self.axes[a].size for a in self.data_axes)
        planned = int(workload["batch"]) // int(workload.get("accumulate", 1))
        if own is not None and ranks > 1 and len(own) == planned:
            warnings.warn(
                f"dim 0 of this rank's inputs has {planned} samples, as many as the plan has for all ranks: {ranks} parts make "
                f"{ranks * planned}, more memory and time than was planned; give a rank its own part, or the whole batch with "
                "global_batch=True",
                stacklevel=6,
            )

    def held(self, args: Any, kwargs: Any, *, whole: bool) -> list[bool]:
        """For each leaf of a call: whether it has samples. Raises PlanMismatch if `args` are a rank's own and nothing says so."""
        for path, x in () if whole else pytree.tree_flatten_with_path((args, kwargs))[0]:
            name = spelled(path, self.names)
            if isinstance(x, torch.Tensor) and x.dim() and is_new(name, self.config):
                raise PlanMismatch(
                    f"{name} is not among the inputs that were planned, some of which have no samples, so that nothing says whether it has "
                    "some; give inputs by place or by name as they were planned, or the whole batch with global_batch=True"
                )
        return find_sample_leaves(args, kwargs, self.names, self.is_table)

    def _written(self, layout: PlannedTape) -> Program:
        return write_program(layout, self._title(), self.recompute, kept=self.plan.kept_sites())

    def _check(self, layout: PlannedTape, tape: Tape) -> None:
        """Raise PlanMismatch if an operator cannot run by its row with the arguments of a recording."""
        for call in (c for c in tape.calls if c.kind == "op"):
            op = Op(call.site, call.fn, call.inputs, call.outputs, dict(call.attrs or {}))
            check_call_by_rules(op, tape.values, layout.row(call), layout.sizes)
        for number, name in layout.parameters.items():
            if number in layout.planned and name in self.stored and not self.stored[name].trained:
                refuse_planned_gradient(name)

    def _planned(self, tape: Tape, samples: Sequence[int | None], axes: Sequence[int]) -> PlannedTape:
        sizes, names = tuple(a.size for a in self.axes), tuple(a.name for a in self.axes)
        return PlannedTape(
            tape,
            samples,
            self.rows,
            self.stored,
            self.block_copies,
            sizes,
            names,
            describe_other_versions(self.plan),
            data_axes=tuple(axes),
        )

    def _record(self, args: Any, kwargs: Any) -> Tape:
        """A recording. The first of all may fill tables that later passes read (docs/SUPPORT.md)."""
        state = ModuleState(self.frozen.twin)
        tape = record(self.frozen, args, kwargs)
        changed, first, self.recorded = state.first_change(), not self.recorded, True
        if changed and not first:
            raise PlanMismatch(
                f"forward sets {changed} at this call, so a step depends on those before; call the model with its longest inputs before "
                "apply, or keep it in a buffer that forward writes in place"
            )
        return record(self.frozen, args, kwargs) if changed else tape

    def _title(self) -> str:
        sizes = "x".join(str(a.size) for a in self.axes)
        return f"{self.plan.model['name']} under the plan {self.plan.name!r} on a mesh of {sizes}: one rank's program."


def local_samples(x: torch.Tensor, dim: int, data_axes: Sequence[int], axes: Sequence[Axis]) -> torch.Tensor:
    """This rank's samples of the global batch."""
    for axis in data_axes:
        x = axes[axis].slice(x, dim)
    return x


@contextlib.contextmanager
def _failures_as_mixed_samples() -> Iterator[None]:
    """A pass with another number of samples may fail, where code takes that number for granted."""
    try:
        yield
    except CaptureError as error:
        raise MixesSamples(str(error)) from error
