"""The number of passes of a memory-bound operator over its operands and results, if it runs by itself or in a fused chain.

A pass reads or writes all of one tensor. Run by itself (eager), an operator reads its operands and writes its results. In backward
it reads the result's gradient once for each operand that gets a gradient, reads what autograd kept, and writes the gradients. If n
operators read a tensor, its n gradients are summed, with three passes for each one after the first. `torch.compile` fuses the
operators between two products. Then only tensors that enter or leave such a chain pass through memory, once.

Checked against counts of a Llama layer in bytes per token, H hidden, F the inner width: of two RMSNorms, two sums and
`silu(gate) * up` a compiled forward moves 16 H + 6 F and an eager one 84 H + 10 F (`tests/ops/test_traffic.py`).
Products and attention have kernels of their own and count only the sums of gradients here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from planner_core.core import Block, Op
from planner_core.ops.operators import AS_RUN, Kind
from planner_core.ops.registry import is_free, lookup_table_operand, operator

FUSED = frozenset({Kind.NORM, Kind.ELEMENTWISE, Kind.CAST, Kind.RANDOM, Kind.MOVE, Kind.ALONG, Kind.LOSS, Kind.CREATE})
"""Kinds that `torch.compile` fuses with their neighbours."""
TIMED_WITH_BYTES = frozenset({Kind.PRODUCT, Kind.ATTENTION, Kind.EXPERTS})
"""Kinds whose kernel times already contain the bytes of operands and results."""
NORM_KERNEL = "norm"
"""How the operators of a norm run (`AS_RUN`) that is one kernel."""
SUM_PASSES = 3
"""To add a second gradient to a first one reads both and writes one."""

BROADCAST_PASSES = 3.0
"""Passes over tensors of the result's shape that make the gradient of a broadcast operand: two reads and a write."""


