"""The schedule: the order in which one rank issues its collectives and waits for them. A run's record is compared with it.

It is made from the priced messages of a plan:

    forward    wait for a unit's weights; issue the gathers of the next unit's weights; run the unit
    backward   wait for a unit's weights; issue the gathers of the weights of the unit before; run the unit; then, if it has gradients
               of its own, let the reductions on their way take a step, and issue those of its gradients

The weights of a unit that take the same steps are in one bucket (`units`). A collective for which an operator waits is issued and waited
for at the place of that operator.

Weights that are split over several axes are gathered axis by axis, and each gather needs the result of the one before. So a unit's
last gather is issued one unit ahead, the one before it two units ahead, and so on. Each has the time of a unit, and none is waited
for at once. Only the first units have no unit ahead of them.

What is issued at one place, between two passes through units, leaves together: the collectives of one kind over one axis are one launch
(`coalesced_launch` in `runtime.program.collectives.launches`). So a unit whose weights are sharded in different ways pays the latency of an
axis once.

Gradients that are summed in place once a step (an all_reduce of data parallelism) are waited for when backward is over: no memory becomes
free before. So what is left of a large message runs beside all units before. Gradients that come in several terms (of several
micro-batches, or of units that gather the weight each by itself) are packed anew, and waited for as others are.

Gradients that are summed once a step, of which a unit has at most `SMALL_BYTES`, travel together when backward is over. So the norms and
biases of a model whose matrices are scattered need one message, and not one for each unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from planner_core.core import DeviceMesh, Graph, Phase, Plan
from planner_core.cost.schedule.units import BucketStage, Chain, ScheduledUnit, join_chains, schedule_units


@dataclass(frozen=True)
class Event:
    """One event of a rank: `what` says whether it issued a collective or waited for one.

    `packed`: the number of weights, or gradients, that the collective carries; 0 for one tensor of the computation. `num_bytes`:
    bytes of the tensor that is whole along the axis. The events `run_unit` and `return` say that a unit, named by `kind`, begins its
    forward or its backward.
    """

    what: str
    kind: str
    axis: str
    num_bytes: int
    packed: int


@dataclass(frozen=True)
class Scheduled(Event):
    """An event of the schedule, and the operator to which it belongs."""

    site: str = ""


@dataclass
class PendingGather:
    """A bucket of weights on its way: how many of its gathers were issued, and whether its end was waited for.

    `reads`: the buckets whose weights it reads. `earlier`: the most gathers of a bucket that reads its own.
    """

    chain: Chain
    reads: list[PendingGather] = field(default_factory=list)
    earlier: int = 0
    issued: int = 0
    arrived: bool = False


def schedule_events(plan: Plan, graph: Graph, *, micro_batches: int = 1) -> list[Event]:
    """Return the events of one rank in one step of `micro_batches`, in order: what it issues, what it waits for, and where units begin.

    All micro-batches except the last run in `no_sync`, so gradients that are summed once a step are summed in the last one.
    """
    rank = _Recorder(plan.mesh)
    rank.step(schedule_units(plan, graph), micro_batches)
    return rank.events


def schedule_pass(
    units: Sequence[ScheduledUnit], mesh: DeviceMesh, *, forward: bool, first: bool, last: bool
) -> list[Event]:
    """Return the events of one pass of a micro-batch, the `first` or the `last` of a step, through the units of a stage."""
    rank = _Recorder(mesh)
    if forward:
        rank.one_forward(units, first)
    else:
        rank.one_backward(units, first, last)
    return rank.events


class Rank(ABC):
    """Does the work of one rank in order. A subclass records it, or measures its time."""

    def __init__(self) -> None:
        self.flows: list[list[BucketStage]] = []
        self.staying: list[BucketStage] = []

    @abstractmethod
    def record_collective(self, what: str, stage: BucketStage) -> None:
        """Issue a collective of weights, or wait for it."""

    @abstractmethod
    def begin_unit(self, what: str, unit: str) -> None:
        """A unit begins."""

    @abstractmethod
    def run_unit(self, unit: ScheduledUnit, phase: Phase) -> None:
        """Compute one pass through a unit, and wait for its collectives at their places."""

    @abstractmethod
    def launch_issued(self) -> None:
        """What was issued leaves, as one launch for each kind and axis."""

    def step(self, units: Sequence[ScheduledUnit], micro_batches: int) -> None:
        """One training step, without its optimizer."""
        for number in range(micro_batches):
            self.micro_batch(units, number == 0, number == micro_batches - 1)

    def micro_batch(self, units: Sequence[ScheduledUnit], first: bool, last: bool) -> None:
        """Forward and backward. Working copies are made in the first, gradients are summed in the last."""
        self.one_forward(units, first)
        self.one_backward(units, first, last)

    def one_forward(self, units: Sequence[ScheduledUnit], first: bool) -> None:
        """Forward of a micro-batch; `first`: of the first of a step."""
        self.forward(units, [_unit_gathers(u, copied=first) for u in units])

    def one_backward(self, units: Sequence[ScheduledUnit], first: bool, last: bool) -> None:
        """Backward of a micro-batch; `first` and `last`: of a step."""
        # With several micro-batches the terms are packed again, so no sum is in place.
        stay = [u.stays for u in units] if first and last else None
        self.backward(
            units, [u.last if last else u.each for u in units], _join_small_buckets(units) if last else (), stay
        )

    def issue_gathers(self, coming: Sequence[Sequence[PendingGather]]) -> None:
        """Issue the gathers of the next units: all of the first, all but one of the second, and so on."""
        for left, buckets in enumerate(coming):
            for bucket in buckets:
                # Over two axes: the second unit ahead has issued its first collective, the next unit both. A working copy that a gather
                # reads (`earlier`) is ahead by as many units more.
                while bucket.issued < len(bucket.chain) - max(0, left - bucket.earlier):
                    # Each collective reads what the one before wrote.
                    if bucket.issued:
                        self.record_collective("wait", bucket.chain[bucket.issued - 1])
                    self.wait_for(bucket.reads)
                    self.record_collective("issue", bucket.chain[bucket.issued])
                    bucket.issued += 1

    def receive_weights(self, coming: Sequence[Sequence[PendingGather]]) -> None:
        """Wait for the weights of the first of the next units, and issue the gathers of those after it."""
        # Before the wait every later unit stays one collective behind. After it each moves one on, which then runs beside this unit.
        self.issue_gathers(coming)
        self.wait_for(coming[0])
        self.issue_gathers(coming[1:])
        self.launch_issued()

    def wait_for(self, buckets: Iterable[PendingGather]) -> None:
        """Wait for buckets whose gathers are all issued."""
        for bucket in buckets:
            if not bucket.arrived:
                self.record_collective("wait", bucket.chain[-1])
                bucket.arrived = True

    def forward(self, units: Sequence[ScheduledUnit], coming: Sequence[list[PendingGather]]) -> None:
        """Run all units. The weights of each are gathered while the units before run."""
        reach = _count_units_in_flight(coming)
        for at, unit in enumerate(units):
            self.receive_weights(coming[at : at + reach])
            self.begin_unit("run", unit.name)
            self.run_unit(unit, "forward")

    def backward(
        self,
        units: Sequence[ScheduledUnit],
        reductions: Sequence[list[Chain]],
        at_the_end: Sequence[Chain] = (),
        stay: Sequence[list[bool]] | None = None,
    ) -> None:
        """Run all units through which a gradient goes, in reverse order. The gradients of each are reduced while the next unit runs, and
        some `at_the_end`. Those that `stay` on their way are waited for when backward is over."""
        # A head whose result the loss does not read runs no backward. With it in the order, the unit before it would gather too late.
        order = [at for at in reversed(range(len(units))) if units[at].returns]
        coming = [[PendingGather(chain) for chain in units[at].regathers] for at in order]
        reach = _count_units_in_flight(coming)
        for begin, at in enumerate(order):
            unit = units[at]
            self.receive_weights(coming[begin : begin + reach])
            self.begin_unit("return", unit.name)
            self.run_unit(unit, "backward")
            # A unit without gradients of its own lets the reductions on their way wait, as a run does.
            if unit.sends:
                self.advance_reductions(reductions[at], stay[at] if stay else ())
        if at_the_end:
            self.advance_reductions(at_the_end)
        while self.flows:
            self.advance_reductions()
        # Sums in place free no memory when they end. So what is left of a large one runs beside all units before, and is waited for here.
        for stage in self.staying:
            self.record_collective("wait", stage)
        self.staying = []

    def advance_reductions(self, new: Sequence[Chain] = (), stay: Sequence[bool] = ()) -> None:
        """Wait for every reduction on its way, except those that `stay`, and issue its next stage; then issue new reductions."""
        for flow in self.flows:
            self.record_collective("wait", flow.pop(0))
            if flow:
                self.record_collective("issue", flow[0])
        self.flows = [flow for flow in self.flows if flow]
        for number, chain in enumerate(new):
            self.record_collective("issue", chain[0])
            if stay and stay[number]:
                self.staying.append(chain[0])
            else:
                self.flows.append(list(chain))
        self.launch_issued()


def _unit_gathers(unit: ScheduledUnit, *, copied: bool) -> list[PendingGather]:
    """Return the buckets of a unit in forward; `copied`: with those that make its working copies."""
    if not copied:
        return [PendingGather(chain) for chain in unit.gathers]
    copies = [PendingGather(chain) for chain in unit.copies]
    gathers = [
        PendingGather(chain, [copies[i] for i in read]) for chain, read in zip(unit.gathers, unit.reads, strict=True)
    ]
    for gather in gathers:
        for copy in gather.reads:
            # The copy must be whole before the gather that reads it begins, so it is ahead by that gather's collectives more.
            copy.earlier = max(copy.earlier, len(gather.chain))
    return [*copies, *gathers]


def _join_small_buckets(units: Sequence[ScheduledUnit]) -> list[Chain]:
    """Return the small buckets of all units that take the same steps, as one, in the order of backward."""
    groups: dict[object, list[Chain]] = {}
    for unit in reversed(units):
        for dtype, chain in unit.small:
            groups.setdefault((dtype, tuple(s[:2] for s in chain)), []).append(chain)
    return [join_chains(chains) for chains in groups.values()]


def _count_units_in_flight(coming: Iterable[list[PendingGather]]) -> int:
    """Return the number of units, the running one included, whose gathers are on their way at once."""
    return 1 + max((len(b.chain) + b.earlier for buckets in coming for b in buckets), default=0)


class _Recorder(Rank):
    """Collects the events."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.events: list[Event] = []

    def record_collective(self, what: str, stage: BucketStage) -> None:
        axis = self.mesh.name_of(stage.axes)
        self.events.append(Event(what, stage.kind, axis, stage.num_bytes, stage.packed))

    def launch_issued(self) -> None:
        """What was issued is recorded one by one."""

    def begin_unit(self, what: str, unit: str) -> None:
        self.events.append(Event(what, unit, "", 0, 0))

    def run_unit(self, unit: ScheduledUnit, phase: Phase) -> None:
        behind = 0  # chunks of a product on their way, which are waited for behind its last one
        for m in unit.forward if phase == "forward" else unit.backward:
            early = m.count if m.in_chunks else 0
            order = ("issue",) * early or ("issue", "wait") * m.count + ("wait",) * behind
            behind = early
            for what in order:
                self.events.append(Scheduled(what, m.kind, self.mesh.name_of(m.axes), m.num_bytes, 0, m.site))
