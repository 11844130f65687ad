"""A program bound to this rank, as a call of the model: it takes the model's arguments, and returns what the model returns."""

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
    """One program on this rank.

    `gather_axes`: the axes over which the callers' own parts are gathered first, where the plan shards the batch less than the
    callers do. `script`: the functions that run in place of the generated ones.
    """

    def __init__(
        self,
        prepared: PreparedProgram,
        engine: Engine,
        mesh: DeviceMesh,
        data_axes: Sequence[int],
        script: EditableFunctions | None = None,
    ) -> None:
        self.program, self.layout = prepared.program, prepared.layout
        self.global_batch, self.gathered = prepared.global_batch, prepared.gathered
        self.engine, self.mesh = engine, mesh
        self.gather_axes = data_axes if prepared.gathered else None
        self.bound = BoundProgram(self.program, engine, script)
        self._locate_inputs()
        self._choose_deliveries()

    def _locate_inputs(self) -> None:
        tape = self.layout.tape
        numbers = {n: i for i, n in enumerate(n for n, t in enumerate(tape.tensors) if t.kind == "input")}
        self.inputs = [0] * len(numbers)
        self.cuts: list[tuple[int, int]] = []
        self.argument_of_input: dict[int, int] = {}
        """The position of each input among the arguments."""
        for position, leaf in enumerate(pytree.tree_leaves(tape.arguments)):
            if isinstance(leaf, Ref):
                self.inputs[numbers[leaf.number]] = self.argument_of_input[leaf.number] = position
                dim = self.layout.samples[leaf.number]
                if self.global_batch and dim is not None and self.layout.data_axes:
                    self.cuts.append((position, dim))

    def _choose_deliveries(self) -> None:
        """Choose how each tensor is returned. Next to a loss no collective is issued for a tensor that the caller may not read."""
        self.leaves, self.spec = pytree.tree_flatten(self.program.result)
        order = {n: i for i, n in enumerate(self.program.outputs)}
        self.result_leaves = [(i, order[leaf.number]) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Ref)]
        tensors = [self.layout.tape.tensors[n] for n in self.program.outputs]
        # A number that the plan delivers is the loss of a model that returns one. Without one the caller makes a loss of what is returned,
        # so all of it has to be whole in every dim but that of samples.
        trained = self.layout.loss
        loss = trained in self.layout.delivered_placements and self.layout.tape.tensors[trained].shape == ()
        self.deliveries: list[Delivery | None] = []
        self.unchanged_results: dict[int, int] = {}  # results that are arguments of the call
        for number, tensor in zip(self.program.outputs, tensors, strict=True):
            if number in self.argument_of_input and self.gather_axes is None:
                self.unchanged_results[order[number]] = self.argument_of_input[number]
            gather = self.gather_axes is not None and self.layout.samples[number] is not None
            if not loss and (gather or (self.gather_axes is not None and tensor.kind == COMPUTED)):
                raise PlanMismatch(
                    "this plan computes parts of the model on the whole batch, so a model without a loss must be given the whole batch on "
                    "every rank: call it with global_batch=True"
                )
            without_collective = gather or (loss and tensor.kind == COMPUTED and bool(tensor.shape))
            deliver = self._refuse_unplanned(
                number, self._deliver_with_loss(number) if without_collective else self._make_delivery(number)
            )
            self.deliveries.append(_guard_scalar_result(deliver) if tensor.shape == () else deliver)

    def _refuse_unplanned(self, number: int, deliver: Delivery | None) -> Delivery | None:
        """Return `deliver`; for a tensor that the loss does not need, one that refuses a gradient, since none was planned."""
        tensor = self.layout.tape.tensors[number]
        if tensor.kind != COMPUTED or not tensor.grad or number in self.layout.with_gradient:
            return deliver
        description = f"{self._describe_result(number)}, of shape {tuple(tensor.shape)}"
        return lambda x: refuse_gradient_of(deliver(x) if deliver else x, description)

    def _result_placements(self, number: int) -> Placements:
        """Return the placements of a result on this rank."""
        layout = self.layout
        if number in layout.delivered_placements:
            return layout.delivered_placements[number]
        dim = layout.samples[number]  # a constant, which ranks hold with their own samples
        sharded = () if dim is None or not self.global_batch else layout.data_axes
        return tuple(Shard(dim) if a in sharded and dim is not None else Replicate() for a in range(len(layout.sizes)))

    def _make_delivery(self, number: int) -> Delivery | None:
        layout = self.layout
        gradient = _gradient_placements(layout, number)
        return make_delivery(
            self._result_placements(number),
            gradient,
            layout.samples[number],
            layout.data_axes,
            self.engine.axes,
            global_batch=self.global_batch,
        )

    def _deliver_with_loss(self, number: int) -> Delivery | None:
        """Deliver a result next to a loss, without a collective: the caller's own samples if this rank has them whole,
        otherwise a DTensor.

        A rank has the caller's samples if they are cut along the first of the caller's axes, and nothing else is cut. Along the
        other axes of the caller it has those of all its ranks. Example: callers hold parts along axes 0 and 1, and the result
        is (S(0), R) on them: a rank has the samples of its row, and cuts out its own. Of (R, S(0)) it has those of its column,
        without its own, since batches are cut along axis 0 first.
        """
        placements, axes, dim = self._result_placements(number), self.engine.axes, self.layout.samples[number]
        caller_axes = (
            self.layout.data_axes if self.gather_axes is None and not self.global_batch else self.gather_axes or ()
        )
        axes_with_samples = [a for a in caller_axes if dim is not None]
        cut = [a for a, axis in enumerate(axes) if axis.size > 1 and not isinstance(placements[a], Replicate)]
        if cut != axes_with_samples[: len(cut)] or any(placements[a] != Shard(dim) for a in cut if dim is not None):
            return self._as_dtensor(number)
        if self.gather_axes is None and cut == axes_with_samples:
            return self._make_delivery(number)
        description, rest = self._describe_result(number), axes_with_samples[len(cut) :]
        return lambda x: (
            local_samples(refuse_gradient_of(x, description), dim, rest, axes)
            if dim is not None
            else refuse_gradient_of(x, description)
        )

    def _as_dtensor(self, number: int) -> Delivery:
        placements, mesh = torch_placements(self._result_placements(number)), self.mesh
        description = f"{self._describe_result(number)}, of which each rank has a part"
        return lambda x: DTensor.from_local(refuse_gradient_of(x, description), mesh, placements, run_check=False)

    def _describe_result(self, number: int) -> str:
        return f"result {self.program.outputs.index(number) + 1} of the model"

    def __call__(self, leaves: list[Any]) -> Any:
        """Return the model's result for a call with the flat arguments `leaves`."""
        unchanged = {i: leaves[position] for i, position in self.unchanged_results.items()}
        for position, dim in self.cuts:
            leaves[position] = local_samples(leaves[position], dim, self.program.data_axes, self.engine.axes)
        engine = self.engine
        generators = (
            seed_generators(engine.unit_seed(""), engine.device) if self.program.draws else contextlib.nullcontext()
        )
        with generators:  # all ranks draw alike
            outputs = self.bound.run([leaves[i] for i in self.inputs])
        pairs = enumerate(zip(self.deliveries, outputs, strict=True))
        values = {number: x if deliver is None else deliver(x) for number, (deliver, x) in pairs} | unchanged
        results = list(self.leaves)
        for position, number in self.result_leaves:
            results[position] = values[number]
        return pytree.tree_unflatten(results, self.spec)


