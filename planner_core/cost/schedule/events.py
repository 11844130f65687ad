"""The schedule: the order in which one rank issues its collectives and waits for them. A run's record is compared with it.

It is made from the priced messages of a plan:

    forward    wait for a unit's weights; issue the gathers of the next unit's weights; run the unit
    backward   wait for a unit's weights; issue the gathers of the weights of the unit before; run the unit; then let the reductions
               on their way take a step, and issue those of the unit's own gradients

A unit is a call of a repeated block, or a part of the model between such calls. Its weights that take the same steps are in one
bucket. A collective for which an operator waits is issued and waited for at the place of that operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from planner_core.core import Block, Call, Cluster, Graph, Op, Plan, Workload
from planner_core.cost.model import cost_model_of
from planner_core.cost.step_messages import WAIT, Message, messages


@dataclass(frozen=True)
class Event:
    """One event of a rank: `what` says whether it issued a collective or waited for one.

    `packed`: the number of weights, or gradients, that the collective carries; 0 for one tensor of the computation. `num_bytes`:
    bytes of the tensor that is whole along the axis. The events `run` and `return` say that a unit, named by `kind`, begins its
    forward or its backward.
    """

    what: str
    kind: str
    axis: str
    num_bytes: int
    packed: int


class Stage(NamedTuple):
    """One collective of a bucket of `packed` weights."""

    kind: str
    axis: int
    num_bytes: int
    packed: int = 1


@dataclass(frozen=True)
class Scheduled(Event):
    """An event of the schedule, and the operator to which it belongs."""

    site: str = ""


Chain = tuple[Stage, ...]
"""The collectives of one weight, or of one bucket, one after the other."""
Identity = tuple[str, int]
"""A weight of the model: the prefix of the block that holds it, and its number there."""


@dataclass
class Use:
    """One weight in one unit: how it is gathered, gathered again for backward, and what its gradient does in each micro-batch."""

    weight: Identity
    dtype: str
    trained: bool
    gather: Chain = ()
    again: Chain = ()
    reduce: Chain = ()


@dataclass
class Unit:
    """A part of the forward pass, with its operators and its buckets; `label` is that of its block in the plan. A part between repeated
    blocks has the name `""`."""

    name: str
    label: str = ""
    ops: list[Op] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    forward: list[Message] = field(default_factory=list)
    backward: list[Message] = field(default_factory=list)
    copies: list[Chain] = field(default_factory=list)
    gathers: list[Chain] = field(default_factory=list)
    again: list[Chain] = field(default_factory=list)
    each: list[Chain] = field(default_factory=list)
    last: list[Chain] = field(default_factory=list)


def scheduled(plan: Plan, graph: Graph, *, micro_batches: int = 1) -> list[Event]:
    """The events of one rank in one step of `micro_batches`, in order: what it issues, what it waits for, and where units begin.

    All micro-batches except the last run in `no_sync`, so gradients that are summed once a step are summed in the last one.
    """
    rank = _Recorder(plan.mesh.axis_names)
    rank.step(units_of(plan, graph), micro_batches)
    return rank.events


class Rank(ABC):
    """Does the work of one rank in order. A subclass records it, or measures its time."""

    def __init__(self) -> None:
        self.flows: list[list[Stage]] = []

    @abstractmethod
    def note(self, what: str, stage: Stage) -> None:
        """Issue a collective of weights, or wait for it."""

    @abstractmethod
    def mark(self, what: str, unit: str) -> None:
        """A unit begins."""

    @abstractmethod
    def run(self, unit: Unit, phase: str) -> None:
        """Compute one pass through a unit, and wait for its collectives at their places."""

    def step(self, units: Sequence[Unit], micro_batches: int) -> None:
        """One training step, without its optimizer."""
        for number in range(micro_batches):
            self.micro_batch(units, number == 0, number == micro_batches - 1)

    def micro_batch(self, units: Sequence[Unit], first: bool, last: bool) -> None:
        """Forward and backward. Working copies are made in the first, gradients are summed in the last."""
        self.forward(units, [[*(u.copies if first else []), *u.gathers] for u in units])
        self.backward(units, [u.last if last else u.each for u in units])

    def issue(self, buckets: Iterable[Chain]) -> None:
        """Issue gathers. All stages except the last one are waited for at once, since each stage needs the result of the one before."""
        for chain in buckets:
            for stage in chain[:-1]:
                self.note("issue", stage)
                self.note("wait", stage)
            self.note("issue", chain[-1])

    def wait(self, buckets: Iterable[Chain]) -> None:
        """Wait for the gathers that were issued."""
        for chain in buckets:
            self.note("wait", chain[-1])

    def forward(self, units: Sequence[Unit], gathers: Sequence[list[Chain]]) -> None:
        """Run all units. The weights of each are gathered while the unit before runs."""
        self.issue(gathers[0])
        for at, unit in enumerate(units):
            self.wait(gathers[at])
            if at + 1 < len(units):
                self.issue(gathers[at + 1])
            self.mark("run", unit.name)
            self.run(unit, "forward")

    def backward(self, units: Sequence[Unit], reductions: Sequence[list[Chain]]) -> None:
        """Run all units in reverse order. The gradients of each are reduced while the next unit runs."""
        self.issue(units[-1].again)
        for at in reversed(range(len(units))):
            unit = units[at]
            self.wait(unit.again)
            if at:
                self.issue(units[at - 1].again)
            if at or any(u.trained for u in unit.uses):
                self.mark("return", unit.name)
            self.run(unit, "backward")
            self.send_on()
            for chain in reductions[at]:
                self.note("issue", chain[0])
                self.flows.append(list(chain))
        while self.flows:
            self.send_on()

    def send_on(self) -> None:
        """Wait for every reduction on its way, and issue its next stage."""
        for flow in self.flows:
            self.note("wait", flow.pop(0))
            if flow:
                self.note("issue", flow[0])
        self.flows = [flow for flow in self.flows if flow]


class _Recorder(Rank):
    """Collects the events."""

    def __init__(self, axes: Sequence[str]) -> None:
        super().__init__()
        self.axes = axes
        self.events: list[Event] = []

    def note(self, what: str, stage: Stage) -> None:
        kind, axis, num_bytes, packed = stage
        self.events.append(Event(what, kind, self.axes[axis], num_bytes, packed))

    def mark(self, what: str, unit: str) -> None:
        self.events.append(Event(what, unit, "", 0, 0))

    def run(self, unit: Unit, phase: str) -> None:
        for m in unit.forward if phase == "forward" else unit.backward:
            for what in ("issue", "wait") * m.count:
                self.events.append(Scheduled(what, m.kind, self.axes[m.axis], m.num_bytes, 0, m.site))


# --- units ----------------------------------------------------------------------------------------------


def units_of(plan: Plan, graph: Graph) -> list[Unit]:
    """The units of a forward pass in order, with their messages in buckets."""
    return _Reader(plan, graph).units()


class _Reader:
    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        model = cost_model_of(plan, _cluster_of(plan))
        self.labels = {p: label for label, bp in plan.blocks.items() for p in bp.prefixes}
        self.sites: dict[tuple[str, str], list[Message]] = defaultdict(list)
        self.once: dict[tuple[str, str], list[Message]] = defaultdict(list)
        for m in messages(plan.blocks, graph, model):
            (self.once if m.site == m.weight else self.sites)[m.label, m.site].append(
                self._of_one_copy(m, model.workload)
            )

    def _of_one_copy(self, m: Message, workload: Workload) -> Message:
        copies = len(self.plan.blocks[m.label].prefixes) * (1 if m.site == m.weight else workload.accumulate)
        return replace(m, count=m.count // copies)

    def units(self) -> list[Unit]:
        found: list[Unit] = []
        open_unit: Unit | None = None
        for item in self.graph.top.items:
            if isinstance(item, Call):
                block = self.graph.blocks[item.block]
                unit, open_unit = Unit(item.prefix, self.labels[item.prefix]), None
                outer = dict(zip(block.inputs, item.inputs, strict=True))
                for op in block.ops:
                    self._op(unit, block, op, item.prefix, outer)
                found.append(unit)
            else:
                if open_unit is None:
                    open_unit = Unit("")
                    found.append(open_unit)
                self._op(open_unit, self.graph.top, item, "", {})
        homes: dict[Identity, Unit] = {}
        for unit in found:
            for use in unit.uses:
                homes.setdefault(use.weight, unit)
        for unit in found:
            self._buckets(unit, homes)
        return found

    def _op(self, unit: Unit, block: Block, op: Op, prefix: str, outer: dict[int, int]) -> None:
        unit.ops.append(op)
        sent = self.sites[self.labels[prefix], op.name]
        for m in sent:
            if m.category == WAIT:
                (unit.forward if m.phase == "forward" else unit.backward).append(m)
        for number in dict.fromkeys(op.inputs):
            value = block.values[number]
            if value.kind != "parameter":
                continue
            mine = [m for m in sent if m.category != WAIT and m.weight == value.name]
            back = [m for m in mine if m.phase == "backward"]
            unit.uses.append(
                Use(
                    ("", outer[number]) if number in outer else (prefix, number), value.meta.dtype, value.grad,
                    _chain(m for m in mine if m.phase == "forward"), _chain(m for m in back if not _gradient(m)),
                    _chain(m for m in back if _gradient(m)),
                )
            )  # fmt: skip

    def _buckets(self, unit: Unit, homes: dict[Identity, Unit]) -> None:
        kept = list({u.weight: u for u in unit.uses}.values())
        unit.copies = _bucketed(kept, lambda u: self._once(u, "forward"))
        unit.gathers = _bucketed(unit.uses, lambda u: u.gather, lambda u: bool(u.again))
        unit.again = _bucketed(unit.uses, lambda u: u.again)
        trained = [u for u in unit.uses if u.trained]
        unit.each = _bucketed(trained, lambda u: u.reduce)

        def final(use: Use) -> Chain:
            return self._once(use, "backward") if homes[use.weight] is unit else ()

        held = [u for u in trained if homes[u.weight] is not unit and self._once(u, "backward")]
        ordered = [*held, *(u for u in trained if u not in held)]
        unit.last = _bucketed(ordered, lambda u: (*u.reduce, *final(u)), lambda u: u in held)

    def _once(self, use: Use, phase: str) -> Chain:
        prefix, number = use.weight
        label = self.labels[prefix]
        block = self.graph.blocks[label.partition("#")[0]] if label else self.graph.top
        return _chain(m for m in self.once[label, block.values[number].name] if m.phase == phase)


def _cluster_of(plan: Plan) -> Cluster:
    """The plan's cluster. For a plan that was scaled down: one node with as many GPUs as its mesh has. Times do not matter here."""
    cluster, n = Cluster.from_json(dict(plan.cluster)), plan.mesh.num_devices
    return cluster if cluster.num_gpus == n else replace(cluster, levels=(replace(cluster.levels[0], size=n),))


def _gradient(m: Message) -> bool:
    return m.what.startswith("gradient")


def _chain(found: Iterable[Message]) -> Chain:
    return tuple(Stage(m.kind, m.axis, m.num_bytes) for m in found)


def _bucketed(
    uses: Iterable[Use], chain_of: Callable[[Use], Chain], apart: Callable[[Use], bool] = lambda use: False
) -> list[Chain]:  # fmt: skip
    """One chain for all weights that take the same steps, in order of their first use."""
    groups: dict[object, list[Chain]] = {}
    for use in uses:
        chain = chain_of(use)
        if chain:
            groups.setdefault((apart(use), tuple(s[:2] for s in chain), use.dtype), []).append(chain)
    return [
        tuple(
            Stage(stage[0].kind, stage[0].axis, sum(s.num_bytes for s in stage), len(stage))
            for stage in zip(*chains, strict=True)
        )
        for chains in groups.values()
    ]
