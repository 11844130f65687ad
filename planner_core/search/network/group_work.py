"""What a group of operators costs in each of its strategies: compute, its own collectives, tensors kept for backward.

Example: the product x @ w and the view of its result are a group with four rows on each axis: Replicate, shard the rows of x,
shard the output features, shard the input features. On two axes it has 16 joint rows. `GroupWork.cost` has one cost for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

import numpy as np

from planner_core.core import Block, Op, Shard, root
from planner_core.cost import Bools, Component, CostModel, Ends, Floats, Ints, waited_seconds
from planner_core.cost.communication import Segments, collective_times
from planner_core.cost.compute import has_kernels, kernel_seconds, op_time
from planner_core.cost.memory import Rerun, is_recomputed
from planner_core.ops import (
    GroupStrategy,
    MemoryPasses,
    Row,
    extra_bytes,
    extra_saved_bytes,
    global_bytes,
    splits_saved_tensor,
)
from planner_core.search.network.factors import Costs, Factor, RuleCache, zero_costs
from planner_core.search.network.states import TensorStates, joint_parts


@dataclass(frozen=True, slots=True)
class OperatorCache:
    """What all networks of one block share, on any mesh of a cluster.

    `kernels`: seconds of an operator's kernels forward and backward, by its name, its chunks, and into how many parts each row splits it.
    `forms` [number of the group]: what `form_number` returned. `segments` [value]: its fused dims, and the extents of their parts.
    """

    kernels: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    forms: dict[int, int] = field(default_factory=dict)
    segments: dict[int, Segments] = field(default_factory=dict)


Tables = dict[tuple[object, ...], tuple[Costs, Bools]]
"""The cost and the possible entries of factors, by everything on which they depend."""


@dataclass(frozen=True, slots=True)
class BlockCache:
    """Values that all networks of one block on one mesh share, whatever ZeRO stages the weights may have.

    `seconds` [operator name] is what `GroupWork._op_seconds` computes, and `index` [form of the group] are the joint rows. Both are the
    same for each policy of recomputation. `states` are those of values, of weights by ZeRO stages too. `factors` are those of `tables`, by
    their variables too. The blocks of a model share `tables` and `index`, and
    `operators` are the same on every mesh of the cluster.
    """

    seconds: dict[str, tuple[Floats, Floats, Floats, Floats]] = field(default_factory=dict)
    index: dict[int, Ints] = field(default_factory=dict)
    states: dict[tuple[object, ...], TensorStates] = field(default_factory=dict)
    factors: dict[tuple[object, ...], Factor] = field(default_factory=dict)
    tables: Tables = field(default_factory=dict)
    rules: RuleCache = field(default_factory=RuleCache)
    operators: OperatorCache = field(default_factory=OperatorCache)

    def of_block(self, operators: OperatorCache) -> BlockCache:
        """Return the cache of another block of the model."""
        return BlockCache(index=self.index, tables=self.tables, operators=operators)


_numbers_of_forms = count()


@lru_cache(maxsize=65_536)
def _number_form(form: tuple[object, ...]) -> int:
    # Numbers are as good keys as forms, and are compared at once. A form that was dropped gets a new number, which shares nothing.
    return next(_numbers_of_forms)


def form_number(
    block: Block, strategy: GroupStrategy, segments: Callable[[int], Segments], passes: Mapping[str, MemoryPasses]
) -> int:
    """Return the number of a group's form: all on which its rows and its costs depend, but not its names and its place in the model.

    Example: the projections to keys and to values are of one form, and so are the layers of a model with and without a window, but for
    their attention. `segments` returns the fused dims of a value.
    """
    places: dict[int, int] = {}
    for op in strategy.ops:
        for v in (*op.inputs, *op.outputs):
            places.setdefault(v, len(places))

    def place(v: int) -> int:
        return places.get(v, -1)

    values = []
    for v in places:
        value = block.values[v]
        base = place(root(block, v))
        values.append((value.meta, value.kind, value.grad, value.parts, value.computed, base, segments(v)))
    ops = []
    for op in strategy.ops:
        of_op = passes[op.name]
        ends = tuple(tuple(map(place, side)) for side in (op.inputs, op.outputs, op.saved))
        saved_roots = tuple(place(root(block, v)) for v in op.saved)
        ops.append((op.fn, repr(op.attrs), ends, saved_roots, op.saved_extra, of_op.forward, of_op.backward))
    rows = {id(row): row for group_row in strategy.rows for row in group_row}
    numbers = {i: n for n, i in enumerate(rows)}
    choices = tuple(tuple(numbers[id(row)] for row in group_row) for group_row in strategy.rows)
    return _number_form((tuple(values), tuple(ops), tuple(map(_row_form, rows.values())), choices))


def _row_form(row: Row) -> tuple[object, ...]:
    segments = tuple(row.segments.items())
    limits = row.divides, row.exchanged, row.excludes, row.routed, row.within
    return row.name, row.inputs, row.outputs, row.internal, segments, limits


NO_ENDS = Ends()


@dataclass(frozen=True)
class UnitOptions:
    """The properties of one unit that do not follow from its block.

    `repeats`: number of copies of the block in the model. Nothing hides the first copy's gather and the last copy's
    reduction, so each copy bears 1 / `repeats` of them.
    `reruns`: the operators that run a second time in backward, and which parts of them run again.
    `kept_ops`: the operators whose results are kept although the block is recomputed.
    `saved_share`: the share of the block's other kept tensors that is held at the peak. It is 1 / `repeats` where the block
    is recomputed, since only one copy then has its activations at a time.
    `saved_by_calls`: values that the called blocks save for backward.
    `skipped_values`: values inside a run of equal calls. They are not variables of this network.
    `saved_by_readers`: results that the operator that reads them saves for backward.
    `ends`: the operators that run before the first unit and after the last one.
    `fixed_s` and `fixed_bytes`: seconds that every step takes, and bytes that every GPU holds during the whole step, under every plan.
    `at_least`: of two tensors that may be one, only one is counted. Of a recomputed block a reader counts none of its own (`saved_share`).
    """

    repeats: int = 1
    reruns: Mapping[str, Rerun] = field(default_factory=dict)
    kept_ops: Collection[str] = ()
    saved_share: float = 1.0
    saved_by_calls: Collection[int] = ()
    skipped_values: Collection[int] = ()
    saved_by_readers: Collection[int] = ()
    ends: Ends = NO_ENDS
    fixed_s: float = 0.0
    fixed_bytes: int = 0
    at_least: bool = False

    def share(self, op: Op) -> float:
        """Return the share of an operator's own results and saved tensors that is held at the peak."""
        return 1.0 if op.name in self.kept_ops else self.saved_share

    def counts_at_loss(self, group: str, num_uses: int) -> bool:
        """Return whether the weight that a group reads `num_uses` times is counted as it is gathered while the loss begins backward.

        What runs behind the last block, up to the loss, is one unit: its weights are gathered for backward before the loss
        runs, with all activations there. Only a sum that must not be above the walk counts them, since it is not matched to a walk
        (`memory_fit`): 0.1 % of the step of Llama-3-70B on 64 H100.
        """
        # Of a weight that two operators of a group read, one gathered copy may serve both, so it is not counted at all.
        return self.at_least and num_uses == 1 and group in self.ends.after


