"""The tensors that fill one GPU at the peak of a step, by kind.

The simulation (`peak`) is run again up to its highest moment. Its state then says what is held: weights, their gradients and
optimizer states; what autograd keeps, each storage with the operator that keeps it first; and what is in flight. What the
operator at work adds (operands on their way, results, gathered weights) is one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from planner_core.core import ITEM_BYTES, BlockPlan, Call, Graph, Op, Placements, Value
from planner_core.cost.memory.backward import BackwardMemory, Gradient
from planner_core.cost.memory.forward import MOMENTS, BlockMemory, Moment
from planner_core.cost.memory.peak import arriving_gradients, backward_of, highest_moment, num_update_tensors, walk
from planner_core.cost.memory.standing import WeightForm, WeightForms, weight_forms
from planner_core.cost.memory.storages import Key
from planner_core.cost.model import CostModel

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True)
class PeakTensor:
    """One tensor, or the equal tensors of several copies. The bytes are those of one copy on one GPU; the shape is global.

    The placement has one letter per mesh axis. Shape and placement are empty for what is not a single tensor. `op`: the operator whose own
    tensor it is, where it is no value of the graph.
    """

    kind: str
    what: str
    block: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    num_bytes: int
    copies: int = 1
    op: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all copies."""
        return self.num_bytes * self.copies


