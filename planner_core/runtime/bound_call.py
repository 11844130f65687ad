"""A program that is ready to be called: it takes a call's arguments, and returns what the model returns."""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from planner_core.core import Placements, Replicate, Shard
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.engine import BoundProgram, Engine
from planner_core.runtime.program.names import EditableFunctions
from planner_core.runtime.program.operators.dropout import seed_generators
from planner_core.runtime.program.outputs import Delivery, guard_scalar, make_delivery, refuse_gradient_of
from planner_core.runtime.program.setup import torch_placements
from planner_core.runtime.record import Ref
from planner_core.runtime.record.tape import COMPUTED
from planner_core.runtime.write.placed_tape import PlannedTape
from planner_core.runtime.write.planned import PreparedProgram, local_samples


class BoundCall:
    """One program on this rank. `gathers`: the axes over which the callers' own parts are gathered first, where the plan shards the
    batch less than the callers do. `script`: the functions that run instead of the generated ones."""

    def __init__(
        self,
        made: PreparedProgram,
        engine: Engine,
        mesh: DeviceMesh,
        data_axes: Sequence[int],
        script: EditableFunctions | None = None,
    ) -> None:
        self.program, self.layout, self.whole, self.brought = made.program, made.layout, made.whole, made.brought
        self.made, self.engine, self.mesh = made, engine, mesh
        self.gathers = data_axes if made.brought else None
        self.bound = BoundProgram(self.program, engine, script)
        self._arguments()
        self._results()

    def _arguments(self) -> None:
        tape = self.layout.tape
        numbers = {n: i for i, n in enumerate(n for n, t in enumerate(tape.tensors) if t.kind == "input")}
        self.inputs = [0] * len(numbers)
        self.cuts: list[tuple[int, int]] = []
        self.given: dict[int, int] = {}  # the place of each input among the arguments
        for at, leaf in enumerate(pytree.tree_leaves(tape.arguments)):
            if isinstance(leaf, Ref):
                self.inputs[numbers[leaf.number]] = self.given[leaf.number] = at
                dim = self.layout.samples[leaf.number]
                if self.whole and dim is not None and self.layout.data_axes:
                    self.cuts.append((at, dim))

    def _results(self) -> None:
        """Decide how each tensor is returned. Beside a loss no collective is issued for a tensor that the caller may not read."""
        self.leaves, self.spec = pytree.tree_flatten(self.program.result)
        order = {n: i for i, n in enumerate(self.program.outputs)}
        self.places = [(i, order[leaf.number]) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Ref)]
        tensors = [self.layout.tape.tensors[n] for n in self.program.outputs]
        trained = self.layout.trained
        loss = trained in self.layout.delivered and self.layout.tape.tensors[trained].shape == ()
        self.ways: list[Delivery | None] = []
        self.unchanged: dict[int, int] = {}  # results that are arguments of the call
        for number, tensor in zip(self.program.outputs, tensors, strict=True):
            if number in self.given and self.gathers is None:
                self.unchanged[order[number]] = self.given[number]
            gathered = self.gathers is not None and self.layout.samples[number] is not None
            if not loss and (gathered or (self.gathers is not None and tensor.kind == COMPUTED)):
                raise PlanMismatch(
                    "this plan computes parts of the model on the whole batch, so a model without a loss must be given the whole batch on "
                    "every rank: call it with global_batch=True"
                )
            beside = gathered or (loss and tensor.kind == COMPUTED and bool(tensor.shape))
            way = self._planned(number, self._beside(number) if beside else self._delivery(number))
            self.ways.append(_guard_scalar_result(way) if tensor.shape == () else way)

    def _planned(self, number: int, way: Delivery | None) -> Delivery | None:
        """As `way`; but if the loss does not need the tensor, a gradient for it is refused, since none was planned."""
        tensor = self.layout.tape.tensors[number]
        if tensor.kind != COMPUTED or not tensor.grad or number in self.layout.reached:
            return way
        what = f"{self._named(number)}, of shape {tuple(tensor.shape)}"
        return lambda x: refuse_gradient_of(way(x) if way else x, what)

    def _placements(self, number: int) -> Placements:
        """Those of a result on this rank."""
        layout = self.layout
        if number in layout.delivered:
            return layout.delivered[number]
        dim = layout.samples[number]  # a constant, which ranks hold with their own samples
        split = () if dim is None or not self.whole else layout.data_axes
        return tuple(Shard(dim) if a in split and dim is not None else Replicate() for a in range(len(layout.sizes)))

    def _delivery(self, number: int) -> Delivery | None:
        layout = self.layout
        gradient = _gradient_placements(layout, number)
        return make_delivery(
            self._placements(number),
            gradient,
            layout.samples[number],
            layout.data_axes,
            self.engine.axes,
            whole=self.whole,
        )

    def _beside(self, number: int) -> Delivery | None:
        """A result beside a loss, without a collective: the caller's own samples if this rank has them whole, else a DTensor.

        A rank has the caller's samples if they are cut along the first of the caller's axes, and nothing else is cut. Along the other
        axes of the caller it has those of all its ranks. Example: callers hold parts along axes 0 and 1, and the result is (S(0), R) on
        them: a rank has the samples of its row, and cuts out its own. Of (R, S(0)) it has those of its column, among which its own are
        not, since batches are cut along axis 0 first.
        """
        placements, axes, dim = self._placements(number), self.engine.axes, self.layout.samples[number]
        callers = self.layout.data_axes if self.gathers is None and not self.whole else self.gathers or ()
        own = [a for a in callers if dim is not None]
        cut = [a for a, axis in enumerate(axes) if axis.size > 1 and not isinstance(placements[a], Replicate)]
        if cut != own[: len(cut)] or any(placements[a] != Shard(dim) for a in cut if dim is not None):
            return self._parts(number)
        if self.gathers is None and cut == own:
            return self._delivery(number)
        what, rest = self._named(number), own[len(cut) :]
        return lambda x: (
            local_samples(refuse_gradient_of(x, what), dim, rest, axes)
            if dim is not None
            else refuse_gradient_of(x, what)
        )

    def _parts(self, number: int) -> Delivery:
        placements, mesh = torch_placements(self._placements(number)), self.mesh
        what = f"{self._named(number)}, of which each rank has a part"
        return lambda x: DTensor.from_local(refuse_gradient_of(x, what), mesh, placements, run_check=False)

    def _named(self, number: int) -> str:
        return f"result {self.program.outputs.index(number) + 1} of the model"

    def __call__(self, leaves: list[Any]) -> Any:
        """The model's result for a call whose arguments, flat, are `leaves`."""
        given = {i: leaves[at] for i, at in self.unchanged.items()}
        for at, dim in self.cuts:
            leaves[at] = local_samples(leaves[at], dim, self.program.data_axes, self.engine.axes)
        engine = self.engine
        drawn = seed_generators(engine.seed_of(""), engine.device) if self.program.draws else contextlib.nullcontext()
        with drawn:  # all ranks draw alike
            found = self.bound.run([leaves[i] for i in self.inputs])
        made = dict(enumerate(x if way is None else way(x) for way, x in zip(self.ways, found, strict=True))) | given
        results = list(self.leaves)
        for at, number in self.places:
            results[at] = made[number]
        return pytree.tree_unflatten(results, self.spec)


def adopt_script(made: PreparedProgram, written: EditableFunctions | None, versions: str) -> EditableFunctions | None:
    """The exported script's functions, if they were written for such a training call. They are the program then, whatever would be
    written here: the model's code may make the same constants in another way on a GPU. Raises PlanMismatch for another model."""
    if written is None:
        return None
    if made.inputs != dict(written.inputs):
        warnings.warn(
            f"the script's blocks are for inputs of shapes {dict(written.inputs)}, and this call has {made.inputs}: blocks for it are made "
            "anew, and an edit of the script does not count in them",
            stacklevel=7,
        )
        return None
    made.check_sites(versions)
    return written


def _guard_scalar_result(way: Delivery | None) -> Delivery:
    return guard_scalar if way is None else lambda x: guard_scalar(way(x))


def _gradient_placements(layout: PlannedTape, number: int) -> Placements:
    """The placements in which the gradient of a delivered tensor must come back."""
    for call in layout.ops:
        if number in call.outputs:
            return layout.row(call).outputs[call.outputs.index(number)].dst.gradient
    return (Replicate(),) * len(layout.sizes)