@dataclass(frozen=True)
class GroupWork:
    """A group of operators, and the joint rows `index` [joint row, axis] of its strategy."""

    block: Block
    strategy: GroupStrategy
    index: Ints
    model: CostModel
    options: UnitOptions
    passes: Mapping[str, MemoryPasses]
    is_saved_by_reader: Callable[[int], bool]
    cache: BlockCache = field(default_factory=BlockCache)

    @property
    def cost_key(self) -> tuple[object, ...]:
        """All on which `cost` depends except the form of the group, the mesh and the workload."""
        reruns = self.options.reruns
        inner = {v: (k, j) for k, op in enumerate(self.strategy.ops) for j, v in enumerate(op.outputs)}
        counted_here = {
            inner[v]
            for op in self.strategy.ops
            for v in self._saved_roots(op)
            if v in inner and self._counts_result(v, inner)
        }
        per_op = [
            (reruns.get(op.name), is_recomputed(op, reruns), op.name in self.options.kept_ops, self.options.share(op))
            for op in self.strategy.ops
        ]
        return frozenset(counted_here), *per_op

    def _saved_roots(self, op: Op) -> set[int]:
        """Return the tensors that an operator keeps for backward. A view stands for the tensor that it is a view of."""
        return {root(self.block, v) for v in op.saved} | (
            set(op.outputs) if op.name in self.options.kept_ops else set()
        )

    def _counts_result(self, value: int, inner: Collection[int]) -> bool:
        """Return whether the group counts a kept tensor that it makes, `inner` being all that it makes; else its reader does."""
        if self.is_saved_by_reader(value):
            return False
        # Attention keeps its result, and the projection behind it keeps a view of that. Both are one storage unless the view is
        # redistributed, so a sum that must not be too large counts the view alone.
        return not (
            self.options.at_least
            and any(self.is_saved_by_reader(v) and root(self.block, v) == value for v in inner if v != value)
        )

    def cost(self) -> Floats:
        """[component, joint row]: the cost of the group in each joint row."""
        cost = zero_costs(len(self.index))
        counted: set[int] = set()
        inner = {v for op in self.strategy.ops for v in op.outputs}
        for k, op in enumerate(self.strategy.ops):
            rerun = self.options.reruns.get(op.name)
            resends, recomputes = rerun is not None and rerun.sends, is_recomputed(op, self.options.reruns)
            forward, backward, sent, waits = self._op_seconds(k)
            cost[Component.FORWARD] += forward + waits[0]
            cost[Component.BACKWARD] += (
                backward + waits[1] + (forward if recomputes else 0.0) + (waits[0] if resends else 0.0)
            )
            # Communication is counted in a whole step, all other seconds in one micro-batch.
            cost[Component.COMMUNICATION] += self.model.workload.accumulate * (sent.sum(axis=0) + sent[0] * resends)
            counted.update(v for v in self._saved_roots(op) if v in inner and self._counts_result(v, inner))
            cost[Component.AFTER_FORWARD] += self._extra_saved_bytes(k) * self.options.share(op)
        maker = {v: k for k, op in enumerate(self.strategy.ops) for v in op.outputs}
        # A tensor that several operators of the group save is held once, so bytes are added after all of them were asked.
        for v in counted:
            share = self.options.share(self.strategy.ops[maker[v]])
            cost[Component.AFTER_FORWARD] += self.result_bytes(maker[v], v) * share
        for k in range(len(self.strategy.ops)):
            saves_exchanged = self.saves_exchanged_results(k)
            if saves_exchanged.any():  # few operators have such rows
                cost[Component.AFTER_FORWARD] += np.where(saves_exchanged, self._exchanged_bytes(k, counted), 0.0)
        return cost

    def _exchanged_bytes(self, k: int, counted: Collection[int]) -> Floats:
        """[joint row]: extra bytes that op k keeps if it exchanges its operands and results inside (`Split.exchanged`).

        The results in `counted` are counted already. Of any other result, the reader keeps the delivered tensor, and op k keeps its own.
        """
        op, total = self.strategy.ops[k], np.zeros(len(self.index))
        for v in op.outputs:
            if v in op.saved and v not in counted:
                total += self.result_bytes(k, v) * self.options.share(op)
        for i in range(len(op.inputs)) if op.name in self.options.kept_ops else ():
            sharded = [isinstance(r[k].inputs[i][0], Shard) for r in self.strategy.rows]
            local = self.block.values[op.inputs[i]].meta.num_bytes / self._num_parts(sharded)
            total += np.where(self._any_axis([i in r[k].exchanged for r in self.strategy.rows]), local, 0.0)
        return total

    def saves_exchanged_results(self, k: int) -> Bools:
        """[joint row]: whether op k saves the exchanged tensors in place of its results (`Split.exchanged`)."""
        return self._any_axis([bool(rows[k].exchanged) for rows in self.strategy.rows])

    def _any_axis(self, flags: list[bool]) -> Bools:
        """[joint row]: whether the row of some axis of several ranks has a flag; `flags` [row]."""
        on_any_axis: Bools = np.asarray((np.array(flags)[self.index] & (np.array(self.model.sizes) > 1)).any(axis=1))
        return on_any_axis

    def _op_seconds(self, k: int) -> tuple[Floats, Floats, Floats, Floats]:
        """Return seconds of op k, the same in all variants of a block.

        Returns its compute forward and backward [joint row], the collectives inside it [phase, joint row], and the seconds for which it
        waits for these [phase, joint row].
        """
        op = self.strategy.ops[k]
        cached = self.cache.seconds
        if op.name not in cached:
            kernels = self.kernel_seconds(k)
            cached[op.name] = (
                *op_time(op, kernels, self._moved_bytes(k), self.model),
                *self._internal_collectives(k, kernels),
            )
        return cached[op.name]

    def result_bytes(self, k: int, value: int) -> Floats:
        """[joint row]: local bytes of the result `value` as op k makes it."""
        j = self.strategy.ops[k].outputs.index(value)
        sharded = [isinstance(r[k].outputs[j][0], Shard) for r in self.strategy.rows]
        return self.block.values[value].meta.num_bytes / self._num_parts(sharded)

    def _num_parts(self, flags: list[bool]) -> Floats:
        """[joint row]: the number of parts of a dim that the rows with a flag split; `flags` [row]."""
        return joint_parts(np.array(flags), self.index, self.model.sizes)

    def extra_seconds_in_chunks(self, k: int, chunks: int, rows: Ints, joined_bytes: Floats) -> Floats:
        """[entry]: the extra seconds of compute in forward if op k makes its result in chunks.

        `rows` [entry] are joint rows. `joined_bytes` [entry] are the bytes that are read and written to join the chunks.
        """
        kernels, moved_bytes = self.kernel_seconds(k, chunks)[0][rows], self._moved_bytes(k)[0][rows] + joined_bytes
        forward, _ = op_time(self.strategy.ops[k], (kernels, kernels), (moved_bytes, moved_bytes), self.model)
        return np.asarray(forward - self._op_seconds(k)[0][rows])

    def kernel_seconds(self, k: int, chunks: int = 1) -> tuple[Floats, Floats]:
        """Return two arrays [joint row]: seconds of op k's kernels, forward (in `chunks` parts) and backward. Equal joint rows are
        priced once."""
        op, seconds = self.strategy.ops[k], np.zeros((2, len(self.index)))
        if not has_kernels(op):
            return seconds[0], seconds[1]
        rows = [r[k] for r in self.strategy.rows]
        # Many rows of the group give op k the same row, so each of these is known by the first row of the group that has it.
        first = np.array([next(i for i, other in enumerate(rows) if other is row) for row in rows])
        distinct, inverse = np.unique(first[self.index], axis=0, return_inverse=True)
        each = [self._joint_kernel_seconds(op, rows, joint, chunks) for joint in distinct.tolist()]
        forward, backward = np.array(each).T
        return forward[inverse.ravel()], backward[inverse.ravel()]

    def _joint_kernel_seconds(self, op: Op, rows: list[Row], joint: list[int], chunks: int) -> tuple[float, float]:
        """Return seconds of the kernels of `op`, forward and backward, if it runs `rows[joint[axis]]` on each axis.

        They depend only on the number of parts into which each row splits the operator, so other meshes share them.
        """
        parts: dict[int, int] = {}
        for row, size in zip(joint, self.model.sizes, strict=True):
            parts[row] = parts.get(row, 1) * size
        # Only products count: a row on axes of 2 and 4 is one entry of 8 parts, as on one axis of 8.
        key = op.name, chunks, frozenset(parts.items())
        cached = self.cache.operators.kernels
        if key not in cached:
            cached[key] = kernel_seconds(op, self.block.values, [rows[r] for r in joint], self.model, chunks)
        return cached[key]

    def _moved_bytes(self, k: int) -> tuple[Floats, Floats]:
        """Return two arrays [joint row]: local bytes that op k reads and writes, forward and backward."""
        op, total = self.strategy.ops[k], np.zeros((2, len(self.index)))
        passes = self.passes[op.name]
        for position, v in enumerate((*op.inputs, *op.outputs)):
            forward, backward = passes.forward[position], passes.backward[position]
            if forward or backward:
                ends = [(*r[k].inputs, *r[k].outputs)[position][0] for r in self.strategy.rows]
                local = self.block.values[v].meta.num_bytes / self._num_parts([isinstance(p, Shard) for p in ends])
                total += np.array([forward, backward])[:, None] * local
        return total[0], total[1]

    def _extra_saved_bytes(self, k: int) -> Floats:
        """[joint row]: bytes that op k keeps for backward and that are not a value of the graph. For a loss: `_loss_bytes`."""
        op, rows = self.strategy.ops[k], self.strategy.rows
        ins = [self.block.values[v].meta for v in op.inputs]
        if extra_saved_bytes(op) is not None:
            return self._loss_bytes(k)
        total = np.zeros(len(self.index))
        for meta in op.saved_extra:
            shapes = [m.shape for m in ins]
            saved_bytes = meta.num_bytes / self._num_parts(
                [r[k].splits_work and splits_saved_tensor(op, r[k].name, meta.shape, shapes) for r in rows]
            )
            routed = self._any_axis([len(meta.shape) > 1 and r[k].routed for r in rows])
            total += np.where(routed, self.model.workload.expert_imbalance, 1.0) * saved_bytes
        return total

    def _loss_bytes(self, k: int) -> Floats:
        """[joint row]: bytes that a loss keeps for backward, the buffers that it then uses, and the gradient of the logits."""
        op, rows = self.strategy.ops[k], self.strategy.rows
        split_names = [frozenset(rows[r][k].name for r in joint) for joint in self.index]
        bytes_of_split = {
            split: extra_bytes(op, global_bytes(op, self.block.values, split)) for split in set(split_names)
        }
        logits = self.block.values[op.inputs[0]].meta.num_bytes
        parts = self._num_parts([isinstance(r[k].inputs[0][0], Shard) for r in rows])
        # `cost` multiplies by the share of a recomputed block. A loss is held whole at the peak, so its share is divided out.
        bytes_: Floats = (
            (np.array([bytes_of_split[split] for split in split_names]) + logits) / parts / self.options.share(op)
        )
        return bytes_

    def _internal_collectives(self, k: int, kernels: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """[phase, joint row]: seconds of the collectives inside op k, forward (0) and backward (1), and seconds of waiting for them.

        `shrunk` are the rows that make the message smaller: the message is divided by the sizes of their axes, except the
        axis on which the collective runs.
        """
        total, waits = np.zeros((2, 2, len(self.index)))
        for axis, link in enumerate(self.model.links):
            for r, rows in enumerate(self.strategy.rows):
                takes_row: Bools = self.index[:, axis] == r
                for c in rows[k].internal:
                    shrunk = np.array([x[k].name in c.shrinks for x in self.strategy.rows])
                    # The axis of the collective does not shrink its own message: on 4 x 2, both shrunk, axis 0 sends 1/2, axis 1 sends 1/4.
                    axis_size = np.where(shrunk[self.index[:, axis]], self.model.sizes[axis], 1)
                    other_parts = joint_parts(shrunk, self.index, self.model.sizes) / axis_size
                    # Experts get unequal numbers of tokens, and all ranks wait for the rank that gets most.
                    load = self.model.load_of(rows[k]) if c.kind == "all_to_all" else 1.0
                    collective_s = collective_times(c.kind, load * c.num_bytes / other_parts, link)
                    phase, runs = int(c.phase != "forward"), c.runs(link.size)
                    hiding_s = c.share * kernels[phase] / link.size
                    waited_s = waited_seconds(collective_s, hiding_s, self.model.contention)
                    total[phase] += np.where(takes_row, runs * collective_s, 0.0)
                    waits[phase] += np.where(takes_row, runs * waited_s, 0.0)
        return total, waits