def tensors_at_peak(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> list[PeakTensor]:
    """Return all tensors at the peak, the largest first. The bytes of each kind add up to `Walk.memory_bytes`."""
    tensors = _PeakTensors(blocks, graph, model)
    tensors.add_standing()
    tensors.add_moment_of_peak()
    return sorted(tensors.rows(), key=lambda h: -h.total_bytes)


class _PeakTensors:
    def __init__(self, blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> None:
        self.blocks, self.model, self.buffer_bytes = blocks, model, graph.buffer_bytes
        self.walk = walk(blocks, graph, model)
        self.block_memories = self.walk.block_memories
        self.sums = model.holds_gradients
        self.label_of = {prefix: label for label, bp in blocks.items() if label for prefix in bp.prefixes}
        self.copies_of: dict[PeakTensor, int] = {}

    def rows(self) -> Iterable[PeakTensor]:
        """Yield the rows; equal tensors are one."""
        for h, copies in self.copies_of.items():
            # A form of a weight that takes no memory has 0 bytes (`WeightForms`): it is no row.
            if h.num_bytes:
                yield replace(h, copies=copies)

    def value(self, label: str, number: int) -> Value:
        """Return a value of a block of the plan."""
        return self.block_memories[label].storages.block.values[number]

    def add(
        self,
        kind: str,
        what: str,
        label: str,
        value: int | None,
        placed: Placements | None,
        num_bytes: int,
        copies: int = 1,
        dtype: str = "",
        op: str = "",
    ) -> None:
        """Add one row, in `dtype` or in the value's own dtype."""
        meta = self.value(label, value).meta if value is not None else None
        shape, dtype = (meta.shape, dtype or meta.dtype) if meta else ((), "")
        row = PeakTensor(kind, what, label, shape, dtype, " ".join(map(str, placed or ())), num_bytes, op=op)
        self.copies_of[row] = self.copies_of.get(row, 0) + copies

    def weights(self) -> Iterator[tuple[str, WeightForms]]:
        """Yield every weight, with the label of its block."""
        for label, bp in self.blocks.items():
            for forms in weight_forms(self.block_memories[label].storages.block, bp, self.model):
                yield label, forms

    def add_weight(self, kind: str, what: str, label: str, number: int, form: WeightForm, dtype: str = "") -> None:
        """Add one form of a weight for all copies of its block, in `dtype` or in the dtype in which the optimizer keeps it."""
        value, copies = self.value(label, number), len(self.blocks[label].prefixes)
        in_float32 = value.grad and self.model.workload.kept_item(ITEM_BYTES[value.meta.dtype]) == 4
        dtype = dtype or ("float32" if in_float32 else value.meta.dtype)
        self.add(kind, f"{what}{value.name}", label, number, form.placements, form.num_bytes, copies, dtype)

    def add_standing(self) -> None:
        """Add what is held all the time: weights and optimizer states."""
        for label, w in self.weights():
            self.add_weight("params", "", label, w.value, w.stored)
            self.add_weight(
                "params", "working copy of ", label, w.value, w.working, self.value(label, w.value).meta.dtype
            )
            self.add_weight("optimizer", "states of ", label, w.value, w.moments)
        self.add("params", "buffers of the model", "", None, None, self.buffer_bytes)

    def add_moment_of_peak(self) -> None:
        """Add what else is held at the highest moment."""
        peak, top = self.walk.peak, self.block_memories[""]
        # Moments compare by value. `peak` is the first of the highest in this order, so an equal one of forward is the same moment.
        updates = peak not in (*self.walk.forward, *self.walk.backward)
        if not updates:
            self.add(
                "activations",
                "inputs, gathered for operators that take all samples",
                "",
                None,
                None,
                self.walk.state.inputs,
            )
        # With several micro-batches the gradients of those before stand all the time. With one they come in backward
        # (`add_weight_gradients`). The optimizer sees what is left of each after it was reduced.
        left = updates and not self.model.software.gradient_buffer
        for label, w in self.weights() if updates or self.sums else ():
            self.add_weight("grads", "gradient of ", label, w.value, w.reduced if left else w.gradient)
        if peak in self.walk.forward:
            self.add_forward_moment("", self.walk.forward.index(peak))
        elif peak in self.walk.backward:
            self.add_backward_moment("", self.walk.backward.index(peak), dict(backward_of(top).by_value))
        else:
            what = f"the optimizer at work: {num_update_tensors(self.model.workload)} tensors of the largest weight"
            self.add("buffers", what, "", None, None, peak.flying)

    # --- one block at one moment ------------------------------------------------------------------

    def add_forward_moment(self, label: str, index: int, *, recomputed: bool = False) -> None:
        """Add what is held at moment `index` of forward: each item has three moments, before it, while it runs and after it.
        `recomputed`: of the recomputation before backward."""
        block_memory = self.block_memories[label]
        moment = _run_to_moment(
            block_memory.recomputation_moments() if recomputed else block_memory.forward_moments(), index
        )
        number, running = index // MOMENTS, index % MOMENTS == 1
        begun = number + (index % MOMENTS > 0)
        if recomputed:
            self.add_kept_results(label, range(begun, len(block_memory.storages.block.items)))
        # Moments of item n are 3 n (before it), 3 n + 1 (its highest) and 3 n + 2 (after it): only then it is done.
        done = range(number + (index % MOMENTS == 2))
        if block_memory.storages.plan.recompute == "none" or recomputed:
            self.add_saved(label, done)
        else:
            self.add_kept_results(label, done)
        self.add_weights_ahead(label, number, index % MOMENTS, moment.ahead)
        # The simulation stopped at this moment, so `flying` is what a later item still reads and autograd does not keep.
        for key, size in block_memory.flying.items():
            self.add_storage("buffers", label, key, size)
        item = block_memory.storages.block.items[number]
        if running and isinstance(item, Call):
            inner = self.label_of[item.prefix]
            moments = [*self.block_memories[inner].forward_moments()]
            self.add_forward_moment(inner, moments.index(highest_moment(moments)))
        elif isinstance(item, Op):
            self.add_work(label, item.name, FORWARD, moment.flying - sum(block_memory.flying.values()))

    def add_backward_moment(self, label: str, index: int, given: dict[int, Gradient]) -> None:
        """Add what is held at moment `index` of backward."""
        block_memory = self.block_memories[label]
        back = BackwardMemory(block_memory, dict(given))
        moment = _run_to_moment(back.moments(), index)
        call = block_memory.storages.block.items[back.at] if back.at >= 0 else None
        # Items before the one at work have not run backward, so they still keep. Its own stand until they are released; what a call at
        # work keeps is listed inside of it (`add_inside_call`).
        self.add_saved(
            label, range(back.at + (not back.released)), skip=Key("call", number=back.at) if back.inside else None
        )
        self.add_weight_gradients(label, back)
        self.add_overlap(back)
        named = self.add_gradients(label, back)
        if back.inside and isinstance(call, Call):
            self.add_inside_call(self.label_of[call.prefix], back.inside)
        elif isinstance(call, Op):
            self.add_work(label, call.name, BACKWARD, moment.flying - named)
        else:
            self.add(
                "buffers",
                "the last gradient of a block, beside its packed copy",
                label,
                None,
                None,
                moment.flying - named,
            )

    def add_weights_ahead(self, label: str, number: int, when: int, num_bytes: int) -> None:
        """Weights before, while and after an item runs forward."""
        block_memory = self.block_memories[label]
        at = block_memory.unit_at[number]
        ahead = block_memory.units[at + 1] if at + 1 < len(block_memory.units) else block_memory.units[at]
        here = block_memory.units[at].gathered_bytes() if when == 1 else 0
        self.add("buffers", "weights, gathered for the block that runs", block_memory.units[at].label, None, None, here)
        self.add(
            "buffers", "weights on their way, for the block that runs next", ahead.label, None, None, num_bytes - here
        )

    def add_overlap(self, back: BackwardMemory) -> None:
        """Weights that come and gradients that leave, in backward."""
        block_memory = back.block_memory
        at = block_memory.unit_at[back.at]
        here, behind, before = (
            block_memory.units[at],
            block_memory.units[max(at - 1, 0)],
            block_memory.units[min(at + 1, len(block_memory.units) - 1)],
        )
        for what, label, size in (
            ("weights, gathered for the block that runs", here.label, back.gathered),
            ("weights on their way, for the block that runs next", behind.label, back.coming),
            ("gradients of a block, packed as they are made", here.label, back.filling),
            (
                "gradients of a block on their way",
                before.label,
                back.ahead - back.gathered - back.coming - back.filling,
            ),
        ):
            self.add("buffers", what, label, None, None, size)

    def add_weight_gradients(self, label: str, back: BackwardMemory) -> None:
        """Add the gradients of weights that are there: of this block, and of the blocks whose backward is done. With several
        micro-batches gradients are held all the time, so `add_standing` adds them."""
        if self.sums:
            return
        for name, size in back.weights.items():
            self.add_weight_gradient(label, name, size)
        for k, item in enumerate(self.block_memories[label].storages.block.items):
            # Calls behind the item at work have left their gradients. The one at work has not yet while it runs, or before its unit begins.
            if isinstance(item, Call) and k >= back.at + (back.inside is not None or not back.begun):
                inner = self.label_of[item.prefix]
                for name, size in self._gradients_after(inner).items():
                    self.add_weight_gradient(inner, name, size)

    def add_gradients(self, label: str, back: BackwardMemory) -> int:
        """Add the gradients of values that are on their way. Returns their bytes."""
        block_memory = self.block_memories[label]
        item = block_memory.storages.block.items[back.at]
        # One tensor may be the gradient of several values. It gets the name of the first, so its bytes count once.
        of = {g: value for value, g in reversed(back.by_value.items())}
        of = {g: item.inputs[k] for k, g in back.at_work.items()} | of
        for gradient, value in of.items():
            name = block_memory.storages.block.values[value].name or _maker_name(block_memory, value)
            self.add("buffers", f"gradient of {name}", label, value, None, gradient.num_bytes)
        for value, size in back.waiting.items():
            name = block_memory.storages.block.values[value].name
            self.add("buffers", f"gradient of {name}, which another part also makes", label, value, None, size)
        return sum(g.num_bytes for g in of) + sum(back.waiting.values())

    def add_inside_call(self, label: str, moment: Moment) -> None:
        """Add what is held at a moment of the backward of one copy. If the block is recomputed, it may be in the recomputation."""
        block_memory, given = self.block_memories[label], arriving_gradients(self.block_memories[label])
        backward = [*BackwardMemory(block_memory, dict(given)).moments()]
        if moment in backward:
            self.add_backward_moment(label, backward.index(moment), given)
            return
        waiting = Moment(flying=sum(g.num_bytes for g in given.values()))
        recomputation = [m + waiting for m in block_memory.recomputation_moments()]
        self.add_forward_moment(label, recomputation.index(moment), recomputed=True)
        for value, gradient in given.items():
            self.add(
                "buffers", f"gradient of {_maker_name(block_memory, value)}", label, value, None, gradient.num_bytes
            )

    def _gradients_after(self, label: str) -> dict[str, int]:
        """Gradients of a block's weights once its backward is done."""
        back = BackwardMemory(self.block_memories[label], arriving_gradients(self.block_memories[label]))
        for _ in back.moments():
            pass
        return back.weights

    def add_saved(self, label: str, numbers: range, skip: Key | None = None) -> None:
        """Add what the items of these numbers are the first to keep for backward. A called block is opened to its own tensors."""
        block_memory = self.block_memories[label]
        for number in numbers:
            for key in block_memory.saved_at[number]:
                # A storage counts at the first item that keeps it, which frees it last. What crosses the border is the caller's.
                if block_memory.first_saver[key] != number or key in block_memory.border or key == skip:
                    continue
                item = block_memory.storages.block.items[number]
                if key.kind == "call" and isinstance(item, Call):
                    inner = self.label_of[item.prefix]
                    if block_memory.storages.size[key]:
                        self.add_saved_inside(inner)
                else:
                    self.add_storage("activations", label, key, block_memory.storages.size[key])

    def add_saved_inside(self, label: str) -> None:
        """Add what a copy of a block keeps for backward; if it is recomputed, only what the plan keeps."""
        block_memory = self.block_memories[label]
        if block_memory.storages.plan.recompute == "none":
            self.add_saved(label, range(len(block_memory.storages.block.items)))
            return
        self.add_kept_results(label, range(len(block_memory.storages.block.items)))

    def add_kept_results(self, label: str, numbers: Iterable[int]) -> None:
        """Results that stay of these items of a block until it runs again."""
        block_memory = self.block_memories[label]
        for number in numbers:
            for key in block_memory.keys_kept_for_recompute[number]:
                self.add_storage("activations", label, key, block_memory.storages.size[key])

    def add_storage(self, kind: str, label: str, key: Key, size: int) -> None:
        """Add one storage. Its key says what it is."""
        block_memory = self.block_memories[label]
        s = block_memory.storages
        if key.kind == "extra":
            self.add(kind, f"kept by {key.op} beside its operands and result", label, None, None, size, op=key.op)
        elif key.kind == "operand":
            op = next(o for o in s.block.ops if o.name == key.op)
            value, edge = op.inputs[key.number], s.plan.sites[op.name].inputs[key.number]
            self.add(kind, f"operand {key.number} of {op.name}, as it needs it", label, value, edge.dst.forward, size)
        else:
            what = f"{_maker_name(block_memory, key.value)}{', as it is sent on' if key.kind == 'delivered' else ''}"
            self.add(kind, what, label, key.value, _result_placements(block_memory, key), size)

    def add_weight_gradient(self, label: str, name: str, size: int) -> None:
        block, param = self.block_memories[label].storages.block, self.blocks[label].params.get(name)
        value = next((v for v, x in enumerate(block.values) if x.kind == "parameter" and x.name == name), None)
        self.add("grads", f"gradient of {name}", label, value, param.stored if param else None, size)

    def add_work(self, label: str, name: str, phase: str, size: int) -> None:
        self.add(
            "buffers",
            f"while {name} runs {phase}: operands on their way, results, gathered weights",
            label,
            None,
            None,
            size,
            op=name,
        )


def _run_to_moment(moments: Iterable[Moment], index: int) -> Moment:
    """Moment number `index`. The simulation stops there, so that its state is that of this moment."""
    return next(islice(moments, index, None))


def _maker_name(block_memory: BlockMemory, value: int) -> str:
    """Return the text `result of mlp.up_proj/linear`, or the name of what no operator of the block makes."""
    for item in block_memory.storages.block.items:
        if value in item.outputs:
            return f"result of {item.name if isinstance(item, Op) else item.prefix}"
    computed = block_memory.storages.block.values[value].computed
    return "computed from the inputs before the first operator" if computed else "input of the block"


def _result_placements(block_memory: BlockMemory, key: Key) -> Placements | None:
    """Placements of a result as its operator makes it, or as it is delivered; None if no operator of this block makes it."""
    for op in block_memory.storages.block.ops:
        if key.value in op.outputs:
            edge = block_memory.storages.plan.sites[op.name].outputs[op.outputs.index(key.value)]
            return edge.dst.forward if key.kind == "delivered" else edge.src.forward
    return None