def adopt_script(
    prepared: PreparedProgram, written: EditableFunctions | None, versions: str
) -> EditableFunctions | None:
    """Return the exported script's functions if they were written for such a training call; None otherwise.

    They are the program then, even if another one would be written here: on a GPU the model's code may make the same constants
    in another way. Raises PlanMismatch for another model.
    """
    if written is None:
        return None
    # Blocks name the sizes of heads and vocabulary, and their constants the number of tokens, so other shapes need other blocks.
    if prepared.inputs != dict(written.inputs):
        warnings.warn(
            f"the script's blocks are for inputs of shapes {dict(written.inputs)}, and this call has {prepared.inputs}: blocks for it are "
            "written anew, and an edit of the script does not count in them",
            stacklevel=7,
        )
        return None
    prepared.check_sites(versions)
    return written


def _guard_scalar_result(deliver: Delivery | None) -> Delivery:
    return guard_scalar if deliver is None else lambda x: guard_scalar(deliver(x))


def _gradient_placements(layout: PlannedTape, number: int) -> Placements:
    """Return the placements in which the gradient of a delivered tensor must come back."""
    for call in layout.ops:
        if number in call.outputs:
            return layout.row(call).outputs[call.outputs.index(number)].dst.gradient
    return (Replicate(),) * len(layout.sizes)
