"""Record a model's forward pass, place it on a mesh as the plan says, and write it as one rank's program. It needs no processes."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.core import Op
from planner_core.models.hooks import Noted, Place, kept_tensors
from planner_core.models.sources import is_new, is_table, positional, spelled
from planner_core.runtime.plan_reader import (
    PlanMismatch,
    kept_sites,
    other_model,
    other_versions,
    read_params,
    read_precision,
    read_rows,
    refuse_gradient,
)
from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.setup import dtypes_of
from planner_core.runtime.record import CannotRewrite, Ref, Tape, record
from planner_core.runtime.record.attributes import caches_of, caches_outside, put, rebound_buffers, settled
from planner_core.runtime.record.batch import (
    alike,
    batch_dims,
    changed,
    counts_samples,
    hold_samples,
    numbers_samples,
    plain_results,
    repeated,
    same_operators,
    same_step,
    with_numbers_of,
    writes_input,
)
from planner_core.runtime.record.by_rules import check_by_rules
from planner_core.runtime.record.not_computed import allow_kept, refuse_kept
from planner_core.runtime.record.outside import Outside
from planner_core.runtime.record.tape import INPUT, Cache, Named
from planner_core.runtime.write.planned_tape import PlannedTape, asked_of_all, indices, places, read_by_owner
from planner_core.runtime.write.program import write_program
from planner_core.runtime.write.specs import Program

Gathered = Callable[[torch.Tensor], torch.Tensor]
"""Gathers the global batch from this rank's own part."""


class Bring(Enum):
    """What is done first with a leaf of a call, if the program takes the global batch and callers bring their own parts."""

    AS_IT_IS = "it holds no samples"
    GATHERED = "the parts of all callers are gathered"
    GATHERED_INDICES = "the same, in 32 bits: the numbers are places in a table"
    PLACED = "it is put at its place in a batch of zeros, of which a rank reads its own samples alone"


@dataclass(frozen=True)
class Prepared:
    """A program for one way to call a model. `whole`: the program takes the global batch. `brought`: what is done with each leaf of a
    call first; empty if callers bring what the program takes."""

    program: Program
    layout: PlannedTape
    whole: bool
    brought: Sequence[Bring]

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
            raise other_model(gone, "is in the plan, but the model does not run it here", versions)