@dataclass(frozen=True, slots=True)
class MemoryPasses:
    """Passes over memory of one op, at each of its ends (operands, then results), forward and backward."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def mix(self, other: MemoryPasses, share: float) -> MemoryPasses:
        """Return a mean of these and the other's, in which the other's have the weight `share`."""

        def mean(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
            return tuple((1 - share) * x + share * y for x, y in zip(a, b, strict=True))

        return MemoryPasses(mean(self.forward, other.forward), mean(self.backward, other.backward))


_CACHED_PASSES: OrderedDict[tuple[int, float], tuple[Block, Mapping[str, MemoryPasses]]] = OrderedDict()
"""Cached results of the last blocks. A block that is held here keeps its id."""
MAX_CACHED_BLOCKS = 64


def memory_passes(block: Block, fused: float) -> Mapping[str, MemoryPasses]:
    """Return the passes of each op of a block, by name. `fused` is the share of the chains that is fused: 0 eager, 1 compiled."""
    key = (id(block), fused)
    if key not in _CACHED_PASSES:
        # The block is stored with the result: as long as it lives, no other block can get its id.
        _CACHED_PASSES[key] = (block, _count_passes(block, fused))
        if len(_CACHED_PASSES) > MAX_CACHED_BLOCKS:
            _CACHED_PASSES.popitem(last=False)
    return _CACHED_PASSES[key][1]


def _count_passes(block: Block, fused: float) -> Mapping[str, MemoryPasses]:
    alone = {} if fused == 1 else _EagerPasses(block).count()
    chains = {} if fused == 0 else _FusedPasses(block).count()
    mixed = {name: one.mix(chains[name], fused) for name, one in alone.items()} if 0 < fused < 1 else alone or chains
    return {**mixed, **_norm_kernels(block)}


def find_norms(block: Block) -> list[tuple[Op, ...]]:
    """Return the norms of a block that are several operators: those of one module, with a root of a mean of squares among them."""
    scopes: dict[str, list[Op]] = {}
    for op in block.ops:
        scopes.setdefault(op.site.scope, []).append(op)
    return [
        tuple(ops)
        for ops in scopes.values()
        if {"pow", "mean", "rsqrt"} <= {op.fn for op in ops}
        and all(is_free(op) or operator(op.fn).kind in FUSED for op in ops)
    ]


def _norm_kernels(block: Block) -> Mapping[str, MemoryPasses]:
    """Return the passes of norms that run as one kernel each: nothing else is in their chains."""
    passes: dict[str, MemoryPasses] = {}
    for ops in find_norms(block):
        if all(op.attrs.get(AS_RUN) == NORM_KERNEL for op in ops):
            inside = {op.name for op in ops}
            read = {v for i in block.items if not isinstance(i, Op) or i.name not in inside for v in i.inputs}
            given = tuple(v for op in ops for v in op.outputs if v in read | set(block.outputs))
            passes |= _FusedPasses(replace(block, items=ops, outputs=given)).count()
    return passes


def _num_elements(block: Block, value: int) -> int:
    return math.prod(block.values[value].meta.shape)


LOSS_PASSES = {"fused": (1.0, 2.0), "chunked": (1.0, 2.0), "compiled": (1.0, 2.0), "whole": (3.0, 2.0)}
"""Passes over the logits, forward and backward, of a loss that runs so. They are read once, and read and overwritten by their gradient; in
float32 (`whole`) the exponentials are written first."""


def _stated_passes(block: Block, op: Op, fused: bool) -> MemoryPasses | None:
    """Return the passes that the catalogue gives for an op: over its first operand (a loss) or its result (a lookup)."""
    stated = operator(op.fn).memory_passes
    if stated is None:
        return None
    forward, backward = LOSS_PASSES.get(str(op.attrs.get(AS_RUN)), stated[2:] if fused else stated[:2])
    ends = len(op.inputs) + len(op.outputs)
    at = len(op.inputs) if operator(op.fn).kind is Kind.LOOKUP else 0
    return MemoryPasses(
        tuple(forward if i == at else 0.0 for i in range(ends)),
        tuple(backward if i == at and block.has_backward(op) else 0.0 for i in range(ends)),
    )


class _EagerPasses:
    """Counts the passes of ops that each run by themselves."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.readers: dict[int, int] = {}
        for item in block.items:
            for v in {*item.inputs}:
                self.readers[v] = self.readers.get(v, 0) + 1

    def count(self) -> Mapping[str, MemoryPasses]:
        return {op.name: self._count_op(op) for op in self.block.ops}

    def _count_op(self, op: Op) -> MemoryPasses:
        number = len(op.inputs)
        kind = operator(op.fn).kind
        # The passes that add n gradients of one tensor belong to no reader more than to another: each bears 1/n.
        summed = [self._sum_passes(v) for v in op.inputs]
        if not self.block.has_backward(op):
            summed = [0.0] * number
        nothing = MemoryPasses((0.0,) * (number + len(op.outputs)), (*summed, *(0.0 for _ in op.outputs)))
        if is_free(op) or kind in TIMED_WITH_BYTES:
            return nothing
        stated = _stated_passes(self.block, op, fused=False)
        if stated is not None:
            return stated
        table = lookup_table_operand(op)
        forward = [0.0 if i == table else 1.0 for i in range(number)] + [1.0] * len(op.outputs)
        backward = [a + b for a, b in zip(self._backward_passes(op), [*summed, *[0.0] * len(op.outputs)], strict=True)]
        return MemoryPasses(tuple(forward), tuple(backward))

    def _sum_passes(self, value: int) -> float:
        """Return this reader's share of the passes that sum the gradients of an operand."""
        v, n = self.block.values[value], self.readers.get(value, 1)
        # Example: 3 readers give 3 gradients, which 2 additions of 3 passes sum: 6 passes, so 2 for each reader.
        return SUM_PASSES * (n - 1) / n if v.grad and v.kind == "activation" else 0.0

    def _backward_passes(self, op: Op) -> list[float]:
        """Return the passes of the op's own backward over each of its operands and results."""
        block, one, number = self.block, operator(op.fn), len(op.inputs)
        passes = [0.0] * (number + len(op.outputs))
        if not block.has_backward(op):
            return passes
        result = _num_elements(block, op.outputs[0])
        for i, v in enumerate(op.inputs):
            whole = _num_elements(block, v) >= result or one.kind in (Kind.NORM, Kind.ALONG)
            if not block.values[v].grad or (one.passes_gradient_through and whole):
                continue
            if i == 0 or one.kind is not Kind.NORM:  # a norm's kernel makes its weight's gradient in the same pass
                # The gradient of a broadcast operand is written in the shape of the result too, and read again to be summed.
                passes[number] += 1.0 if whole else BROADCAST_PASSES
                passes[i] += 1.0
        ends = (*op.inputs, *op.outputs)
        for v in op.saved:
            if v in ends:
                passes[ends.index(v)] += 1.0
        return passes


