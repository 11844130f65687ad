"""Forward through the operators and calls of one block on one GPU: the highest memory at every item (see `backward` too).

A tensor lives until its last reader is done, or longer if autograd keeps it. The caller counts the operands and results of a
called block. The block counts everything else inside.

Example: y = gelu(x @ w), with x of 2 MB and x @ w and y of 8 MB. While the product runs, its result is in flight: 8 MB. Autograd
keeps it for gelu's backward, so after the product 8 MB are kept. While gelu runs, y is in flight: 8 kept + 8 in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from planner_core.core import Call, Op
from planner_core.cost.memory.in_flight import UnitMemory
from planner_core.cost.memory.saved import rerun_ops
from planner_core.cost.memory.standing import weight_forms
from planner_core.cost.memory.storages import BlockStorages, Key
from planner_core.cost.resolved_ops import RECEIVE
from planner_core.ops import AS_RUN, is_heavy, last_saving, operator

COMPILED = "compiled"
"""How a loss runs that the model's own code computes, if it is compiled."""
MOMENTS = 3
"""Of every item that runs forward: before it, its highest, and after it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes at one moment of a step, beside weights and optimizer states: kept for backward, gradients, in flight, and what the
    run holds for its overlap (`ahead_bytes`)."""

    kept: int = 0
    grads: int = 0
    flying: int = 0
    ahead: int = 0

    @property
    def total(self) -> int:
        """The sum of the four."""
        return self.kept + self.grads + self.flying + self.ahead

    def __add__(self, other: Moment) -> Moment:
        return Moment(
            self.kept + other.kept, self.grads + other.grads, self.flying + other.flying, self.ahead + other.ahead
        )


@dataclass(frozen=True, slots=True)
class HandedThrough:
    """A result of a block that is one of its operands, by position: it has no storage of its own."""

    operand: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory:
    """What one copy of a block does to the memory of its caller.

    `saved_bytes`: bytes inside that are saved for backward. `saved_operands`, `saved_results`: the operands, by position, and the
    results that are saved for it. `results`: the bytes of each result, or the operand that it is. `forward`: the highest moment.
    `backward`: those of `highest_backward`. `gradients`: bytes of each operand's gradient. `grads`: bytes of its weights' gradients.
    `reduced`: the operands that are weights whose gradients the copy itself reduces. `unit`: its weights that come ahead and its
    gradients that leave. `last_packed`: bytes of the last gradient that leaves.
    """

    saved_bytes: int
    saved_operands: tuple[int, ...]
    results: tuple[int | HandedThrough, ...]
    saved_results: tuple[int, ...]
    forward: Moment
    backward: tuple[Moment, ...]
    gradients: Mapping[int, int]
    grads: int
    unit: UnitMemory
    last_packed: int
    reduced: tuple[int, ...] = ()