class PlannedForward:
    """The forward pass of a model under a plan. Make it before the model's parameters are sharded.

    `data_axes`: the mesh axes along which callers hold different samples.
    """

    def __init__(
        self, model: nn.Module, plan: Mapping[str, Any], axes: Sequence[Axis], data_axes: Sequence[int] = ()
    ) -> None:
        self.model, self.plan, self.axes = model, plan, list(axes)
        self.data_axes = tuple(a for a in data_axes if axes[a].size > 1)
        self.plain: Callable[..., Any] = model.forward
        self.names = positional(self.plain)
        self.config = plan["model"]["config"] or {}
        self.is_table = functools.partial(is_table, config=self.config)
        self.outside = Outside(model.modules())
        self.rows, self.stored, self.places = read_rows(plan), read_params(plan), places(plan)
        self.recompute = {label: str(block["recompute"]) for label, block in plan["blocks"].items()}
        self.dtypes, self.precision = dtypes_of(model, plan, self.stored), read_precision(plan)
        self.forms = {n: (p.shape, self.dtypes(p)) for n, p in model.named_parameters()}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool, gathered: Gathered) -> Prepared:
        """The program for such a call. `args` are this rank's own samples; with `whole` they are the global batch."""
        axes = tuple(range(len(self.axes))) if whole else self.data_axes
        held = self.held(args, kwargs, whole=whole)
        if not whole and torch.is_grad_enabled():
            self._tell_if_whole(args, kwargs, held)
        layout, counts = self._layout(args, kwargs, axes, held)
        gathers = not whole and layout.data_axes != self.data_axes
        if gathers:
            args, kwargs = changed((args, kwargs), held, gathered)
            layout, counts = self._layout(args, kwargs, layout.data_axes, held)
        if (whole or gathers) and layout.num_parts > 1:
            args, kwargs = self._own_samples(layout, args, kwargs)
            layout, counts = self._layout(args, kwargs, layout.data_axes, held)
        if (whole or gathers) and layout.num_parts > 1 and (line := writes_input(layout.tape)):
            warnings.warn(
                f"forward writes into an input in place at {line.rpartition('/')[2]}: a rank writes its own samples of that, and the "
                "others in the tensor that it was given stay as they were; let forward write into a copy if the loop reads it",
                stacklevel=6,
            )
        program = self._for_any_picks(layout, args, kwargs) if layout.tape.picks else None
        if counts:  # the plan is for the samples of all ranks
            with_numbers_of(
                layout.tape, self._record(*repeated((args, kwargs), held, layout.num_parts)), layout.takes_all
            )
            program = None
        layout.tape.left = self._left(layout.tape, args, kwargs, held, layout.num_parts)
        brought = self._brought(layout, held) if gathers else ()
        return Prepared(program or self._written(layout), layout, whole or gathers, brought)

    def _brought(self, layout: PlannedTape, held: Sequence[bool]) -> list[Bring]:
        refs = pytree.tree_leaves(layout.tape.arguments)
        stays = bool(layout.tape.left or layout.tape.picks)
        found = dict.fromkeys(indices(layout), Bring.GATHERED_INDICES)
        found.update({} if stays else dict.fromkeys(read_by_owner(layout, self.data_axes), Bring.PLACED))
        return [
            found.get(getattr(ref, "number", -1), Bring.GATHERED) if has else Bring.AS_IT_IS
            for ref, has in zip(refs, held, strict=True)
        ]

    def still(
        self, made: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], *, gathered: Gathered
    ) -> Sequence[Cache] | None:
        """The caches that such a call leaves now, if its program is `made` although caches are others than when that was written. None if
        it is another, or nothing says so."""
        layout = made.layout
        if made.brought:
            args, kwargs = changed((args, kwargs), [b is not Bring.AS_IT_IS for b in made.brought], gathered)
        held, parted = self.held(args, kwargs, whole=made.whole), made.whole and layout.num_parts > 1
        if parted:
            args, kwargs = self._own_samples(layout, args, kwargs)
        tape = self._record(args, kwargs)
        if not same_step(layout.tape, tape):
            return None
        return self._left(tape, args, kwargs, held, layout.num_parts)

    def _left(self, tape: Tape, args: Any, kwargs: Any, held: Sequence[bool], parts: int) -> Sequence[Cache]:
        """The caches that a call of all samples leaves, by the recording of one of a rank's own."""
        return self._record(*repeated((args, kwargs), held, parts)).left if tape.left and parts > 1 else tape.left

    def _tell_if_whole(self, args: Any, kwargs: Any, held: Sequence[bool]) -> None:
        own = next(itertools.compress(pytree.tree_leaves((args, kwargs)), held), None)
        workload, ranks = self.plan["workload"], math.prod(self.axes[a].size for a in self.data_axes)
        planned = int(workload["batch"]) // int(workload.get("accumulate", 1))
        if own is not None and ranks > 1 and len(own) == planned:
            warnings.warn(
                f"dim 0 of this rank's inputs has {planned} samples, as many as the plan has for all ranks: {ranks} parts make "
                f"{ranks * planned}, more memory and time than was planned; give a rank its own part, or the whole batch with "
                "global_batch=True", stacklevel=6,
            )  # fmt: skip

    def held(self, args: Any, kwargs: Any, *, whole: bool) -> list[bool]:
        """For each leaf of a call: whether it has samples. Raises PlanMismatch if `args` are a rank's own and nothing says so."""
        for path, x in () if whole else pytree.tree_flatten_with_path((args, kwargs))[0]:
            name = spelled(path, self.names)
            if isinstance(x, torch.Tensor) and x.dim() and is_new(name, self.config):
                raise PlanMismatch(
                    f"{name} is not among the inputs that were planned, some of which have no samples, so that nothing says whether it has "
                    "some; give inputs by place or by name as they were planned, or the whole batch with global_batch=True"
                )
        return hold_samples(args, kwargs, self.names, self.is_table)

    def _written(self, layout: PlannedTape) -> Program:
        return write_program(layout, self._title(), self.recompute, kept=kept_sites(self.plan))

    def _for_any_picks(self, layout: PlannedTape, args: Any, kwargs: Any) -> Program:
        """The program, which must be the same where masks of the inputs pick one element less, or it would be right for one batch alone.
        Raises CannotRewrite."""
        before, put_back = self._noted(), self.outside.keep()
        try:
            tape = self._recorded(args, kwargs, fewer=True)
            same = same_operators(layout.tape, tape) and len(layout.tape.tensors) == len(tape.tensors)
            other = self._written(self._planned(tape, layout.samples, layout.data_axes)).source if same else ""
        except CannotRewrite:
            other = ""
        finally:
            before.put_back()
            put_back()
        program = self._written(layout)
        if other != program.source:
            line = layout.tape.picks.rpartition("/")[2]
            raise CannotRewrite(f"its code computes with a number of elements that the values of a batch say at {line}")
        return program

    def _layout(self, args: Any, kwargs: Any, axes: Sequence[int], held: Sequence[bool]) -> tuple[PlannedTape, bool]:
        """A recording, placed as the plan says, and whether its calls compute with the number of a rank's own samples. Ranks may hold
        different samples along `axes`."""
        tape = self._record(args, kwargs)
        if all(a.size == 1 for a in self.axes):
            return self._planned(tape, [None] * len(tape.tensors), axes), False
        twice = self._record(*repeated((args, kwargs), held))
        planned = self._planned(tape, batch_dims(tape, twice), axes)
        for call in (c for c in twice.calls if c.kind == "op"):  # of two samples or more, so that these may be split
            op = Op(call.site, call.fn, call.inputs, call.outputs, dict(call.attrs or {}))
            check_by_rules(op, twice.values, planned.row(call), planned.sizes)
        for number, name in planned.parameters.items():
            if number in planned.planned and name in self.stored and not self.stored[name].trained:
                refuse_gradient(name)
        for line in asked_of_all(planned) if planned.num_parts > 1 else ():
            if self._parts_ways(tape, args, kwargs, line):
                raise CannotRewrite(
                    f"it goes one way or another by all samples of the batch at {line.rpartition('/')[2]}"
                )
        if planned.num_parts > 1 and (line := numbers_samples(tape, twice, planned.samples)):
            raise CannotRewrite(f"it numbers the samples of the batch at {line.rpartition('/')[2]}")
        if planned.num_parts > 1 and plain_results(tape) != plain_results(twice):
            raise CannotRewrite("it returns a number of samples, which would be that of a rank's own")
        return planned, planned.num_parts > 1 and counts_samples(tape, twice, planned.takes_all)

    def _parts_ways(self, tape: Tape, args: Any, kwargs: Any, line: str) -> bool:
        """Whether ranks whose own samples give other answers to the question at a line would run other operators."""
        before, put_back = self._noted(), self.outside.keep()
        try:
            return not same_operators(tape, self._recorded(args, kwargs, other_way=line))
        except CannotRewrite:  # as where the model refuses what it asks about: then a rank says so
            return False
        finally:
            before.put_back()
            put_back()

    def _planned(self, tape: Tape, samples: Sequence[int | None], axes: Sequence[int]) -> PlannedTape:
        sizes, names = tuple(a.size for a in self.axes), tuple(a.name for a in self.axes)
        return PlannedTape(
            tape, samples, self.rows, self.stored, self.places, sizes, names, other_versions(self.plan), data_axes=tuple(axes)
        )  # fmt: skip

    def _record(self, args: Any, kwargs: Any) -> Tape:
        """The recording of a forward pass, which leaves the numbers and flags of all modules as they were.

        Raises CannotRewrite if the model's own code sets some in each pass, or goes another way when they are set.
        """
        allow_kept(self._noted())
        before, outer, put_back = self._noted(), self.outside.marks(), self.outside.keep()
        outside, tables = self.outside.values(), [(m._buffers, dict(m._buffers)) for m in self.model.modules()]
        buffers = {n for n, _ in self.model.named_buffers()}
        try:
            tape = self._recorded(args, kwargs)
            if self._filled(buffers):
                tape = self._recorded(args, kwargs)
            if sets := self.outside.set_since(outer):
                raise CannotRewrite(f"its forward pass sets {sets}, which generated code would not do")
            first = self._noted()
            caches = [*caches_of(before, first), *caches_outside(outside, self.outside.values())]
            computed = self._check_kept(tape, before, first, caches, (args, kwargs))
        except CannotRewrite:  # its own code is to find what it would have found
            for table, was in tables:
                table.clear()
                table.update(was)
            raise
        finally:
            before.put_back()
            put_back()
        tape.moving = []
        refuse_kept(computed, before)
        return tape

    def _check_kept(self, tape: Tape, before: Noted, first: Noted, caches: Sequence[Named], call: Any) -> list[Place]:
        """Where a recording between the two has left computed tensors. Another one of the same `call` says what the next call does with
        these and with `caches`: `tape` gets those that last. Raises CannotRewrite."""
        rebound = rebound_buffers(tape)
        caches = [*caches, *rebound]
        name, computed = before.changed(first, {n for n, _ in caches}), before.computed(first)
        if not (name or computed or caches):
            return computed
        own = [(held, key, held[key]) for _, (held, key, _) in rebound]
        try:
            for _, cache in rebound:
                put(cache)
            again = self._recorded(*call)
            tape.left = settled(caches, tape, again)
        finally:
            for cache in own:
                put(cache)
        left = [t for h, k in computed for t in kept_tensors(h.values[k])]
        reads = any(t.value is v for t in again.tensors for v in left)
        if (name or computed) and (first.changed(self._noted()) or reads or not alike(tape, again)):
            sets = name or computed[0][0].path(computed[0][1])
            raise CannotRewrite(f"its forward pass sets {sets}, which generated code would not do")
        return computed

    def _filled(self, known: Collection[str]) -> bool:
        """Whether a recording, which computes on the CPU, has filled caches that are buffers. They go where the weights are."""
        device = next((p.device for p in self.model.parameters()), None)
        filled = [name for name, _ in self.model.named_buffers() if name not in known]
        for place, _, name in (n.rpartition(".") for n in filled):
            buffers = self.model.get_submodule(place)._buffers
            buffers[name] = buffers[name].to(device)  # type: ignore[union-attr]
        return bool(filled)

    def _noted(self) -> Noted:
        return Noted.of(self.model.named_modules())

    def _recorded(self, args: Any, kwargs: Any, other_way: str = "", fewer: bool = False) -> Tape:
        forms = (self.forms[n] for n, _ in self.model.named_parameters())
        twins = {
            id(param): nn.Parameter(torch.empty(shape, dtype=dtypes[1], device="meta"), requires_grad=param.requires_grad)
            for param, (shape, dtypes) in zip(self.model.parameters(), forms, strict=True)
        }  # fmt: skip
        return record(self.model, self.plain, args, kwargs, twins=twins, other_way=other_way, fewer=fewer)

    def _own_samples(self, layout: PlannedTape, args: Any, kwargs: Any) -> Any:
        """This rank's part of the whole batch."""
        found = {n: d for n, d in enumerate(layout.samples) if d is not None and layout.tape.tensors[n].kind == "input"}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        refs = pytree.tree_leaves(layout.tape.arguments)
        cut = [
            own_part(x, found[r.number], layout.data_axes, self.axes) if isinstance(r, Ref) and r.number in found else x
            for x, r in zip(leaves, refs, strict=True)
        ]  # fmt: skip
        return pytree.tree_unflatten(cut, spec)

    def _title(self) -> str:
        sizes = "x".join(str(a.size) for a in self.axes)
        plan = self.plan
        return f"{plan['model']['name']} under the plan {plan['name']!r} on a mesh of {sizes}: one rank's program."


def own_part(x: torch.Tensor, dim: int, data_axes: Sequence[int], axes: Sequence[Axis]) -> torch.Tensor:
    """This rank's samples of the global batch."""
    for axis in data_axes:
        x = axes[axis].slice(x, dim)
    return x
