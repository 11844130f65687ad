"""Backward through one block on one GPU: the highest memory at every item (`forward` is the other direction).

The items run in reverse order. For every operator:

1. The gradients of its results are redistributed to the placements with which it ran.
2. Its weights are gathered again, if they were gathered for forward.
3. It makes the gradients of its operands.
4. Each of these is redistributed to the placements in which the gradient of that value is summed, and added there.
5. The tensors that autograd kept for it are freed, except those that an earlier operator kept already.

Gradients of weights stay until the optimizer has run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from planner_core.core import Call, Op
from planner_core.cost.memory.forward import Layout, Moment
from planner_core.ops import operator, writes_in_place


@dataclass(eq=False, frozen=True, slots=True)
class Gradient:
    """One tensor of `num_bytes`. It may be the gradient of several values, if operators only hand it on."""

    num_bytes: int


@dataclass
class Backward:
    """The state of the simulation of backward.

    `by_value`: the gradients of values. `kept`: bytes that autograd keeps. `at_work`: the gradients of the operands of the
    operator at work, by position. `weights` and `weight_bytes`: bytes of the gradients of weights. `at`: the number of the item
    at work, -1 at the end. `inside`: whether the present moment is inside a called block.
    """

    layout: Layout
    by_value: dict[int, Gradient]
    kept: int = 0
    at_work: dict[int, Gradient] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    weight_bytes: int = 0
    at: int = -1
    inside: bool = False

    def run(self) -> Iterator[Moment]:
        """Moments from the last item to the first."""
        items = self.layout.storages.block.items
        self.kept = sum(map(self.layout.kept_bytes, range(len(items))))
        for number in reversed(range(len(items))):
            item, self.at = items[number], number
            if isinstance(item, Call):
                yield from self._call(number, item)
            elif any(v in self.by_value for v in item.outputs):
                yield from self._op(item)
            self.kept -= self.layout.kept_bytes(number)
        self.at = -1
        yield self._moment()

    def _moment(self, more: int = 0) -> Moment:
        gradients = {*self.by_value.values(), *self.at_work.values()}
        return Moment(self.kept, self.weight_bytes, sum(g.num_bytes for g in gradients) + more)

    def _call(self, number: int, call: Call) -> Iterator[Moment]:
        found = self.layout.calls[call.prefix]
        arrived = [self.by_value.pop(v, None) for v in call.outputs]
        inside = Moment(self.layout.storages.size["call", number])
        here = self._moment()
        self.inside = True
        yield Moment(here.kept - inside.kept, here.grads, here.flying) + found.backward
        self.inside = False
        self.weight_bytes += found.grads
        for gradient, result in zip(arrived, found.results, strict=True):
            if (
                gradient is not None and result < 0 and -1 - result not in found.gradients
            ):  # the block hands this operand through
                yield self._sum_up(call.inputs[-1 - result], gradient)
        for position, size in found.gradients.items():
            yield self._sum_up_weight(call.inputs[position], Gradient(size))

    def _op(self, op: Op) -> Iterator[Moment]:
        s = self.layout.storages
        site, values = s.plan.sites[op.name], s.block.values
        for value, edge in zip(op.outputs, site.outputs, strict=True):
            if value in self.by_value:
                moved = s.transit(value, edge.dst.gradient, edge.backward, edge)
                yield self._moment(moved.peak)
                if moved.result:
                    self.by_value[value] = Gradient(moved.result)
        whole, gathering = self._gathered(op)
        yield self._moment(gathering)
        wanted = [k for k, v in enumerate(op.inputs) if values[v].grad]
        self.at_work = {k: self._made(op, k) for k in wanted}
        yield self._moment(whole + s.backward_work(op))
        for value in op.outputs:
            self.by_value.pop(value, None)
        for position in reversed(wanted):
            yield from self._send(op, position)

    def _made(self, op: Op, position: int) -> Gradient:
        """The gradient that an operator makes for an operand: a new tensor, or that of its result if it hands it on."""
        s = self.layout.storages
        size = s.bytes_of(op.inputs[position], s.plan.sites[op.name].inputs[position].dst.gradient)
        handed = operator(op.fn).hands_on and not writes_in_place(
            op.fn
        )  # the gradient of the result itself, if shapes agree
        same = [v for v in op.outputs if s.viewed_operand(op, v) == position or handed]
        given = self.by_value.get(same[0]) if len(same) == 1 else None
        return given if given is not None and given.num_bytes == size else Gradient(size)

    def _gathered(self, op: Op) -> tuple[int, int]:
        """Bytes of weights that are gathered again for backward, and bytes at the highest point of these gathers. Both are 0 if the
        block is recomputed, since the recomputation has gathered them."""
        s = self.layout.storages
        whole = peak = 0
        if s.plan.recompute != "none":
            return 0, 0
        for position, (value, edge) in enumerate(zip(op.inputs, s.plan.sites[op.name].inputs, strict=True)):
            if value in op.saved and s.gathered(op, position):
                peak = max(peak, whole + s.transit(value, edge.src.forward, edge.forward, edge).peak)
                whole += s.own(("taken", op.name, position))
        return whole, peak

    def _send(self, op: Op, position: int) -> Iterator[Moment]:
        """Redistribute the gradient of one operand, and add it to the gradient of its value."""
        s = self.layout.storages
        value, edge = op.inputs[position], s.plan.sites[op.name].inputs[position]
        moved = s.transit(value, edge.dst.gradient, edge.backward, edge)
        yield self._moment(moved.peak)
        gradient = self.at_work.pop(position)
        gradient = Gradient(moved.result) if moved.result else gradient
        yield self._sum_up_weight(value, gradient)

    def _sum_up_weight(self, value: int, gradient: Gradient) -> Moment:
        """Add the gradient of a weight, which stays. If the weight is an input of the block, its gradient belongs to the caller."""
        block = self.layout.storages.block
        v = block.values[value]
        if v.kind != "parameter" or value in block.inputs:
            return self._sum_up(value, gradient)
        if v.name in self.weights:  # the weight was used before: this gradient is added to the first
            return self._moment(gradient.num_bytes)
        self.weights[v.name] = gradient.num_bytes
        self.weight_bytes += gradient.num_bytes
        return self._moment()

    def _sum_up(self, value: int, gradient: Gradient) -> Moment:
        """Add a gradient to that of a value: in place, or into a new tensor if the old one is also another value's gradient."""
        old = self.by_value.get(value)
        if old is None:
            self.by_value[value] = gradient
            return self._moment()
        holders = [*self.by_value.values(), *self.at_work.values()]
        shared = sum(g is old for g in holders) > 1
        moment = self._moment((0 if gradient in holders else gradient.num_bytes) + (old.num_bytes if shared else 0))
        self.by_value[value] = Gradient(old.num_bytes) if shared else old
        return moment
