"""Memory of one GPU, walked along forward, backward and optimizer step.

What stays: weights, gradients, optimizer states. What grows in forward and shrinks in backward: activations that
autograd keeps. On top of both the tensors in flight: an op's operands and results, gradients on their way.
The peak is the highest point of the walk. The input batch, the allocator's fragmentation and the workspaces of
kernels and of NCCL are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from planner_core.graph import ITEM_BYTES, Block, Graph, Op
from planner_core.hardware import CostModel
from planner_core.pinned import rows_at
from planner_core.placement import Placements, local_shape
from planner_core.plan import BlockPlan
from planner_core.rules import is_heavy
from planner_core.rules_math import is_view, loss_bytes, shrinks_kept
from planner_core.saving import kept_results, root, viewed


@dataclass
class _BlockMemory:
    """One copy of a block: bytes of state, bytes kept by forward, and how far above that the walk rises."""

    params: int = 0
    grads: int = 0
    states: int = 0
    kept: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    largest_param: int = 0


def walk(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> dict[str, int]:
    """What fills the GPU at the peak of a step in the steady state (second step on), in bytes: params, grads, optimizer,
    activations, buffers (everything in flight), which add up to peak. Gradients are those there at that moment: none
    where the peak stands at the end of forward."""
    kept = kept_results(graph)
    parts = {label: _block_memory(label, bp, graph, model, kept) for label, bp in blocks.items()}
    copies = {label: len(bp.prefixes) for label, bp in blocks.items()}
    params = sum(p.params * copies[b] for b, p in parts.items())
    states = sum(p.states * copies[b] for b, p in parts.items())
    grads = sum(p.grads * copies[b] for b, p in parts.items())
    step_temporary = 2 * max(p.largest_param for p in parts.values())
    moments = [*_timeline(blocks, graph, parts), _Moment(0, grads, step_temporary)]
    top = max(moments, key=lambda m: m.total)
    return {
        "params": params, "grads": top.grads, "optimizer": states, "activations": top.kept, "buffers": top.flying,
        "peak": params + states + top.total,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Moment:
    """Bytes at one point of a step, on top of weights and optimizer states."""

    kept: int
    grads: int
    flying: int

    @property
    def total(self) -> int:
        return self.kept + self.grads + self.flying


def _timeline(blocks: Mapping[str, BlockPlan], graph: Graph, parts: Mapping[str, _BlockMemory]) -> Iterator[_Moment]:
    """The high points: one in each copy's forward and backward."""
    order = _labels(blocks, graph)
    top, kept = parts[""], 0
    for label in order:
        p = parts[label]
        yield _Moment(kept + p.kept, 0, max(0, p.forward_peak - p.kept))
        kept += p.kept
    # the top block holds the loss: its rise comes on top of everything kept
    yield _Moment(kept + top.kept, 0, max(0, max(top.forward_peak, top.backward_peak) - top.kept))
    grads = top.grads
    for label in reversed(order):
        p = parts[label]
        yield _Moment(kept, grads, max(0, p.backward_peak - p.kept))
        kept -= p.kept
        grads += p.grads


def _labels(blocks: Mapping[str, BlockPlan], graph: Graph) -> list[str]:
    by_prefix = {p: label for label, bp in blocks.items() for p in bp.prefixes if label}
    return [by_prefix[call.prefix] for call in graph.calls()]


def _block_memory(
    label: str, bp: BlockPlan, graph: Graph, model: CostModel, kept: Mapping[str, set[int]]
) -> _BlockMemory:  # fmt: skip
    block = graph.blocks[label.partition("#")[0]] if label else graph.top
    found = _BlockMemory()
    _add_state(found, block, bp, model)
    recompute = bool(label) and model.workload.recompute == "full"
    _Walk(block, bp, model, recompute, kept[block.name] if label else set()).run(found)
    return found


