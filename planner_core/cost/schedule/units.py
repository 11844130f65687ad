"""The units of a forward pass, and the buckets in which each one's weights and gradients travel.

A unit is a call of a repeated block, or a part of the model between such calls. Its weights that take the same steps are in one
bucket. `events` says in what order a rank issues them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from planner_core.core import Block, Call, Cluster, CollectiveKind, Graph, Op, Phase, Plan, root
from planner_core.cost.model import SMALL_BYTES, cost_model_of
from planner_core.cost.resolved_ops import block_of
from planner_core.cost.step_messages import ONCE, WAIT, Message, plan_messages
from planner_core.cost.units import split_into_units

Identity = tuple[str, int]
"""A weight of the model: the prefix of the block that holds it, and its number there."""


class Moved(Enum):
    """What a collective moves of its weights."""

    WEIGHTS = "weights"
    COPIES = "working copies"
    GRADIENTS = "gradients"


class BucketStage(NamedTuple):
    """One collective of a bucket of `weights`, of which one that is used twice stands there twice."""

    kind: CollectiveKind
    axes: tuple[int, ...]
    num_bytes: int
    weights: tuple[Identity, ...] = ()
    moved: Moved = Moved.WEIGHTS

    @property
    def packed(self) -> int:
        """The number of weights, or gradients, that it carries."""
        return len(self.weights)


Chain = tuple[BucketStage, ...]
"""The collectives of one weight, or of one bucket, one after the other."""


@dataclass(eq=False)
class ScheduledUse:
    """One weight in one unit: how it is gathered, gathered again for backward, and what its gradient does in each micro-batch. `dtype`
    is that in which it computes, `gradient_dtype` that in which its gradient is summed."""

    weight: Identity
    dtype: str
    gradient_dtype: str
    trained: bool
    gather: Chain = ()
    regather: Chain = ()
    reduce: Chain = ()


@dataclass
class ScheduledUnit:
    """A part of the forward pass, with its operators and its buckets; `label` is that of its block in the plan. A part between repeated
    blocks has the name `""`. `reads`: for each bucket of `gathers` the numbers of those of `copies` that bring what it gathers.
    `stays`: for each bucket of `last` whether its gradients are summed in place, if a step has one micro-batch. `small`: the buckets,
    and their dtypes, that travel together with those of other units. `sends`: whether gradients end in the unit. `returns`: whether the
    loss sends a gradient through it, so that it runs backward."""

    name: str
    label: str = ""
    ops: list[Op] = field(default_factory=list)
    uses: list[ScheduledUse] = field(default_factory=list)
    forward: list[Message] = field(default_factory=list)
    backward: list[Message] = field(default_factory=list)
    copies: list[Chain] = field(default_factory=list)
    gathers: list[Chain] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    regathers: list[Chain] = field(default_factory=list)
    each: list[Chain] = field(default_factory=list)
    last: list[Chain] = field(default_factory=list)
    stays: list[bool] = field(default_factory=list)
    small: list[tuple[str, Chain]] = field(default_factory=list)
    sends: bool = True
    returns: bool = True


def schedule_units(plan: Plan, graph: Graph) -> list[ScheduledUnit]:
    """Return the units of a forward pass in order, with their messages in buckets."""
    return _UnitBuilder(plan, graph).build()


class _UnitBuilder:
    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        model = cost_model_of(plan, _cluster_of(plan))
        self.workload = model.workload
        self.labels = {p: label for label, bp in plan.blocks.items() for p in bp.prefixes}
        self.sites: dict[tuple[str, str], list[Message]] = defaultdict(list)
        self.once: dict[tuple[str, str], list[Message]] = defaultdict(list)
        for m in plan_messages(plan.blocks, graph, model):
            (self.once if m.category == ONCE else self.sites)[m.label, m.site].append(self._of_one_copy(m))

    def _of_one_copy(self, m: Message) -> Message:
        # Messages are counted for all copies and micro-batches; an event is of one copy in one pass.
        copies = len(self.plan.blocks[m.label].prefixes) * (1 if m.category == ONCE else self.workload.accumulate)
        return replace(m, count=m.count // copies)

    def build(self) -> list[ScheduledUnit]:
        units: list[ScheduledUnit] = []
        top, blocks = self.graph.top, self.graph.blocks
        parts = split_into_units(top)
        passed_on = _passed_on(top, parts)
        stay = {name: _StayingWeights.in_unit(block, block.ops, set(block.outputs)) for name, block in blocks.items()}
        for part in parts:
            # A call is a unit by itself (`split_into_units`), so the first item says which of the two a part is.
            first = part[0]
            if isinstance(first, Call):
                block, prefix, stays = blocks[first.block], first.prefix, stay[first.block]
                ops, outer = block.ops, dict(zip(block.inputs, first.inputs, strict=True))
            else:
                ops = tuple(op for op in part if isinstance(op, Op))
                block, prefix, outer, stays = top, "", {}, _StayingWeights.in_unit(top, ops, passed_on)
            # `_add_op` finds out whether it returns: a unit of frozen operators alone gets no gradient.
            unit = ScheduledUnit(prefix, self.labels[prefix] if prefix else "", returns=False)
            for op in ops:
                self._add_op(unit, block, op, prefix, outer, stays)
            units.append(unit)
        # The first unit that uses a weight is its home: it needs the working copy first, and runs backward last, when all terms are there.
        homes: dict[Identity, ScheduledUnit] = {}
        for unit in units:
            for use in unit.uses:
                homes.setdefault(use.weight, unit)
        used = Counter(weight for unit in units for weight in {u.weight for u in unit.uses})
        # A weight that several units gather has a gradient in several terms, which are packed again before they are reduced.
        parted = {u.weight for unit in units for u in unit.uses if u.gather and used[u.weight] > 1}
        for unit in units:
            self._fill_buckets(unit, homes, parted)
        return units

    def _add_op(
        self, unit: ScheduledUnit, block: Block, op: Op, prefix: str, outer: dict[int, int], stays: _StayingWeights
    ) -> None:
        unit.ops.append(op)
        unit.returns |= block.has_backward(op)
        sent = self.sites[self.labels[prefix], op.name]
        # A weight that is gathered at its operator is waited for there, as any operand that is redistributed.
        if inside := {block.values[v].name for v in op.inputs if stays.is_gathered_at(block, op, v)}:
            sent = [replace(m, category=WAIT) if m.weight in inside else m for m in sent]
        for m in sent:
            if m.category == WAIT:
                (unit.forward if m.phase == "forward" else unit.backward).append(m)
        for number in dict.fromkeys(op.inputs):
            value = block.values[number]
            if value.kind != "parameter":
                continue
            weight = ("", outer[number]) if number in outer else (prefix, number)
            weight_messages = [m for m in sent if m.category != WAIT and m.weight == value.name]
            backward = [m for m in weight_messages if m.phase == "backward"]
            unit.uses.append(
                ScheduledUse(
                    weight,
                    value.meta.dtype,
                    self.workload.summed_in(value.meta.dtype),
                    value.grad,
                    _make_chain(weight, (m for m in weight_messages if m.phase == "forward")),
                    _make_chain(weight, (m for m in backward if not m.gradient)),
                    _make_chain(weight, (m for m in backward if m.gradient)),
                )
            )

    def _fill_buckets(self, unit: ScheduledUnit, homes: dict[Identity, ScheduledUnit], parted: set[Identity]) -> None:
        """Make the buckets of a unit. The gradients of `parted` weights, which several units gather, come in several terms."""

        def working_copy_chain(use: ScheduledUse) -> Chain:
            """Return the steps of its working copy, which is fresh where an earlier unit used it."""
            return self._chain_once(use, "forward") if homes[use.weight] is unit else ()

        # Reversed, so that the first use of a weight stays. A run sums the terms of all uses first, so only that use has the reduction.
        first = {u.weight: u for u in reversed(unit.uses)}

        def sums_all_uses(use: ScheduledUse) -> bool:
            """Return whether the terms of all uses of the weight are summed with those of this one."""
            return homes[use.weight] is unit and first[use.weight] is use

        def last_chain(use: ScheduledUse) -> Chain:
            return (*use.reduce, *(self._chain_once(use, "backward") if sums_all_uses(use) else ()))

        # A weight that several operators read is one working copy, so it counts once.
        copies = _group_uses({u.weight: u for u in unit.uses}.values(), working_copy_chain)
        # Weights that backward gathers once more are not packed with those that stay: each bucket comes back as a whole.
        gathered = _group_uses(unit.uses, _gather, lambda u: bool(u.regather))
        unit.copies, unit.gathers = _make_chains(copies, working_copy_chain), _make_chains(gathered, _gather)
        weights = [{u.weight for u in group} for group in copies]
        unit.reads = [[i for i, w in enumerate(weights) if w & {u.weight for u in group}] for group in gathered]
        unit.regathers = _make_chains(_group_uses(unit.uses, _regather), _regather)
        trained = [u for u in unit.uses if u.trained]
        unit.sends = any(u.gather or u.reduce or homes[u.weight] is unit for u in trained)
        # Terms that wait for another unit's are a bucket of their own, in every micro-batch as in the last.
        waiting = [u for u in trained if not sums_all_uses(u) and self._chain_once(u, "backward")]
        ordered = [*waiting, *(u for u in trained if u not in waiting)]
        # What is reduced in each micro-batch does not travel with what is reduced once a step.
        groups = _group_uses(ordered, last_chain, lambda u: (u in waiting, len(u.reduce)), _gradient_dtype)
        unit.each = _make_chains((g for g in groups if g[0].reduce), _reduce)
        small = [
            g for g in groups if not g[0].reduce and g[0] not in waiting and _group_bytes(g, last_chain) <= SMALL_BYTES
        ]
        large = [g for g in groups if g not in small]
        unit.last = _make_chains(large, last_chain)
        # Only an all_reduce sums in place, so that nothing becomes free when it ends. Terms of several micro-batches or gathers are packed
        # again, and their copy is freed.
        unit.stays = [
            [s.kind for s in last_chain(g[0])] == ["all_reduce"] and not any(u.reduce or u.weight in parted for u in g)
            for g in large
        ]
        unit.small = [(g[0].gradient_dtype, join_chains(map(last_chain, g))) for g in small]

    def _chain_once(self, use: ScheduledUse, phase: Phase) -> Chain:
        prefix, number = use.weight
        label = self.labels[prefix]
        sent = (m for m in self.once[label, block_of(self.graph, label).values[number].name] if m.phase == phase)
        return _make_chain(use.weight, sent)


@dataclass(frozen=True)
class _StayingWeights:
    """The weights that a unit gathers at their operators, not ahead, since another unit holds what was gathered: those of which the unit
    passes a view on. `roots`: the tensors that own such memory."""

    roots: frozenset[int]

    @staticmethod
    def in_unit(block: Block, ops: Sequence[Op], passed_on: set[int]) -> _StayingWeights:
        """Return those of the unit that does `ops`. `passed_on`: what others use of a block's values."""
        results = {v for op in ops for v in op.outputs}
        return _StayingWeights(frozenset(root(block, v) for v in results & passed_on))

    def is_gathered_at(self, block: Block, op: Op, value: int) -> bool:
        """Return whether an operator gathers a weight that stays."""
        weight = block.values[value]
        if weight.kind != "parameter" or root(block, value) not in self.roots:
            return False
        return any(root(block, o) == root(block, value) for o in op.outputs)