@dataclass
class _FusedPasses:
    """Chains of ops between products. Ops are in one chain if their *depth*, the number of products before them, is equal."""

    block: Block
    depth: dict[str, int] = field(default_factory=dict)
    maker: dict[int, Op] = field(default_factory=dict)
    source: dict[int, int] = field(default_factory=dict)
    outside: dict[int, int] = field(default_factory=dict)
    reread: set[tuple[int, int]] = field(default_factory=set)
    read: set[tuple[int, int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        depths: dict[int, int] = {}
        for item in self.block.items:
            # Example: norm, product, silu, product have the depths 0, 0, 1, 1. The result of a product is one deeper than its operands.
            at = max((depths.get(v, 0) for v in item.inputs), default=0)
            fuses = isinstance(item, Op) and self._fuses(item)
            if isinstance(item, Op):
                self.depth[item.name] = at
                self.maker.update(dict.fromkeys(item.outputs, item))
                if is_free(item) and item.inputs:
                    self.source.update(dict.fromkeys(item.outputs, self._source(item.inputs[0])))
            depths.update(dict.fromkeys(item.outputs, at if fuses else at + 1))
        self._count_outside()
        seen: set[tuple[int, int]] = set()
        for op in self.block.ops:
            if self._fuses(op):
                self._add_reread(op.saved, self.depth[op.name], seen)

    def _fuses(self, op: Op) -> bool:
        return is_free(op) or operator(op.fn).kind in FUSED

    def _source(self, value: int) -> int:
        return self.source.get(value, value)

    def _is_chain_result(self, value: int, depth: int) -> bool:
        """Return whether a value is made in the chain of this depth."""
        op = self.maker.get(self._source(value))
        return op is not None and self._fuses(op) and self.depth[op.name] == depth

    def _count_outside(self) -> None:
        """Count the products, chains and callers outside of a value's own chain that read it."""
        seen: set[tuple[int, object]] = set()
        for number, item in enumerate(self.block.items):
            fuses = isinstance(item, Op) and self._fuses(item)
            who: object = self.depth[item.name] if fuses and isinstance(item, Op) else ("item", number)
            for v in map(self._source, item.inputs):
                free = isinstance(item, Op) and is_free(item)
                if free or (isinstance(who, int) and self._is_chain_result(v, who)) or (v, who) in seen:
                    continue
                seen.add((v, who))
                self.outside[v] = self.outside.get(v, 0) + 1
        for v in map(self._source, self.block.outputs):
            self.outside[v] = self.outside.get(v, 0) + 1

    def count(self) -> Mapping[str, MemoryPasses]:
        return {op.name: self._count_op(op) for op in self.block.ops}

    def _count_op(self, op: Op) -> MemoryPasses:
        number = len(op.inputs)
        kind = operator(op.fn).kind
        if is_free(op) or kind in TIMED_WITH_BYTES:
            nothing = (0.0,) * (number + len(op.outputs))
            return MemoryPasses(nothing, nothing)
        stated = _stated_passes(self.block, op, fused=True)
        if stated is not None:
            return stated
        # A kind that is neither fused nor counted elsewhere (a gather, a pooling) runs as it does without a compiler.
        if kind not in FUSED:
            return _EagerPasses(self.block)._count_op(op)
        depth, runs = self.depth[op.name], self.block.has_backward(op)
        forward = [self._first_touch(v, depth, "read") for v in op.inputs]
        written = [
            float(self._source(o) in self.outside or (o not in self.outside and not self._is_used(o)))
            for o in op.outputs
        ]
        if not runs:
            return MemoryPasses((*forward, *written), (0.0,) * (number + len(op.outputs)))
        back = [self._gradient_written(op, v, depth) for v in op.inputs]
        for i, v in enumerate(op.inputs):
            if (self._source(v), depth) in self.reread and not self._is_chain_result(v, depth):
                back[i] += self._first_touch(v, depth, "kept")
        ends = [float(self.outside.get(o, 0)) if self.block.values[o].grad else 0.0 for o in op.outputs]
        ends = [n + float((o, depth) in self.reread) for n, o in zip(ends, op.outputs, strict=True)]
        return MemoryPasses((*forward, *written), (*back, *ends))

    def _is_used(self, value: int) -> bool:
        return any(value in map(self._source, item.inputs) for item in self.block.items)

    def _first_touch(self, value: int, depth: int, what: str) -> float:
        """Return 1 if the chain touches a value from outside for the first time, else 0."""
        source = self._source(value)
        if self._is_chain_result(value, depth) or (source, depth, what) in self.read:
            return 0.0
        self.read.add((source, depth, what))
        return 1.0

    def _gradient_written(self, op: Op, value: int, depth: int) -> float:
        """Return 1 if the chain writes the gradient of an operand, else 0. A sum hands on its result's gradient."""
        v = self.block.values[value]
        if not v.grad or operator(op.fn).passes_gradient_through:
            return 0.0
        return self._first_touch(value, depth, "gradient")

    def _add_reread(self, values: Iterable[int], depth: int, seen: set[tuple[int, int]]) -> None:
        """Add to `reread` what backward reads for values that an op keeps: the value itself if it passed through memory, or else the
        values from which it is made again. `seen` are the values and depths that were looked at, since many paths lead to one value."""
        todo = list(values)
        while todo:
            source = self._source(todo.pop())
            if (source, depth) in seen:
                continue
            seen.add((source, depth))
            if not self._is_chain_result(source, depth) or source in self.outside:
                self.reread.add((source, depth))
            else:
                todo += self.maker[source].inputs
