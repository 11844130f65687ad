"""Backward through one block on one GPU: the highest memory at every item (`forward` is the other direction).

The items run in reverse order. For every operator:

1. The gradients of its results are redistributed to the placements with which it ran.
2. Its weights are gathered again, if they were gathered for forward.
3. It makes the gradients of its operands.
4. Each of these is redistributed to the placements in which the gradient of that value is summed, and added there.
5. The tensors that autograd kept for it are freed, except those that an earlier operator kept already.

Gradients of weights stay until the optimizer has run: each whole until it is reduced, and then this GPU's part of it.

Example: z = gelu(y), y = x @ w, with x of 2 MB, w of 4 MB, y and z of 8 MB, all whole on one GPU. x and y were kept: 10 MB. gelu
runs with the gradient of z and makes that of y: 10 kept + 8 + 8 in flight = 26 MB. Then the gradient of z and y itself are freed.
The product makes the gradients of x and w: 2 kept + 8 + 2 + 4 in flight = 16 MB. At its end 4 MB of w's gradient stay, and 2 MB
of x's go on to the operator before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from planner_core.core import Call, Op
from planner_core.cost.memory.forward import BlockMemory, HandedThrough, Moment, arriving_bytes, peak_issuing_bytes
from planner_core.cost.memory.in_flight import ReductionMemory, SentMemory
from planner_core.cost.memory.storages import Key
from planner_core.ops import operator, writes_in_place


@dataclass(eq=False, frozen=True, slots=True)
class Gradient:
    """One tensor of `num_bytes`. It may be the gradient of several values, if operators only hand it on."""

    num_bytes: int


@dataclass
class BackwardMemory:
    """The state of the simulation of backward.

    `by_value`: the gradients of values. `kept`: bytes that autograd keeps. `at_work`: the gradients of the operands of the
    operator at work, by position. `weights` and `weight_bytes`: bytes of the gradients of weights. `waiting`: bytes of those that
    autograd holds for a unit that also uses the weight. `at`: the number of the item
    at work, -1 at the end. `inside`: the moment of a called block, if the present one is inside of it. `begun`: whether the
    item's unit has begun. `released`: whether what autograd kept for the item is freed.

    Beside compute: bytes of weights that are gathered (`gathered`) and of those on their way (`coming`), of gradients that are
    packed (`filling`), and of gradients on their way (`sent`: for each message the bytes that each of its collectives needs;
    `passing`: those that one of them needs only now, as it is issued or ends).
    `leaving`: the messages of the unit at work. `departed` and `last_packed`: those of a called block, and its last gradient. `late`:
    the messages that leave when backward is over, with what each of their collectives needs. `is_last`: whether gradients leave that are
    summed once a step. `is_first`: whether no gradients of micro-batches before stand.

    `received`: the gradients that a stage of a pipeline was sent. Its buffers stay until its backward is over.
    """

    block_memory: BlockMemory
    by_value: dict[int, Gradient]
    received: tuple[Gradient, ...] = ()
    is_last: bool = True
    is_first: bool = False
    kept: int = 0
    at_work: dict[int, Gradient] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    weight_bytes: int = 0
    waiting: dict[int, int] = field(default_factory=dict)
    at: int = -1
    inside: Moment | None = None
    begun: bool = True
    released: bool = True
    gathered: int = 0
    coming: int = 0
    filling: int = 0
    sent: list[tuple[SentMemory, ...]] = field(default_factory=list)
    passing: int = 0
    leaving: list[ReductionMemory] = field(default_factory=list)  # of the unit at work
    departed: list[ReductionMemory] = field(default_factory=list)  # those of a called block
    late: dict[object, tuple[SentMemory, ...]] = field(default_factory=dict)
    last_packed: int = 0
    last_of_unit: int = 0

    def moments(self) -> Iterator[Moment]:
        """Moments from the last item to the first."""
        items = self.block_memory.storages.block.items
        # Forward is over, so all that any item keeps is there. Each item's backward takes its own part away.
        self.kept = sum(map(self.block_memory.saved_bytes, range(len(items))))
        for number in reversed(range(len(items))):
            item, self.at, self.released = items[number], number, False
            self.begun = False
            yield from self._begin_unit(number)
            self.begun = True
            if isinstance(item, Call):
                yield from self._run_call(number, item)
            elif any(v in self.by_value for v in item.outputs):
                yield from self._run_op(item)
            self._release_saved()
        self.at, self.last_of_unit = -1, self.last_packed
        yield from self._finish_unit()
        # Small gradients of all units share messages, which leave only now: until here each stands as it was made.
        if self.late:
            yield from self._advance_messages(list(self.late.values()))
        # No unit is left to hide what is on its way. A message over two mesh axes takes two turns.
        while self.sent:
            yield from self._advance_messages()

    @property
    def ahead(self) -> int:
        """Bytes of weights that come and gradients that leave."""
        return self.gathered + self.coming + self.filling + self.passing + sum(flow[0].flying for flow in self.sent)

    def _moment(self, more: int = 0) -> Moment:
        gradients = {*self.received, *self.by_value.values(), *self.at_work.values()}
        flying = sum(g.num_bytes for g in gradients) + sum(self.waiting.values())
        return Moment(self.kept, self.weight_bytes, flying + more, self.ahead)

    def _begin_unit(self, number: int) -> Iterator[Moment]:
        """Where a unit begins: the gradients of the one before leave, its own weights arrive, those of the next units are sent for."""
        at = self.block_memory.unit_at
        if number + 1 < len(at):
            # Items run from the last to the first, so number + 1 ran before. A unit begins where its number differs.
            if at[number + 1] == at[number]:
                return
            yield from self._finish_unit()
        here, back = self.block_memory.units[at[number]], self.block_memory.previous_units(number)
        # Two moments in turn: the message is unpacked, so its weights stand twice; then it is freed, and the next units' are sent for.
        self.gathered, self.coming = here.unpacking_bytes(backward=True), arriving_bytes(back, 1, backward=True)
        yield self._moment()
        self.gathered, self.coming = here.gathered_bytes(backward=True), peak_issuing_bytes(back, backward=True)
        yield self._moment()
        self.coming = arriving_bytes(back, backward=True)

    def _finish_unit(self) -> Iterator[Moment]:
        """The unit is done: its gradients leave, when those before them have moved on, and its weights are freed. Autograd holds
        the last gradient that was packed until then."""
        # From here on the packed bytes are part of the message (`ReductionMemory.beside`), so they must not count here too.
        self.filling = 0
        block = self.block_memory.storages.block
        for reduction in self.leaving:
            # A weight that the caller gives has its gradient in the caller (`_run_call`); here it would count twice.
            for value in reduction.weights - set(block.inputs):
                self._set_weight_gradient(
                    block.values[value].name, self.block_memory.gradient_bytes[value][reduction.ends]
                )
        left, self.leaving, self.departed = (*self.departed, *self.leaving), [], []
        left = tuple(r.of_first for r in left) if self.is_first else left
        if left:
            flows = [r.beside[: len(r.beside) - r.once * (not self.is_last)] for r in left if r.late is None]
            yield from self._advance_messages(flows, sum(r.waiting for r in left))
        else:  # a unit without gradients of its own lets messages wait, as a run does
            yield self._moment(self.last_packed)
        for reduction in left:
            self.leave_late(reduction)
        self.gathered = self.last_packed = 0
        yield self._moment()

    def _advance_messages(self, new: Sequence[tuple[SentMemory, ...]] = (), waiting: int = 0) -> Iterator[Moment]:
        """Let every message take its next collective, and issue the first of the `new` ones, whose gradients are `waiting` until then: one
        over several mesh axes takes one per axis, one with each unit that is done."""
        if landing := max((flow[0].landing for flow in self.sent), default=0):
            self.passing = landing + waiting
            yield self._moment(self.last_packed)
        self.sent = [flow for flow in (*(flow[1:] for flow in self.sent), *new) if flow]
        # One after the other, so the packing of only one of them is there at a time.
        self.passing = max((flow[0].issuing for flow in self.sent), default=0)
        yield self._moment(self.last_packed)
        self.passing = 0

    def leave_late(self, reduction: ReductionMemory, copies: int = 1) -> None:
        """Let gradients of `copies` units that are few travel with others when backward is over."""
        if reduction.late is None or not self.is_last:
            return
        before = self.late.get(reduction.late, (SentMemory(0),) * len(reduction.beside))
        self.late[reduction.late] = tuple(n.add(m, copies) for n, m in zip(before, reduction.beside, strict=True))

    def _set_weight_gradient(self, name: str, num_bytes: int) -> None:
        self.weight_bytes += num_bytes - self.weights.get(name, 0)
        self.weights[name] = num_bytes

    def _run_call(self, number: int, call: Call) -> Iterator[Moment]:
        copy = self.block_memory.calls[call.prefix]
        # They are taken out before `here` is summed, since the copy's own walk counts them (`arriving_gradients`).
        arrived = [self.by_value.pop(v, None) for v in call.outputs]
        # The caller counts as kept what the copy keeps inside. While the copy runs backward, its own moments count that instead.
        twice = sum(g.num_bytes for g in arrived if g is not None and g in self.received)
        here = self._moment() + Moment(-self.block_memory.storages.size[Key("call", number=number)], 0, -twice)
        for self.inside in copy.backward:
            yield here + self.inside
        self.inside = None
        # A gradient is added to that of another reader while the copy runs, when most of what it kept is freed.
        self._release_saved()
        self.weight_bytes += copy.grads
        for value in (call.inputs[position] for position in copy.reduced):
            self._set_weight_gradient(
                self.block_memory.storages.block.values[value].name, self.block_memory.gradient_bytes[value][0]
            )
        self.departed, self.last_packed = list(copy.unit.reductions), copy.last_packed
        for gradient, result in zip(arrived, copy.results, strict=True):
            if gradient is None or not isinstance(result, HandedThrough):
                continue
            if result.operand not in copy.gradients:
                yield self._add_gradient(call.inputs[result.operand], gradient)
        for position, size in copy.gradients.items():
            yield self._add_weight_gradient(call.inputs[position], Gradient(size))

    def _run_op(self, op: Op) -> Iterator[Moment]:
        s = self.block_memory.storages
        site, values = s.plan.sites[op.name], s.block.values
        for value, edge in zip(op.outputs, site.outputs, strict=True):
            if value in self.by_value:
                moved = s.redistribution_bytes(value, edge.dst.gradient, edge.backward, edge)
                yield self._moment(moved.peak)
                if moved.result:
                    self.by_value[value] = Gradient(moved.result)
        # First the gradients of the results, then the weights, then the kernels: this order decides what is held together.
        whole, gathering = self._gathered_bytes(op)
        yield self._moment(gathering)
        wanted = [k for k, v in enumerate(op.inputs) if values[v].grad]
        self.at_work = {k: self._operand_gradient(op, k) for k in wanted}
        yield self._moment(whole + s.backward_workspace_bytes(op))
        # Both are freed before the gradients are packed and sent, so that neither stands beside the buffers of a collective.
        for value in op.outputs:
            self.by_value.pop(value, None)
        self._release_saved()
        for position in reversed(wanted):
            yield from self._send_gradient(op, position)

    def _release_saved(self) -> None:
        """What autograd kept for the item at work is freed when its kernels are done."""
        self.kept -= 0 if self.released else self.block_memory.saved_bytes(self.at)
        self.released = True

    def _operand_gradient(self, op: Op, position: int) -> Gradient:
        """Return the gradient that an operator makes for an operand: a new tensor, or that of its result if it hands it on."""
        s = self.block_memory.storages
        size = s.bytes_of(op.inputs[position], s.plan.sites[op.name].inputs[position].dst.gradient)
        # The gradient of the result itself, if shapes agree.
        handed = operator(op.fn).passes_gradient_through and not writes_in_place(op.fn)
        same = [v for v in op.outputs if s.viewed_operand(op, v) == position or handed]
        # The gradient of y = x + b is handed on to x as it is: one tensor with two names, so its bytes count once.
        given = self.by_value.get(same[0]) if len(same) == 1 else None
        return given if given is not None and given.num_bytes == size else Gradient(size)

    def _gathered_bytes(self, op: Op) -> tuple[int, int]:
        """Return the bytes of weights that are gathered again for backward, and bytes at the highest point of these gathers. Both are 0 if
        the block is recomputed, since the recomputation has gathered them."""
        s = self.block_memory.storages
        whole = peak = 0
        if s.plan.recompute != "none":
            return 0, 0
        for position, (value, edge) in enumerate(zip(op.inputs, s.plan.sites[op.name].inputs, strict=True)):
            if value in op.saved and s.is_gathered_at_op(op, position):
                # One after the other: while one weight is gathered, those before it stand whole.
                peak = max(peak, whole + s.redistribution_bytes(value, edge.src.forward, edge.forward, edge).peak)
                whole += s.bytes_of_key(Key("operand", op=op.name, number=position))
        return whole, peak

    def _send_gradient(self, op: Op, position: int) -> Iterator[Moment]:
        """Redistribute the gradient of one operand, and add it to the gradient of its value."""
        value = op.inputs[position]
        moved = self.block_memory.storages.return_gradient(op, position)
        self._pack_gradient(op, position)
        yield self._moment(moved.peak)
        gradient = self.at_work.pop(position)
        gradient = Gradient(moved.result) if moved.result else gradient
        yield self._add_weight_gradient(value, gradient)

    def _pack_gradient(self, op: Op, position: int) -> None:
        """The first gradient of a message takes the memory for all of them."""
        unit = self.block_memory.units[self.block_memory.unit_at[self.at]]
        reduction = unit.reduction_of(op.inputs[position]) if (op.name, position) in unit.uses else None
        if reduction is not None and reduction not in self.leaving:
            self.leaving.append(reduction)
            self.filling += reduction.flat

    def _add_weight_gradient(self, value: int, gradient: Gradient) -> Moment:
        """Add the gradient of a weight, which stays. If the weight is an input of the block, its gradient belongs to the caller, unless
        the block's unit reduces it."""
        block = self.block_memory.storages.block
        v = block.values[value]
        if v.kind != "parameter" or (value in block.inputs and not any(value in r.weights for r in self.leaving)):
            return self._add_gradient(value, gradient)
        unit, first = self.block_memory.units[self.block_memory.unit_at[self.at]], self.waiting.pop(value, 0)
        first += 2 * gradient.num_bytes if first else 0  # and this one, and a new tensor of both
        if value in unit.waits:
            self.waiting[value] = gradient.num_bytes
            return self._moment(max(0, first - gradient.num_bytes))
        # A packed gradient lies in its message's buffer already. Only autograd's last one is a tensor of its own until the unit is done.
        packed = any(value in r.weights and r.flat for r in self.leaving)
        separate = any(use.value == value and use.is_separate for use in unit.uses.values())
        if packed and (v.name not in self.weights or separate):
            self.last_packed = gradient.num_bytes
            return self._moment(first)
        if v.name in self.weights:  # used before: the first waits, and autograd makes a new tensor of both
            return self._moment(2 * gradient.num_bytes)
        stands = (
            self.block_memory.gradient_bytes[value][0]
            if value in self.block_memory.gradient_bytes
            else gradient.num_bytes
        )
        self._set_weight_gradient(v.name, stands)
        self.last_packed = gradient.num_bytes if stands != gradient.num_bytes else 0  # it is cast to what stands
        return self._moment(max(first, self.last_packed))

    def _add_gradient(self, value: int, gradient: Gradient) -> Moment:
        """Add a gradient to that of a value: in place, or into a new tensor if the old one is also another value's gradient."""
        old = self.by_value.get(value)
        if old is None:
            self.by_value[value] = gradient
            return self._moment()
        holders = [*self.received, *self.by_value.values(), *self.at_work.values()]
        # A tensor that is also another value's gradient must not be added to in place: for a moment there are both terms and their sum.
        shared = sum(g is old for g in holders) > 1
        moment = self._moment((0 if gradient in holders else gradient.num_bytes) + (old.num_bytes if shared else 0))
        self.by_value[value] = Gradient(old.num_bytes) if shared else old
        return moment