@dataclass
class BlockMemory:
    """The storages of one block in running order.

    `units`: of the top block all units of a step, of a called block one, whose weights its caller brings. `unit_at`: by item the
    number of its unit. `calls`: what called blocks do, by prefix (top block only). `flying`: what is in flight at the present
    moment of `forward_moments`, beside what the item at work adds.
    """

    storages: BlockStorages
    units: tuple[UnitMemory, ...]
    unit_at: tuple[int, ...]
    calls: Mapping[str, CallMemory] = field(default_factory=dict)
    saved_at: list[tuple[Key, ...]] = field(default_factory=list)  # by item: the storages that it keeps
    # The first item that keeps a storage; the storage is freed with that item's backward.
    first_saver: dict[Key, int] = field(default_factory=dict)
    flying: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, item in enumerate(self.storages.block.items):
            if isinstance(item, Call):
                self.saved_at.append(self._add_call(number, item))
            else:
                self.storages.add(item)
                self.saved_at.append(self.storages.saved[item.name])
        for number, keys in enumerate(self.saved_at):
            for key in keys:
                self.first_saver.setdefault(key, number)
        # Inputs and results of a called block are its caller's, which counts each once for all blocks that read it.
        self.border: set[Key] = {Key("input", v) for v in self.storages.block.inputs}
        if self.storages.block.inputs:
            self.border.update(k for v in self.results if (k := self.storages.at.get(v)) is not None)

    def _add_call(self, number: int, call: Call) -> tuple[Key, ...]:
        """Give the results of a call their storages. Returns the storages that the call keeps, inside and among its operands."""
        s, copy = self.storages, self.calls[call.prefix]
        for value, result in zip(call.outputs, copy.results, strict=True):
            if isinstance(result, HandedThrough):
                s.at[value] = s.at.get(call.inputs[result.operand])
            else:
                s.at[value] = key = Key("result", value)
                s.size[key] = result
        inside = Key("call", number=number)
        s.size[inside] = copy.saved_bytes
        across = [call.inputs[i] for i in copy.saved_operands] + [call.outputs[i] for i in copy.saved_results]
        return tuple(dict.fromkeys([inside, *(k for v in across if (k := s.at.get(v)) is not None)]))

    @cached_property
    def gradient_bytes(self) -> dict[int, tuple[int, int]]:
        """Of every weight of its own: what its accumulated gradient takes before it is reduced once a step, and after it."""
        s = self.storages
        return {w.value: (w.gradient.num_bytes, w.reduced.num_bytes) for w in weight_forms(s.block, s.plan, s.model)}

    @property
    def results(self) -> tuple[int, ...]:
        """The values that the block returns; for the top block the loss."""
        block = self.storages.block
        return tuple(v for v in block.outputs or block.items[-1].outputs if block.values[v].kind == "activation")

    def saved_bytes(self, number: int) -> int:
        """Return the bytes inside the block that item `number` is the first to keep."""
        return self.size_of(self.keys_saved_by(number, first=False))

    def forward_moments(self) -> Iterator[Moment]:
        """Three moments of every item: before it, its highest, and after it. Before the first item of a unit its weights arrive.
        A block that will run again keeps only what its plan lists."""
        yield from self._moments(first=self.storages.plan.recompute != "none")

    def keys_saved_by(self, number: int, *, first: bool) -> Iterable[Key]:
        """Return what stays of an item when it has run; `first`: of a block that will run again."""
        if first:
            return self.keys_kept_for_recompute[number]
        return (k for k in self.saved_at[number] if self.first_saver[k] == number and k not in self.border)

    def _moments(self, last: int = -1, *, first: bool = False) -> Iterator[Moment]:
        """Yield the moments of `forward_moments`; up to where item `last` has its operands, if given."""
        size, until = self.storages.size, self._last_readers()
        # The program computes its constants before its first operator, and its frame holds them until it returns.
        live: dict[Key, int] = {key: size[key] for key in self.storages.computed.values()}
        until.update(dict.fromkeys(live, len(self.storages.block.items)))
        saved: set[Key] = set()
        kept_bytes = 0
        for number, item in enumerate(self.storages.block.items):
            self.flying = {k: n for k, n in live.items() if k not in saved}
            # Invariant: `live` are the storages that some later item or the code still reads, `saved` those that wait for backward. A
            # storage that is in both counts once, as kept.
            standing = Moment(kept_bytes, 0, sum(self.flying.values()))
            yield standing + Moment(ahead=self._arriving_bytes(number))
            standing += Moment(ahead=self.ahead_bytes(number))
            if number == last and isinstance(item, Op):
                yield standing + self._op_moment(item, takes_only=True)
                return
            yield standing + (self.calls[item.prefix].forward if isinstance(item, Call) else self._op_moment(item))
            stays = list(self.keys_saved_by(number, first=first))
            saved.update(stays)
            kept_bytes += self.size_of(stays)
            # An input's storage is the caller's, or a computed constant with which `live` began.
            results = (self.storages.at[v] for v in item.outputs)
            live.update((k, size[k]) for k in results if k is not None and k.kind != "input")
            # What no later item reads is freed here, unless autograd keeps it.
            live = {k: n for k, n in live.items() if until.get(k, -1) > number}
            self.flying = {k: n for k, n in live.items() if k not in saved}
            yield Moment(kept_bytes, 0, sum(self.flying.values()), self.ahead_bytes(number, done=True))

    @cached_property
    def reach(self) -> int:
        """Number of units whose weights are on their way while one runs."""
        return max((g.reach for u in self.units for g in u.messages(backward=False)), default=0)

    def _arriving_bytes(self, number: int) -> int:
        """Return the bytes of weights before an item: at the begin of a unit they arrive, and those of the next units are sent for."""
        if number and self.unit_at[number] == self.unit_at[number - 1]:
            return self.ahead_bytes(number)
        # The two moments at which a unit begins, as in backward: its messages are unpacked; then they are freed, and the next are sent for.
        here, onward = self.units[self.unit_at[number]], self.next_units(number)
        return max(
            here.unpacking_bytes() + arriving_bytes(onward, 1), here.gathered_bytes() + peak_issuing_bytes(onward)
        )

    def ahead_bytes(self, number: int, *, done: bool = False) -> int:
        """Return the bytes of weights while an item runs: its unit's, and those of the next units that are on their way; or when it is
        `done`."""
        at = self.unit_at[number]
        # A unit's gathered weights are freed together after its last item, not one by one after their last use.
        over = done and (number + 1 == len(self.unit_at) or self.unit_at[number + 1] != at)
        return arriving_bytes(self.next_units(number)) + (0 if over else self.units[at].gathered_bytes())

    def next_units(self, number: int) -> Sequence[UnitMemory]:
        """Return the units after that of an item whose weights may be on their way."""
        at = self.unit_at[number]
        return self.units[at + 1 : at + 1 + self.reach]

    def previous_units(self, number: int) -> Sequence[UnitMemory]:
        """Return the same in backward, the next one first."""
        at = self.unit_at[number]
        return self.units[max(0, at - self.reach) : at][::-1]

    def size_of(self, keys: Iterable[Key]) -> int:
        """Return the bytes of the storages `keys`."""
        return sum(self.storages.size[k] for k in keys)

    @cached_property
    def keys_kept_for_recompute(self) -> list[list[Key]]:
        """By item: the storages of results that the plan keeps although the block is recomputed."""
        # Of two operators that keep one storage the first one counts it. The border is the caller's.
        s, seen = self.storages, set(self.border)
        by_item = []
        for item in s.block.items:
            keys = [k for k in s.keys_kept_for_recompute(item) if k not in seen] if isinstance(item, Op) else []
            seen.update(keys)
            by_item.append(keys)
        return by_item

    def recomputation_moments(self) -> Iterator[Moment]:
        """Yield the moments of the recomputation.

        What the plan kept is held until its own operator is reached. The recomputation stops when the last operator that saves
        something has its operands, or, if that operator saves what it makes, when it has run.
        """
        by_item, block = self.keys_kept_for_recompute, self.storages.block
        left, last = sum(map(self.size_of, by_item)), last_saving(block)
        computes = last >= 0 and rerun_ops(block, self.storages.plan.kept)[block.ops[last].name].computes
        # If the last operator saves its operands alone, its kernels need not run: the moments end where it has them.
        for number, moment in enumerate(self._moments(-1 if computes else last)):
            # The results that the plan kept wait for the recomputation to reach their operator. From then on they are among what is kept
            # again.
            left -= 0 if number % MOMENTS else self.size_of(by_item[number // MOMENTS])
            yield moment + Moment(left, 0, 0)

    def _op_moment(self, op: Op, *, takes_only: bool = False) -> Moment:
        """The highest memory while an operator runs: operands on their way, results, what it saves of its own, and results that are
        redistributed. `takes_only`: operands only."""
        s, site = self.storages, self.storages.plan.sites[op.name]
        now = peak = 0
        for position, value in enumerate(op.inputs):
            if s.block.values[value].kind != "constant":
                # Operands arrive one after the other: while one is on its way, those before it are held as they are taken.
                peak = max(peak, now + s.bring_operand(op, position).peak)
                now += s.bytes_of_key(Key("operand", op=op.name, number=position))
        if takes_only:
            return Moment(0, 0, max(peak, now))
        now += sum(s.bytes_of_key(Key("result", v)) for v in op.outputs)
        now += sum(s.size[k] for k in s.saved[op.name] if k.kind == "extra")
        peak = max(peak, now + s.forward_workspace_bytes(op))
        for value, edge in zip(op.outputs, site.outputs, strict=True):
            peak = max(peak, now + s.redistribution_bytes(value, edge.src.forward, edge.forward, edge).peak)
            now += s.bytes_of_key(Key("delivered", value))
        return Moment(0, 0, max(peak, now))

    def _last_readers(self) -> dict[Key, int]:
        """By storage: the number of the item after which the model's code does not hold it any more."""
        at = self.storages.at
        items = self.storages.block.items
        until = {k: i for i, item in enumerate(items) for v in item.inputs if (k := at.get(v)) is not None}
        makers = {k: i for i, item in enumerate(items) for v in item.outputs if (k := at.get(v)) is not None}
        ends = {u: i for i, u in enumerate(self.unit_at)}  # a unit holds its operands while it runs
        until |= {k: ends[u] for k, i in until.items() if (u := self.unit_at[i]) != self.unit_at[makers.get(k, i)]}
        until.update(
            (k, len(items)) for v in (*self.results, *self._values_live_until_return()) if (k := at.get(v)) is not None
        )
        return until

    def _values_live_until_return(self) -> tuple[int, ...]:
        """Return the values that the model's code holds until it returns: the logits, which it passes to the loss and also returns. The
        last stage of a pipeline returns the loss alone."""
        ops = self.storages.block.ops
        if any(op.fn == RECEIVE for op in ops):
            return ()
        losses = {
            op.name for op in ops if operator(op.fn).is_logits_loss and op.attrs.get(AS_RUN, COMPILED) == COMPILED
        }
        if not losses:
            return ()
        # The last product before the loss makes the logits.
        return next((op.outputs for op in reversed(ops) if is_heavy(op) and op.name not in losses), ())


def arriving_bytes(units: Iterable[UnitMemory], left: int = 0, *, backward: bool = False) -> int:
    """Return the bytes in flight of the next units' weights: the first has `left` collectives not yet issued, the second one more, and so
    on."""
    return sum(u.in_flight_bytes(number, backward=backward) for number, u in enumerate(units, left))


def peak_issuing_bytes(units: Sequence[UnitMemory], *, backward: bool = False) -> int:
    """The most bytes in flight while the next units' weights are sent for: each has one collective fewer to issue after that."""
    most = now = arriving_bytes(units, 1, backward=backward)
    for left, u in enumerate(units):
        for g in u.messages(backward):
            before = g.in_flight_bytes(left + 1)
            # Messages are sent for one after the other. While one is issued, those before it are on their way, those after it are not
            # begun.
            most = max(most, now - before + g.issuing_bytes(left))
            now += g.in_flight_bytes(left) - before
    return most
