"""Memory of one GPU, walked along forward, backward and optimizer step.

What stays: weights, gradients, optimizer states. What grows in forward and shrinks in backward: activations that
autograd keeps. On top of both the tensors in flight: an op's operands and results, gradients on their way.
The peak is the highest point of the walk. The input batch, the allocator's fragmentation and the workspaces of
kernels and of NCCL are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from planner_core.graph import ITEM_BYTES, Block, Graph, Op
from planner_core.hardware import CostModel
from planner_core.placement import Placements, Shard, local_shape
from planner_core.plan import BlockPlan, Edge
from planner_core.rules_math import is_view


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
    """params, grads, optimizer, activations, buffers and peak, in bytes, in the steady state (second step on)."""
    parts = {label: _block_memory(label, bp, graph, model) for label, bp in blocks.items()}
    copies = {label: len(bp.prefixes) for label, bp in blocks.items()}
    total = lambda what: sum(getattr(parts[b], what) * copies[b] for b in parts)  # noqa: E731
    params, grads, states = total("params"), total("grads"), total("states")
    timeline = _timeline(blocks, graph, parts, model)
    step_temporary = 2 * max(p.largest_param for p in parts.values())
    peak = params + states + max(timeline, grads + step_temporary)
    kept = total("kept")
    return {
        "params": params, "grads": grads, "optimizer": states, "activations": kept,
        "buffers": max(0, peak - params - states - grads - kept), "peak": peak,
    }  # fmt: skip


def _timeline(blocks: Mapping[str, BlockPlan], graph: Graph, parts: Mapping[str, _BlockMemory], model: CostModel) -> int:
    """Highest sum of kept activations, gradients so far and tensors in flight, over forward and backward."""
    order = [bp_label for bp_label in _labels(blocks, graph)]
    top = parts[""]
    kept = peak = 0
    for label in order:
        peak = max(peak, kept + parts[label].forward_peak)
        kept += parts[label].kept
    # the top block holds the loss: its rise comes on top of everything kept
    peak = max(peak, kept + top.forward_peak, kept + top.backward_peak)
    grads = top.grads
    for label in reversed(order):
        peak = max(peak, kept + grads + parts[label].backward_peak)
        kept -= parts[label].kept
        grads += parts[label].grads
    return peak


def _labels(blocks: Mapping[str, BlockPlan], graph: Graph) -> list[str]:
    by_prefix = {p: label for label, bp in blocks.items() for p in bp.prefixes if label}
    return [by_prefix[call.prefix] for call in graph.calls()]


def _block_memory(label: str, bp: BlockPlan, graph: Graph, model: CostModel) -> _BlockMemory:
    block = graph.blocks[label.partition("#")[0]] if label else graph.top
    found = _BlockMemory()
    _add_state(found, block, bp, model)
    _Walk(block, bp, model, recompute=bool(label) and model.workload.recompute == "full").run(found)
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
    made: dict[int, int] = field(default_factory=dict)  # storage -> bytes, as its op leaves it
    given: dict[int, int] = field(default_factory=dict)  # storage -> bytes, as delivered where that is another tensor

    def run(self, found: _BlockMemory) -> None:
        ops = self.block.ops
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
            found.kept = sum(size for (kind, v), size in ((k, s) for k, s in keeps.items() if isinstance(k, tuple)) if kind == "in")
            found.backward_peak += inner

    def root(self, value: int) -> int:
        storage = self.block.values[value].storage
        return value if storage < 0 else storage

    def size(self, value: int, placements: Placements) -> int:
        meta = self.block.values[value].meta
        return int(np.prod(local_shape(meta.shape, placements, self.model.sizes), dtype=np.int64)) * ITEM_BYTES[meta.dtype]

    def _sizes(self, op: Op) -> None:
        site = self.plan.sites[op.name]
        for value, edge in zip(op.inputs, site.inputs, strict=True):
            if self.block.values[value].kind == "activation" and value in self.block.inputs:
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
            root = self.root(value)
            if v.kind == "constant":
                continue
            as_operand = value in op.inputs
            delivered = next((x for x in (value, root) if x in self.given), None) if as_operand or value not in op.outputs else None
            if delivered is not None:
                found["in", delivered] = self.given[delivered]
            elif root in self.made:
                found["own", root] = self.made[root]
            elif root in self.given:
                found["in", root] = self.given[root]
        parts = self._parts(op)
        for k, meta in enumerate(op.saved_extra):
            found["extra", op.name, k] = meta.num_bytes // parts
        return found

    def _parts(self, op: Op) -> int:
        site = self.plan.sites[op.name]
        axes = set()
        for edge in (*[Edge(e.dst, e.dst) for e in site.inputs], *[Edge(e.src, e.src) for e in site.outputs]):
            axes |= {a for a, p in enumerate(edge.src.forward) if isinstance(p, Shard)}
        return int(np.prod([self.model.sizes[a] for a in axes], dtype=int))

    def _forward(self, ops: tuple[Op, ...], saved: list[dict[object, int]]) -> int:
        last = {self.root(v): i for i, op in enumerate(ops) for v in (*op.inputs, *op.outputs)}
        kept: dict[object, int] = {}
        flying: dict[int, int] = {}
        peak = 0
        for i, op in enumerate(ops):
            for v in op.outputs:
                root = self.root(v)
                flying[root] = self.made.get(root, 0) + self.given.get(v, 0)
            now = sum(size for root, size in flying.items() if ("own", root) not in kept and ("in", root) not in kept)
            kept.update(saved[i])
            peak = max(peak, now + sum(kept.values()))
            flying = {r: s for r, s in flying.items() if last.get(r, i) > i or r in self.block.outputs}
        return peak

    def _backward(self, ops: tuple[Op, ...], keeps: dict[object, int], first: dict[object, int], grads: int) -> int:
        """Above what other copies keep: this copy's kept activations, its gradients so far and gradients in flight."""
        kept = sum(keeps.values())
        dying: dict[int, int] = {}
        for key, position in first.items():
            dying[position] = dying.get(position, 0) + keeps[key]
        users: dict[int, int] = {}
        for i, op in enumerate(ops):
            for v in op.outputs:
                users[self.root(v)] = i
        flying = {self.root(v): self._gradient(v) for v in self.block.outputs if self.block.values[v].kind == "activation"}
        done = peak = 0
        for i in range(len(ops) - 1, -1, -1):
            op = ops[i]
            site = self.plan.sites[op.name]
            fresh = 0
            for v, edge in zip(op.inputs, site.inputs, strict=True):
                value = self.block.values[v]
                if not value.grad:
                    continue
                if value.kind == "parameter":
                    done += self.size(v, tuple(edge.src.forward))
                    fresh += self.size(v, edge.dst.forward) if any(s.collective for s in edge.forward) else 0
                elif not (is_view(op) and self.root(v) == self.root(op.outputs[0])):
                    flying[self.root(v)] = self.size(v, edge.dst.forward)
            peak = max(peak, kept + min(done, grads) + fresh + sum(flying.values()))
            kept -= dying.get(i, 0)
            for v in op.outputs:
                if users.get(self.root(v)) == i or self.root(v) == v:
                    flying.pop(self.root(v), None) if self.root(v) not in {self.root(x) for x in op.inputs} else None
        return peak

    def _gradient(self, value: int) -> int:
        return self.made.get(value, 0) or self.given.get(value, 0)


