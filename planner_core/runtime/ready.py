"""A program that is ready to be called: it takes a call's arguments, and returns what the model returns."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from planner_core.runtime.plan_reader import Placements, PlanMismatch
from planner_core.runtime.program.engine import Bound, Engine
from planner_core.runtime.program.outputs import Deliver, collective, delivery, single, unplanned
from planner_core.runtime.record import Ref
from planner_core.runtime.record.tape import COMPUTED, Cache
from planner_core.runtime.write.planned import Prepared, own_part
from planner_core.runtime.write.planned_tape import PlannedTape


class Ready:
    """One program on this rank. `gathers`: the axes over which the callers' own parts are gathered first, where the plan shards the
    batch less than the callers do."""

    def __init__(self, made: Prepared, engine: Engine, mesh: DeviceMesh, data_axes: Sequence[int]) -> None:
        self.program, self.layout, self.whole, self.gathered = made.program, made.layout, made.whole, made.gathered
        self.made, self.engine, self.mesh = made, engine, mesh
        self.left: Sequence[Cache] = made.layout.tape.left
        self.gathers = data_axes if made.gathered else None
        self.bound = Bound(self.program, engine)
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
        """Decide how each tensor is returned. Beside a loss, a tensor that would have to be gathered is returned in parts."""
        self.leaves, self.spec = pytree.tree_flatten(self.program.result)
        order = {n: i for i, n in enumerate(self.program.outputs)}
        self.places = [(i, order[leaf.number]) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Ref)]
        tensors = [self.layout.tape.tensors[n] for n in self.program.outputs]
        trained = self.layout.trained
        loss = trained in self.layout.delivered and self.layout.tape.tensors[trained].shape == ()
        self.ways: list[Deliver | None] = []
        self.unchanged: dict[int, int] = {}  # results that are arguments of the call
        for number, tensor in zip(self.program.outputs, tensors, strict=True):
            if number in self.given and self.gathers is None:
                self.unchanged[order[number]] = self.given[number]
            way = self._delivery(number)
            if self.gathers is not None and self.layout.samples[number] is not None:
                way = self._own(number, loss)
            elif loss and tensor.kind == COMPUTED and tensor.shape and way is not None and collective(way):
                way = self._parts(number)
            way = self._planned(number, way)
            self.ways.append(_single(way) if tensor.shape == () else way)

    def _planned(self, number: int, way: Deliver | None) -> Deliver | None:
        """As `way`; but if the loss does not need the tensor, a gradient for it is refused, since none was planned."""
        tensor = self.layout.tape.tensors[number]
        if tensor.kind != COMPUTED or not tensor.grad or number in self.layout.reached:
            return way
        at = self.program.outputs.index(number)
        what = f"result {at + 1} of the model, of shape {tuple(tensor.shape)}"
        return lambda x: unplanned(way(x) if way else x, what)

    def _delivery(self, number: int) -> Deliver | None:
        layout = self.layout
        placements = layout.delivered.get(number)
        if placements is None:  # a constant, which ranks hold with their own samples
            dim = layout.samples[number]
            split = () if dim is None or not self.whole else layout.data_axes
            placements = tuple(
                Shard(dim) if a in split and dim is not None else Replicate() for a in range(len(layout.sizes))
            )
        gradient = _gradient(layout, number)
        return delivery(
            placements, gradient, layout.samples[number], layout.data_axes, self.engine.axes, whole=self.whole
        )

    def _parts(self, number: int) -> Deliver:
        placements, mesh = self.layout.delivered[number], self.mesh
        what = f"result {self.program.outputs.index(number) + 1} of the model, of which each rank has a part"
        return lambda x: DTensor.from_local(unplanned(x, what), mesh, placements, run_check=False)

    def _own(self, number: int, loss: bool) -> Deliver:
        """If the batch was gathered for the plan: the caller gets its own samples back, beside a loss."""
        if not loss:
            raise PlanMismatch(
                "this plan computes parts of the model on the whole batch, so a model without a loss must be given the whole batch on "
                "every rank: call it with global_batch=True"
            )
        whole, dim = self._delivery(number), self.layout.samples[number]
        assert dim is not None and self.gathers is not None
        axes, gathers = self.engine.axes, self.gathers
        return lambda x: own_part(whole(x.detach()) if whole else x.detach(), dim, gathers, axes)

    def __call__(self, leaves: list[Any]) -> Any:
        """The model's result for a call whose arguments, flat, are `leaves`."""
        given = {i: leaves[at] for i, at in self.unchanged.items()}
        for at, dim in self.cuts:
            leaves[at] = own_part(leaves[at], dim, self.program.data_axes, self.engine.axes)
        found = self.bound.run([leaves[i] for i in self.inputs])
        made = (
            dict(enumerate(way(x) if way is not None else x for way, x in zip(self.ways, found, strict=True))) | given
        )
        results = list(self.leaves)
        for at, number in self.places:
            results[at] = made[number]
        return pytree.tree_unflatten(results, self.spec)


def _single(way: Deliver | None) -> Deliver:
    return single if way is None else lambda x: single(way(x))


def _gradient(layout: PlannedTape, number: int) -> Placements:
    """The placements in which the gradient of a delivered tensor must come back."""
    for call in layout.ops:
        if number in call.outputs:
            return layout.row(call).outputs[call.outputs.index(number)].gradient
    return (Replicate(),) * len(layout.sizes)