def _passed_on(top: Block, parts: Sequence[Sequence[Op | Call]]) -> set[int]:
    """Return the values that one unit makes, and another one or the caller takes."""
    home = {v: k for k, part in enumerate(parts) for item in part for v in item.outputs}
    return {v for k, part in enumerate(parts) for item in part for v in item.inputs if home.get(v) != k} | set(
        top.outputs
    )


def _cluster_of(plan: Plan) -> Cluster:
    """Return the plan's cluster. For a plan that was scaled down: one node with as many GPUs as its mesh has. Times do not matter here."""
    cluster, n = plan.cluster, plan.mesh.num_devices
    return cluster if cluster.num_gpus == n else cluster.with_sizes(n)


_gather, _regather, _reduce = attrgetter("gather"), attrgetter("regather"), attrgetter("reduce")
_dtype, _gradient_dtype = attrgetter("dtype"), attrgetter("gradient_dtype")


def _make_chain(weight: Identity, sent: Iterable[Message]) -> Chain:
    return tuple(BucketStage(m.kind, m.axes, m.num_bytes, (weight,), _moved_by(m)) for m in sent)


def _moved_by(m: Message) -> Moved:
    if m.gradient:
        return Moved.GRADIENTS
    return Moved.COPIES if m.category == ONCE else Moved.WEIGHTS