def _add_state(found: _BlockMemory, block: Block, bp: BlockPlan, model: CostModel) -> None:
    for value in block.values:
        param = bp.params.get(value.name) if value.kind == "parameter" else None
        if param is None:
            continue
        item = ITEM_BYTES[value.meta.dtype]
        elements = int(np.prod(local_shape(value.meta.shape, param.stored, model.sizes), dtype=np.int64))
        found.params += elements * item
        if value.grad:
            found.grads += elements * item
            found.states += elements * model.workload.state_bytes(item)
            found.largest_param = max(found.largest_param, elements * item)


@dataclass
class _Walk:
    """Forward then backward through one block, on local sizes."""

    block: Block
    plan: BlockPlan
    model: CostModel
    recompute: bool
    kept_results: set[int]
    made: dict[int, int] = field(default_factory=dict)  # storage -> bytes, as its op leaves it
    viewed: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)  # storage -> bytes, as delivered where that is another tensor

    def run(self, found: _BlockMemory) -> None:
        ops = self.block.ops
        self.viewed = viewed(self.block)
        for op in ops:
            self._sizes(op)
        saved = [self._saved(op) for op in ops]
        keeps: dict[object, int] = {}
        first: dict[object, int] = {}
        for position, items in enumerate(saved):
            for key, size in items.items():
                keeps[key] = size
                first.setdefault(key, position)
        found.kept = sum(keeps.values())
        found.forward_peak = self._forward(ops, saved)
        found.backward_peak = self._backward(ops, keeps, first, found.grads)
        if self.recompute:
            inner = found.kept
            found.kept = sum(size for key, size in keeps.items() if isinstance(key, tuple) and key[0] == "in")
            found.backward_peak += inner

    def root(self, value: int) -> int:
        return root(self.block, value)

    def size(self, value: int, placements: Placements) -> int:
        meta = self.block.values[value].meta
        return (
            int(np.prod(local_shape(meta.shape, placements, self.model.sizes), dtype=np.int64)) * ITEM_BYTES[meta.dtype]
        )

    def _sizes(self, op: Op) -> None:
        site = self.plan.sites[op.name]
        for value, edge in zip(op.inputs, site.inputs, strict=True):
            if self.block.values[value].kind == "activation" and root(self.block, value) not in self.made:
                self.given.setdefault(value, self.size(value, edge.src.forward))
        for value, edge in zip(op.outputs, site.outputs, strict=True):
            if self.root(value) == value:
                self.made[value] = self.size(value, edge.src.forward)
            if any(s.collective for s in edge.forward):
                self.given[value] = self.size(value, edge.dst.forward)

    def _saved(self, op: Op) -> dict[object, int]:
        """Storages that autograd keeps for this op: ("in", v) delivered, ("own", v) as made, or anonymous."""
        found: dict[object, int] = {}
        for value in op.saved:
            v = self.block.values[value]
            if v.kind == "parameter":
                continue
            if v.kind == "constant":
                continue
            at = value
            made_here = value in op.outputs and value not in op.inputs
            while at not in self.given or made_here:
                if at not in self.viewed:
                    break
                at, made_here = self.viewed[at], False
            if at in self.given and not made_here:
                found["in", at] = self.given[at]
            elif at in self.made and at not in self.kept_results:
                found["own", at] = self.made[at]
        chosen = rows_at(self.block, op, self.plan.sites[op.name])
        ins = [self.block.values[v].meta for v in op.inputs]
        if op.fn == "cross_entropy":
            found["extra", op.name, 0] = self._loss(op)[0]
            return found
        for k, meta in enumerate(op.saved_extra):
            parts = [
                n for row, n in zip(chosen, self.model.sizes, strict=True)
                if row.splits_work and shrinks_kept(op, row.label, meta.shape, [m.shape for m in ins])
            ]  # fmt: skip
            found["extra", op.name, k] = meta.num_bytes // int(np.prod(parts, dtype=int))
        return found

    def _loss(self, op: Op) -> tuple[int, int]:
        """Local bytes that a cross-entropy keeps, and uses in backward beside the gradient of its logits."""
        site = self.plan.sites[op.name]
        meta = self.block.values[op.inputs[0]].meta
        shape = local_shape(meta.shape, site.inputs[0].dst.forward, self.model.sizes)
        classes = any(row.label == "classes" for row in rows_at(self.block, op, site))
        return loss_bytes(op, shape, ITEM_BYTES[meta.dtype], classes)

    def _forward(self, ops: tuple[Op, ...], saved: list[dict[object, int]]) -> int:
        last = {self.root(v): i for i, op in enumerate(ops) for v in (*op.inputs, *op.outputs)}
        kept: dict[object, int] = {}
        flying: dict[int, int] = {}
        held = self._held(ops)
        peak = 0
        for i, op in enumerate(ops):
            for v in op.outputs:
                root = self.root(v)
                flying[root] = self.made.get(root, 0) + self.given.get(v, 0)
            now = sum(size for root, size in flying.items() if ("own", root) not in kept and ("in", root) not in kept)
            kept.update(saved[i])
            peak = max(peak, now + sum(kept.values()))
            flying = {r: s for r, s in flying.items() if last.get(r, i) > i or r in self.block.outputs or r in held}
        return peak

    def _held(self, ops: tuple[Op, ...]) -> set[int]:
        """What the model's own code holds until it returns: the logits that go to the loss, and out beside it."""
        if not any(op.fn == "cross_entropy" for op in ops):
            return set()
        last = next((op for op in reversed(ops) if is_heavy(op) and op.fn != "cross_entropy"), None)
        return {self.root(v) for v in last.outputs} if last else set()

    def _backward(self, ops: tuple[Op, ...], keeps: dict[object, int], first: dict[object, int], grads: int) -> int:
        """Above what other copies keep: this copy's kept activations, its gradients so far and gradients in flight."""
        kept = sum(keeps.values())
        dying: dict[int, int] = {}
        for key, position in first.items():
            dying[position] = dying.get(position, 0) + keeps[key]
        results = [v for v in self.block.outputs if self.block.values[v].kind == "activation"]
        flying = {self.root(v): self._gradient(v) for v in results}
        done = peak = 0
        for i in range(len(ops) - 1, -1, -1):
            summed, fresh = self._back(ops[i], flying)
            done += summed
            peak = max(peak, kept + min(done, grads) + fresh + sum(flying.values()))
            kept -= dying.get(i, 0)
            passed_on = {self.root(v) for v in ops[i].inputs}
            for v in ops[i].outputs:
                if self.root(v) not in passed_on:
                    flying.pop(self.root(v), None)
        return peak

    def _back(self, op: Op, flying: dict[int, int]) -> tuple[int, int]:
        """Backward of one op puts its operands' gradients in flight; bytes of gradients done, and needed for the moment."""
        site = self.plan.sites[op.name]
        done = fresh = 0
        for v, edge in zip(op.inputs, site.inputs, strict=True):
            value = self.block.values[v]
            if not value.grad:
                continue
            if value.kind == "parameter":
                done += self.size(v, edge.src.forward)
                if any(s.collective for s in edge.forward):  # gathered again, and its whole gradient beside it
                    fresh += 2 * self.size(v, edge.dst.forward)
            elif not (is_view(op) and self.root(v) == self.root(op.outputs[0])):
                # a gradient that is padded to be summed later is as large as the whole
                flying[self.root(v)] = max(self.size(v, edge.dst.forward), self.size(v, edge.src.gradient))
        if op.fn == "cross_entropy":  # the gradient of its log-softmax, beside that of the logits
            fresh += self._loss(op)[1]
        return done, fresh

    def _gradient(self, value: int) -> int:
        return self.made.get(value, 0) or self.given.get(value, 0)
