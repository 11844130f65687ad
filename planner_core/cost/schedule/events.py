"""The schedule: the order in which one rank issues its collectives and waits for them. A run's record is compared with it.

It is made from the priced messages of a plan:

    forward    wait for a unit's weights; issue the gathers of the next unit's weights; run the unit
    backward   wait for a unit's weights; issue the gathers of the weights of the unit before; run the unit; then let the reductions
               on their way take a step, and issue those of the unit's own gradients

A unit is a call of a repeated block, or a part of the model between such calls. Its weights that take the same steps are in one
bucket. A collective for which an operator waits is issued and waited for at the place of that operator.

Weights that are split over several axes are gathered axis by axis, and each gather needs the result of the one before. So a unit's
last gather is issued one unit ahead, the one before it two units ahead, and so on. Each has the time of a unit, and none is waited
for at once. Only the first units have no unit ahead of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
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
    blocks has the name `""`. `reads`: for each bucket of `gathers` the numbers of those of `copies` that bring what it gathers."""

    name: str
    label: str = ""
    ops: list[Op] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    forward: list[Message] = field(default_factory=list)
    backward: list[Message] = field(default_factory=list)
    copies: list[Chain] = field(default_factory=list)
    gathers: list[Chain] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    again: list[Chain] = field(default_factory=list)
    each: list[Chain] = field(default_factory=list)
    last: list[Chain] = field(default_factory=list)


@dataclass
class Coming:
    """A bucket of weights on its way: how many of its gathers were issued, and whether its end was waited for.

    `after`: the buckets whose weights it reads. `earlier`: the most gathers of a bucket that reads its own.
    """

    chain: Chain
    after: list[Coming] = field(default_factory=list)
    earlier: int = 0
    issued: int = 0
    arrived: bool = False


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
        self.forward(units, [_brought(u, copied=first) for u in units])
        self.backward(units, [u.last if last else u.each for u in units])

    def bring(self, coming: Sequence[Sequence[Coming]]) -> None:
        """Issue the gathers of the next units: all of the first, all but one of the second, and so on."""
        for left, buckets in enumerate(coming):
            for bucket in buckets:
                while bucket.issued < len(bucket.chain) - max(0, left - bucket.earlier):
                    if bucket.issued:
                        self.note("wait", bucket.chain[bucket.issued - 1])
                    self.arrive(bucket.after)
                    self.note("issue", bucket.chain[bucket.issued])
                    bucket.issued += 1

    def receive(self, coming: Sequence[Sequence[Coming]]) -> None:
        """Wait for the weights of the first of the next units, and issue the gathers of those after it."""
        self.bring(coming)
        self.arrive(coming[0])
        self.bring(coming[1:])

    def arrive(self, buckets: Iterable[Coming]) -> None:
        """Wait for buckets whose gathers are all issued."""
        for bucket in buckets:
            if not bucket.arrived:
                self.note("wait", bucket.chain[-1])
                bucket.arrived = True

    def forward(self, units: Sequence[Unit], coming: Sequence[list[Coming]]) -> None:
        """Run all units. The weights of each are gathered while the units before run."""
        reach = _reach(coming)
        for at, unit in enumerate(units):
            self.receive(coming[at : at + reach])
            self.mark("run", unit.name)
            self.run(unit, "forward")

    def backward(self, units: Sequence[Unit], reductions: Sequence[list[Chain]]) -> None:
        """Run all units in reverse order. The gradients of each are reduced while the next unit runs."""
        coming = [[Coming(chain) for chain in unit.again] for unit in reversed(units)]
        reach = _reach(coming)
        for at in reversed(range(len(units))):
            unit, begin = units[at], len(units) - 1 - at
            self.receive(coming[begin : begin + reach])
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


def _brought(unit: Unit, *, copied: bool) -> list[Coming]:
    """The buckets of a unit in forward; `copied`: with those that make its working copies."""
    if not copied:
        return [Coming(chain) for chain in unit.gathers]
    copies = [Coming(chain) for chain in unit.copies]
    gathers = [Coming(chain, [copies[i] for i in read]) for chain, read in zip(unit.gathers, unit.reads, strict=True)]
    for gather in gathers:
        for copy in gather.after:
            copy.earlier = max(copy.earlier, len(gather.chain))
    return [*copies, *gathers]


def _reach(coming: Iterable[list[Coming]]) -> int:
    """The number of units, the running one included, whose gathers are on their way at once."""
    return 1 + max((len(b.chain) + b.earlier for buckets in coming for b in buckets), default=0)


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
        def copied(use: Use) -> Chain:
            return self._once(use, "forward")

        def final(use: Use) -> Chain:
            return (*use.reduce, *(self._once(use, "backward") if homes[use.weight] is unit else ()))

        kept = _groups({u.weight: u for u in unit.uses}.values(), copied)
        gathered = _groups(unit.uses, _gather, lambda u: bool(u.again))
        unit.copies, unit.gathers = _bucketed(kept, copied), _bucketed(gathered, _gather)
        weights = [{u.weight for u in group} for group in kept]
        unit.reads = [[i for i, w in enumerate(weights) if w & {u.weight for u in group}] for group in gathered]
        unit.again = _bucketed(_groups(unit.uses, _again), _again)
        trained = [u for u in unit.uses if u.trained]
        unit.each = _bucketed(_groups(trained, _reduce), _reduce)
        held = [u for u in trained if homes[u.weight] is not unit and self._once(u, "backward")]
        ordered = [*held, *(u for u in trained if u not in held)]
        unit.last = _bucketed(_groups(ordered, final, lambda u: u in held), final)

    def _once(self, use: Use, phase: str) -> Chain:
        prefix, number = use.weight
        label = self.labels[prefix]
        block = self.graph.blocks[label.partition("#")[0]] if label else self.graph.top
        return _chain(m for m in self.once[label, block.values[number].name] if m.phase == phase)


def _cluster_of(plan: Plan) -> Cluster:
    """The plan's cluster. For a plan that was scaled down: one node with as many GPUs as its mesh has. Times do not matter here."""
    cluster, n = Cluster.from_json(dict(plan.cluster)), plan.mesh.num_devices
    return cluster if cluster.num_gpus == n else replace(cluster, levels=(replace(cluster.levels[0], size=n),))


_gather, _again, _reduce = attrgetter("gather"), attrgetter("again"), attrgetter("reduce")


def _gradient(m: Message) -> bool:
    return m.what.startswith("gradient")


def _chain(found: Iterable[Message]) -> Chain:
    return tuple(Stage(m.kind, m.axis, m.num_bytes) for m in found)


Chained = Callable[[Use], Chain]


def _groups(
    uses: Iterable[Use], chain_of: Chained, apart: Callable[[Use], bool] = lambda use: False
) -> list[list[Use]]:  # fmt: skip
    """The weights of each bucket: those that take the same steps, in order of their first use."""
    groups: dict[object, list[Use]] = {}
    for use in uses:
        chain = chain_of(use)
        if chain:
            groups.setdefault((apart(use), tuple(s[:2] for s in chain), use.dtype), []).append(use)
    return list(groups.values())


def _bucketed(groups: Iterable[list[Use]], chain_of: Chained) -> list[Chain]:
    """One chain for each bucket."""
    return [
        tuple(
            Stage(stage[0].kind, stage[0].axis, sum(s.num_bytes for s in stage), len(stage))
            for stage in zip(*map(chain_of, group), strict=True)
        )
        for group in groups
    ]