Chained = Callable[[ScheduledUse], Chain]


def _group_uses(
    uses: Iterable[ScheduledUse],
    chain_of: Chained,
    split_by: Callable[[ScheduledUse], Hashable] = lambda use: None,
    dtype_of: Callable[[ScheduledUse], str] = _dtype,
) -> list[list[ScheduledUse]]:
    """Return the weights of each bucket: those that take the same steps in one dtype, in order of their first use."""
    groups: dict[object, list[ScheduledUse]] = {}
    for use in uses:
        chain = chain_of(use)
        if chain:
            groups.setdefault((split_by(use), tuple(s[:2] for s in chain), dtype_of(use)), []).append(use)
    return list(groups.values())


def _make_chains(groups: Iterable[list[ScheduledUse]], chain_of: Chained) -> list[Chain]:
    """One chain for each bucket."""
    return [join_chains(map(chain_of, group)) for group in groups]


def join_chains(chains: Iterable[Chain]) -> Chain:
    """One chain for weights, or buckets, that take the same steps."""
    return tuple(
        stage[0]._replace(
            num_bytes=sum(s.num_bytes for s in stage), weights=tuple(weight for s in stage for weight in s.weights)
        )
        for stage in zip(*chains, strict=True)
    )


def _group_bytes(group: Iterable[ScheduledUse], chain_of: Chained) -> int:
    return sum(chain_of(use)[0].num_bytes for use in group)
