"""The schedule: the order in which one rank issues its collectives and waits for them, as the price of a step assumes it.

It is made from the priced messages of a plan, and compared with what a run recorded:

    forward    wait for a unit's weights; issue the gathers of the next unit's weights; run the unit
    backward   wait for a unit's weights; issue the gathers of the weights of the unit before; run the unit; then let the reductions
               on their way take a step, and issue those of the unit's own gradients

A unit is a call of a repeated block, or a part of the model between such calls. Its weights that take the same steps are in one
bucket. A collective for which an operator waits is issued and waited for at the place of that operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from planner_core.core import Block, Call, Cluster, Graph, Op, Plan, Workload
from planner_core.cost import WAIT, Message, cost_model, messages
from planner_core.runtime import Event


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
    """A part of the forward pass, with its buckets. A part between repeated blocks has the name `""`."""

    name: str
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
    units, axes = units_of(plan, graph), plan.mesh.axis_names
    events: list[Event] = []
    rank = _Rank(axes, events)
    for number in range(micro_batches):
        first = [[*(u.copies if number == 0 else []), *u.gathers] for u in units]
        rank.forward(units, first)
        rank.backward(units, [u.last if number == micro_batches - 1 else u.each for u in units])
    return events


class _Rank:
    """Collects the events of one rank."""

    def __init__(self, axes: Sequence[str], events: list[Event]) -> None:
        self.axes, self.events = axes, events
        self.flows: list[list[Stage]] = []

    def note(self, what: str, stage: Stage) -> None:
        kind, axis, num_bytes, packed = stage
        self.events.append(Event(what, kind, self.axes[axis], num_bytes, packed))

    def mark(self, what: str, unit: str) -> None:
        self.events.append(Event(what, unit, "", 0, 0))

    def issue(self, buckets: Iterable[Chain]) -> None:
        """Issue gathers. All stages except the last one are waited for at once, since each stage needs the result of the one before."""
        for chain in buckets:
            for stage in chain[:-1]:
                self.note("issue", stage)
                self.note("wait", stage)
            self.note("issue", chain[-1])

    def wait(self, buckets: Iterable[Chain]) -> None:
        for chain in buckets:
            self.note("wait", chain[-1])

    def values(self, found: Iterable[Message]) -> None:
        for m in found:
            for what in ("issue", "wait") * m.count:
                self.events.append(Scheduled(what, m.kind, self.axes[m.axis], m.num_bytes, 0, m.site))

    def forward(self, units: Sequence[Unit], gathers: Sequence[list[Chain]]) -> None:
        self.issue(gathers[0])
        for at, unit in enumerate(units):
            self.wait(gathers[at])
            if at + 1 < len(units):
                self.issue(gathers[at + 1])
            self.mark("run", unit.name)
            self.values(unit.forward)

    def backward(self, units: Sequence[Unit], reductions: Sequence[list[Chain]]) -> None:
        self.issue(units[-1].again)
        for at in reversed(range(len(units))):
            unit = units[at]
            self.wait(unit.again)
            if at:
                self.issue(units[at - 1].again)
            if at or any(u.trained for u in unit.uses):
                self.mark("return", unit.name)
            self.values(unit.backward)
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


# --- units ----------------------------------------------------------------------------------------------


def units_of(plan: Plan, graph: Graph) -> list[Unit]:
    """The units of a forward pass in order, with their messages in buckets."""
    return _Reader(plan, graph).units()


class _Reader:
    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        w = plan.workload
        workload = Workload(**{k: w[k] for k in Workload.__dataclass_fields__ if k in w})
        model = cost_model(_cluster_of(plan), plan.mesh, workload)
        self.labels = {p: label for label, bp in plan.blocks.items() for p in bp.prefixes}
        self.sites: dict[tuple[str, str], list[Message]] = defaultdict(list)
        self.once: dict[tuple[str, str], list[Message]] = defaultdict(list)
        for m in messages(plan.blocks, graph, model):
            (self.once if m.site == m.weight else self.sites)[m.label, m.site].append(self._of_one_copy(m, workload))

    def _of_one_copy(self, m: Message, workload: Workload) -> Message:
        copies = len(self.plan.blocks[m.label].prefixes) * (1 if m.site == m.weight else workload.accumulate)
        return replace(m, count=m.count // copies)

    def units(self) -> list[Unit]:
        found: list[Unit] = []
        open_unit: Unit | None = None
        for item in self.graph.top.items:
            if isinstance(item, Call):
                block = self.graph.blocks[item.block]
                unit, open_unit = Unit(item.prefix), None
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


# --- holding a run against it ----------------------------------------------------------------------------


@dataclass
class Window:
    """The events from the begin of one unit to the begin of the next."""

    name: str
    backward: bool
    traffic: list[str] = field(default_factory=list)
    values: list[tuple[str, str]] = field(default_factory=list)
    """The collectives for which operators wait: (operator, collective)."""


def difference(wanted: Sequence[Event], recorded: Sequence[Event], prefixes: Iterable[str]) -> str:
    """A sentence about the first difference between a run's order and the schedule; empty if there is none.

    Weight traffic must be issued and waited for at the scheduled place among the units. A collective for which an operator waits must
    be waited for at once, inside its unit. In forward these follow the order of the operators; several of one operator may have any
    order. In backward autograd chooses the order, so any order is right. If a unit begins backward twice, since two of its results
    have gradients, it counts once.
    """
    known = set(prefixes)
    ours, theirs = _windows(wanted, known), _windows(recorded, known)
    for want, found in zip(ours, theirs, strict=False):
        for a, b in (
            ([want.name], [found.name]),
            (want.traffic, found.traffic),
            (_texts(want, want), _texts(found, want)),
        ):
            if a != b:
                return f"{want.name}: scheduled {_shown(a)}; recorded {_shown(b)}"
    if len(ours) != len(theirs):
        return f"{len(ours)} units scheduled, {len(theirs)} recorded"
    return ""


def _shown(lines: Sequence[str]) -> str:
    return ", ".join(lines) or "nothing"


def _windows(events: Sequence[Event], known: set[str]) -> list[Window]:
    found = [Window("the start", False)]
    returned: set[str] = set()
    for at, e in enumerate(events):
        unit = e.kind if e.kind in known else "the rest"
        if e.what in ("run", "return"):
            if e.what == "return" and unit in returned:
                continue
            returned = {*returned, unit} if e.what == "return" else set()
            found.append(Window(f"{e.what} {unit}", e.what == "return"))
        elif e.packed:
            found[-1].traffic.append(f"{e.what} {e.kind} of {e.packed} on {e.axis}: {e.num_bytes}")
        elif e.what == "issue":
            waited = at + 1 < len(events) and (events[at + 1].what, events[at + 1].kind) == ("wait", e.kind)
            late = "" if waited else ", waited for late"
            found[-1].values.append((getattr(e, "site", ""), f"{e.kind} on {e.axis}: {e.num_bytes}{late}"))
    return found


def _texts(window: Window, like: Window) -> list[str]:
    """The collectives for which operators wait, in an order that can be compared; with the operators that `like` has."""
    texts = [text for _, text in window.values]
    if window.backward:
        return sorted(texts)
    sizes = [len(list(run)) for _, run in groupby(site for site, _ in like.values)]
    runs = [iter(texts[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    return [*(t for run in runs for t in sorted(run)), *texts[sum(sizes) :]]
