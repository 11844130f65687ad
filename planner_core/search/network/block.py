"""The cost network of a block on a mesh: variables, what each choice costs, and what goes with what.

Variables: one per group of ops (its row on every axis), one per tensor between groups (its delivered state), one
per parameter (how it is stored). Every cost is unary or pairwise, and has four components, all per GPU and step:

    time_s     compute, the communication that must be waited for, and the weight traffic that shows
    memory     bytes at the end of forward: weights, optimizer states, activations kept for backward, the loss's own
    comm_s     all communication
    ending     bytes at the end of backward: weights, optimizer states, gradients

Weight traffic (gradient sums, ZeRO-3 gathers and scatters) hides behind `overlap` of the compute of the ops that use
the weight; what exceeds it shows. So the step time is a sum over the network, which is what makes the search exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from planner_core.core import ITEM_BYTES, Call, P, Shard
from planner_core.cost import CostModel
from planner_core.cost.communication import Moves, Segments, collective_times, digit, moves
from planner_core.cost.compute import op_time, op_work
from planner_core.cost.memory import root, run_again, viewed
from planner_core.ops import (
    BlockStrategies,
    CoarseBlock,
    GroupStrategy,
    Pair,
    looked_up,
    operator,
    own_bytes,
    splits_kept,
    whole_bytes,
)  # fmt: skip
from planner_core.search.network.factors import (
    COMM,
    ENDING,
    MEMORY,
    NUM_COMPONENTS,
    TIME,
    Factor,
    Network,
    NodeRows,
    tensor_name,
)
from planner_core.search.network.parameters import gradient_sum, parameter_memory, weight_traffic
from planner_core.search.network.states import (
    Bools,
    Floats,
    Ints,
    compatible,
    joint_all,
    joint_any,
    joint_codes,
    joint_index,
    joint_parts,
    stored_for,
    tensor_states,
)

SMALL_WEIGHT_DIMS = 1
"""Parameters of at most this many dims (biases, norms) are always kept: gathering them saves nothing worth a message."""


def build_block(
    coarse: CoarseBlock, strategies: BlockStrategies, model: CostModel, *,
    saved_by_calls: Collection[int] = (), skip: Collection[int] = (), saved_scale: float = 1.0, recomputed: bool = False,
    kept_results: Collection[int] = (),
) -> Network:  # fmt: skip
    """The network of one block, its calls left out (`chain` adds those as tables).

    `saved_by_calls` are values that a called block keeps for backward; `skip` values inside a run of equal
    calls, which are no variables here. `kept_results` are results of a block that their
    reader keeps. `saved_scale` is the share of the block's kept activations that
    is there at the peak: 1, or one copy in all of a block that is `recomputed` in backward.
    """
    builder = _Builder(coarse, strategies, model, set(saved_by_calls), set(skip), saved_scale)
    builder.kept_results = set(kept_results)
    builder.again = run_again(coarse.block) if recomputed else {}
    return builder.build()


class _Builder:
    """Collects the variables and factors of one block."""

    def __init__(
        self,
        coarse: CoarseBlock,
        strategies: BlockStrategies,
        model: CostModel,
        saved: set[int],
        skip: set[int],
        scale: float,
    ) -> None:
        self.block, self.coarse, self.strategies, self.model = coarse.block, coarse, strategies, model
        self.values = coarse.block.values
        self.ports = {*coarse.block.inputs, *coarse.block.outputs}
        self.home = {v: i for i, s in enumerate(strategies.groups) for op in s.ops for v in op.outputs}
        self.net = Network()
        self.saved_inputs = saved  # values whose delivered tensor a consumer keeps
        self.scale = scale
        self.kept_results: set[int] = set()
        self.again: Mapping[str, bool] = {}  # ops that run a second time in backward, and whether they deliver again
        self.viewed = viewed(coarse.block)
        self.crossing = self._crossing() - skip
        self.compute: dict[str, Floats] = {}  # seconds of a group's work, per joint row
        self.users = self._users()

    def build(self) -> Network:
        for i, strategy in enumerate(self.strategies.groups):
            self._mark_saved(i, strategy)
        for value in sorted(self.crossing):
            self._add_tensor(value)
        for i, strategy in enumerate(self.strategies.groups):
            self._add_group(i, strategy)
        return self.net

    def _crossing(self) -> set[int]:
        """Values that pass between groups, calls or the block's boundary, and every parameter, used or not."""
        found = {v for v in self.ports if self.values[v].kind != "constant"}
        found.update(i for i, v in enumerate(self.values) if v.kind == "parameter")
        for item in self.block.items:
            if isinstance(item, Call):
                found.update(v for v in (*item.inputs, *item.outputs) if self.values[v].kind != "constant")
        for i, s in enumerate(self.strategies.groups):
            for op in s.ops:
                for v in op.inputs:
                    if self.values[v].kind == "activation" and self.home.get(v) != i:
                        found.add(v)
        return found

    def _users(self) -> dict[int, int]:
        """How many groups and calls use each parameter."""
        found: dict[int, int] = {}
        for uses in [{v for op in s.ops for v in op.inputs} for s in self.strategies.groups] + [
            set(i.inputs) for i in self.block.items if isinstance(i, Call)
        ]:
            for v in uses:
                found[v] = found.get(v, 0) + 1
        return found

    def segments(self, value: int) -> Segments:
        """Fused dims of a value."""
        rank = len(self.values[value].meta.shape)
        return tuple((d, s) for d in range(rank) if (s := self.strategies.segments.get((value, d))))

    def _moves(self, value: int) -> Moves:
        """Redistributions of a value on this mesh."""
        meta = self.values[value].meta
        return moves(meta.shape, ITEM_BYTES[meta.dtype], self.model.sizes, self.model.links, self.segments(value))

    def root(self, value: int) -> int:
        """The value whose memory `value` shares."""
        return root(self.block, value)

    def _mark_saved(self, group: int, s: GroupStrategy) -> None:
        for op in s.ops:
            for v in op.saved:
                at: int | None = v
                while at is not None:  # the nearest tensor from outside that this is a view of
                    if at in self.crossing and self.home.get(at) != group and self.values[at].kind == "activation":
                        self.saved_inputs.add(at)
                        break
                    at = self.viewed.get(at)

    # --- tensors and parameters ----------------------------------------------------------------------

    def _add_tensor(self, value: int) -> None:
        v = self.values[value]
        states = tensor_states(v.meta, v.grad, v.kind == "parameter", self.model.sizes, self.segments(value))
        name = tensor_name(value)
        self.net.sizes[name], self.net.tensors[name] = len(states), states
        if value in self.ports:
            if value in self.saved_inputs:
                self.net.saved_ports.add(value)
            return
        cost = np.zeros((NUM_COMPONENTS, len(states)))
        if v.kind == "parameter":
            cost[MEMORY], cost[ENDING] = parameter_memory(states, v.grad, self.model)
            if self.users.get(value, 0) != 1:  # used in several places: its sum has no one op to hide behind
                cost[TIME] = cost[COMM] = gradient_sum(states, v.grad, self.model)
        elif value in self.saved_inputs:
            cost[MEMORY] = states.local_bytes * self.scale
        self.net.factors.append(Factor((name,), cost, np.ones(len(states), dtype=bool)))

    # --- groups ---------------------------------------------------------------------------------------

    def _add_group(self, number: int, s: GroupStrategy) -> None:
        index = joint_index(len(s.rows), len(self.model.sizes))
        index = index[self._even(s, index)]
        name = s.group.name
        self.net.sizes[name], self.net.nodes[name] = len(index), NodeRows(s, index)
        self.net.factors.append(Factor((name,), self._work(number, s, index), np.ones(len(index), dtype=bool)))
        for value, uses in self._operands(s).items():
            if self.values[value].kind == "parameter":
                self._weight_edge(name, s, index, value, uses)
            else:
                self._operand_edge(name, s, index, value, uses)
        for k, op in enumerate(s.ops):
            for j, value in enumerate(op.outputs):
                if value in self.crossing:
                    self._result_edge(name, s, index, value, (k, j))

    def _operands(self, s: GroupStrategy) -> dict[int, list[tuple[int, int]]]:
        """Tensors that cross between groups, and where they are used: (op, operand) positions. A tensor that the group makes
        and also hands on is read as it was delivered, here too."""
        found: dict[int, list[tuple[int, int]]] = {}
        for k, op in enumerate(s.ops):
            for i, v in enumerate(op.inputs):
                if v in self.crossing:
                    found.setdefault(v, []).append((k, i))
        return found

    def _even(self, s: GroupStrategy, index: Ints) -> Bools:
        """Joint rows in which every split is even, of every tensor and of every fused part."""
        flags: dict[tuple[int, ...] | tuple[int, str], tuple[list[bool], tuple[int, ...]]] = {}
        for r, rows in enumerate(s.rows):
            for k, (op, row) in enumerate(zip(s.ops, rows, strict=True)):
                ends = (*zip(op.inputs, row.inputs, strict=True), *zip(op.outputs, row.outputs, strict=True))
                for v, (p, _) in ends:
                    if isinstance(p, Shard):
                        extents = self.strategies.segments.get((v, p.dim), (self.values[v].meta.shape[p.dim],))
                        flags.setdefault((v, p.dim), ([False] * len(s.rows), extents))[0][r] = True
                if row.divides:
                    flags.setdefault((k, row.label), ([False] * len(s.rows), row.divides))[0][r] = True
        wanted = {(tuple(flag), extent) for flag, dims in flags.values() for extent in dims}
        if not wanted:
            return np.ones(len(index), dtype=bool)
        parts = joint_parts(np.array([flag for flag, _ in wanted]), index, self.model.sizes)
        whole = np.array([extent for _, extent in wanted])
        even: Bools = (whole[:, None] % parts.astype(np.int64) == 0).all(axis=0)
        return even

    def _work(self, number: int, s: GroupStrategy, index: Ints) -> Floats:
        cost = np.zeros((NUM_COMPONENTS, len(index)))
        compute = np.zeros(len(index))
        inner = {v: k for k, op in enumerate(s.ops) for v in op.outputs}
        kept: set[int] = set()
        for k, op in enumerate(s.ops):
            parts = joint_parts(np.array([r[k].splits_work for r in s.rows]), index, self.model.sizes)
            forward, backward = op_time(op_work(op, self.values), parts, self._touched(s, k, index), self.model)
            compute += forward * (2 if op.name in self.again else 1) + backward
            wait = self._internal(s, k, index)
            cost[TIME] += wait
            cost[COMM] += wait
            kept.update(
                self.root(v) for v in op.saved if self.root(v) in inner and not self._kept_by_consumer(self.root(v))
            )
            cost[MEMORY] += self._kept_extra(s, k, index)
        for v in kept:
            cost[MEMORY] += self.values[v].meta.num_bytes / self._parts_of(s, inner[v], v, index)
        cost[MEMORY] *= self.scale
        cost[TIME] += compute
        self.compute[s.group.name] = compute
        return cost

    def _kept_extra(self, s: GroupStrategy, k: int, index: Ints) -> Floats:
        """Bytes kept by op k that are no value of the graph; of a loss also what stands beside them at the peak."""
        op = s.ops[k]
        ins = [self.values[v].meta for v in op.inputs]
        if operator(op.fn).own_kept is not None:
            return self._own_memory(s, k, index)
        total = np.zeros(len(index))
        for meta in op.saved_extra:
            flag = [
                r[k].splits_work and splits_kept(op, r[k].label, meta.shape, [m.shape for m in ins]) for r in s.rows
            ]
            total += meta.num_bytes / joint_parts(np.array(flag), index, self.model.sizes)
        return total

    def _own_memory(self, s: GroupStrategy, k: int, index: Ints) -> Floats:
        """What a loss keeps for backward, what it uses then, and the gradient of the logits, which stands beside both."""
        op, labels = s.ops[k], [r[k].label for r in s.rows]
        chosen = [frozenset(labels[r] for r in joint) for joint in index]
        held = {split: own_bytes(op, whole_bytes(op, self.values, split)) for split in set(chosen)}
        logits = self.values[op.inputs[0]].meta.num_bytes
        parts = joint_parts(np.array([isinstance(r[k].inputs[0][0], Shard) for r in s.rows]), index, self.model.sizes)
        found: Floats = (np.array([held[split] for split in chosen]) + logits) / parts / self.scale
        return found

    def _kept_by_consumer(self, value: int) -> bool:
        return value in self.crossing and (value in self.saved_inputs or value in self.kept_results)

    def _touched(self, s: GroupStrategy, k: int, index: Ints) -> Floats:
        """Bytes that op k reads and writes locally."""
        op, total = s.ops[k], np.zeros(len(index))
        table = looked_up(op)  # its rows are as many bytes as the result
        for position, v in enumerate((*op.inputs, *op.outputs)):
            if position == table:
                continue
            ends = [(*r[k].inputs, *r[k].outputs)[position][0] for r in s.rows]
            sharded = np.array([isinstance(p, Shard) for p in ends])
            total += self.values[v].meta.num_bytes / joint_parts(sharded, index, self.model.sizes)
        return total

    def _parts_of(self, s: GroupStrategy, k: int, value: int, index: Ints) -> Floats:
        j = s.ops[k].outputs.index(value)
        return joint_parts(np.array([isinstance(r[k].outputs[j][0], Shard) for r in s.rows]), index, self.model.sizes)

    def _internal(self, s: GroupStrategy, k: int, index: Ints) -> Floats:
        """Seconds of the collectives that rows of op k run themselves."""
        total = np.zeros(len(index))
        for axis, link in enumerate(self.model.links):
            for r, rows in enumerate(s.rows):
                for c in rows[k].internal:
                    here = index[:, axis] == r
                    shrunk = np.array([x[k].label in c.shrinks for x in s.rows])
                    others = joint_parts(shrunk, index, self.model.sizes) / np.where(
                        shrunk[index[:, axis]], self.model.sizes[axis], 1
                    )
                    count = c.count * (2 if s.ops[k].name in self.again and c.phase == "forward" else 1)
                    total += np.where(here, count * collective_times(c.kind, c.num_bytes / others, link), 0.0)
        return total

    # --- edges ----------------------------------------------------------------------------------------

    def _operand_edge(self, name: str, s: GroupStrategy, index: Ints, value: int, uses: list[tuple[int, int]]) -> None:
        states = self.net.tensors[tensor_name(value)]
        allowed = np.ones((len(index), len(states)), dtype=bool)
        cost = np.zeros((NUM_COMPONENTS, len(index), len(states)))
        local = self._moves(value).local
        base = 2 + len(states.meta.shape)
        for k, i in uses:
            taken = [r[k].inputs[i] for r in s.rows]
            ok, touch = compatible(taken, states.pairs)
            forward = joint_codes([digit(p) for p, _ in taken], index, base)
            gradient = joint_codes([digit(g) for _, g in taken], index, base)
            allowed &= joint_all(ok, index, states.index)
            # on several axes a slice or a pad must also nest: only the innermost shard of a dim can be cut or undone
            allowed &= (
                local[states.forward[None, :], forward[:, None]] & local[gradient[:, None], states.gradient[None, :]]
            )
            moved = np.where(
                joint_any(touch, index, states.index), states.local_bytes / self.model.cluster.gpu.bytes_per_s, 0.0
            )
            cost[TIME] += moved
        self.net.factors.append(Factor((name, tensor_name(value)), cost, allowed))

    def _result_edge(self, name: str, s: GroupStrategy, index: Ints, value: int, where: tuple[int, int]) -> None:
        states, v = self.net.tensors[tensor_name(value)], self.values[value]
        made = [r[where[0]].outputs[where[1]] for r in s.rows]
        base = 2 + len(v.meta.shape)
        forward = joint_codes([digit(p) for p, _ in made], index, base)
        gradient = joint_codes([digit(g) for _, g in made], index, base)
        table = self._moves(value)
        there = table.cost[forward[:, None], states.forward[None, :]]
        back = table.cost[states.gradient[None, :], gradient[:, None]] if v.grad else np.zeros_like(there)
        allowed = (
            np.isfinite(there) & np.isfinite(back) & joint_all(_may_deliver(made, states.pairs), index, states.index)
        )
        seconds = np.where(allowed, there + back, 0.0)
        if self.again.get(s.ops[where[0]].name):
            seconds = np.where(allowed, seconds + there, 0.0)
        cost = np.zeros((NUM_COMPONENTS, *allowed.shape))
        cost[TIME] = cost[COMM] = seconds
        if self._keeps_own(s, value) and self._kept_by_consumer(value):
            # the op keeps what it made, the consumer what was delivered: two tensors where they differ
            rows_bytes = v.meta.num_bytes / self._parts_of(s, where[0], value, index)
            cost[MEMORY] = np.where(forward[:, None] != states.forward[None, :], rows_bytes[:, None] * self.scale, 0.0)
        self.net.factors.append(Factor((name, tensor_name(value)), cost, allowed))

    def _keeps_own(self, s: GroupStrategy, value: int) -> bool:
        return any(self.root(v) == value for op in s.ops for v in op.saved)

    def _weight_edge(self, name: str, s: GroupStrategy, index: Ints, value: int, uses: list[tuple[int, int]]) -> None:
        states, v = self.net.tensors[tensor_name(value)], self.values[value]
        may_gather = self.model.workload.zero == 3 and len(v.meta.shape) > SMALL_WEIGHT_DIMS
        table = self._moves(value)
        allowed = np.ones((len(index), len(states)), dtype=bool)
        seconds = np.zeros((len(index), len(states)))
        for k, i in uses:
            taken = [r[k].inputs[i] for r in s.rows]
            ok, _ = stored_for(taken, states.pairs, may_gather)
            allowed &= joint_all(ok, index, states.index)
            seconds += weight_traffic(
                s.ops[k],
                taken,
                states,
                table.cost,
                index,
                v.grad,
                s.ops[k].name in self.again or (v.grad and value in s.ops[k].saved),
            )
        allowed &= np.isfinite(seconds)
        if self.users[value] == 1 and value not in self.ports:
            seconds = seconds + gradient_sum(states, v.grad, self.model)
        cost = np.zeros((NUM_COMPONENTS, *allowed.shape))
        hidden = self.model.overlap * self.compute[name][:, None]
        cost[COMM] = np.where(allowed, seconds, 0.0)
        cost[TIME] = np.maximum(0.0, cost[COMM] - hidden)
        self.net.factors.append(Factor((name, tensor_name(value)), cost, allowed))


def _may_deliver(made: list[Pair], states: tuple[Pair, ...]) -> Bools:
    """Partial is delivered only where it was made: making a whole tensor Partial to deliver it gains nothing."""
    return np.array([[f != P or m == P for f, _ in states] for m, _ in made])
