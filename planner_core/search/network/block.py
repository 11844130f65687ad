"""The cost network of one block on a mesh: its variables, what each choice costs, and which choices go together.

The variables are:
    one for each group of operators    its strategy on every axis
    one for each tensor between groups the state in which it is delivered
    one for each weight                the placements of its working copy, gradient and stored form

Every cost depends on one variable or on two. It has the components of `cost.step_time`, per GPU. Each component is a sum over
the network within one unit. Memory is counted at two moments of a step: when the forward pass ends, and when the backward
pass ends.

    total[component] = sum over factors f of  f.cost[component, states of f's variables]

Example: y = (x @ w).view(...) is one group. Its network has four variables: the group, x, w and y. It has factors over (group),
(group, x), (group, w), (group, y) and (w). The factor (group, y) holds the redistribution from the state in which the group
makes y to the state in which y is delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from planner_core.core import ITEM_BYTES, Call, Op, Shard, root
from planner_core.cost import Bools, Buckets, Component, CostModel, Floats, Ints, is_small, weights_at_the_ends
from planner_core.cost.communication import Redistributions, Segments, all_redistributions, placement_code
from planner_core.cost.memory import viewed_operands
from planner_core.ops import BlockStrategies, CoarseBlock, GroupStrategy, memory_passes
from planner_core.search.network.chunks import least_delay, may_run_in_chunks
from planner_core.search.network.factors import Factor, GroupRows, Network, tensor_name, zero_costs
from planner_core.search.network.group_work import BlockCache, GroupWork, UnitOptions, form_number
from planner_core.search.network.parameters import (
    UseTraffic,
    WeightMoves,
    storage_cost,
    traffic_cost,
    use_traffic,
    working_copy_bytes,
)
from planner_core.search.network.states import (
    Axes,
    TensorStates,
    can_deliver,
    compatible_operand,
    compatible_weight,
    joint_all,
    joint_any,
    joint_codes,
    joint_index,
    joint_parts,
    parameter_states,
    tensor_states,
)


def build_block(
    coarse: CoarseBlock,
    strategies: BlockStrategies,
    model: CostModel,
    options: UnitOptions | None = None,
    cache: BlockCache | None = None,
) -> Network:
    """Build the cost network of one block without the blocks that it calls (`repeated_block` adds these as tables).

    `cache` are the values of its operators that another variant computed.
    """
    return _Builder(coarse, strategies, model, options or UnitOptions(), cache or BlockCache()).build()


class _Builder:
    """Builds the variables and factors of one block.

    `crossing` are the values that are variables. `maker_group` maps a value to the number of the group that makes it.
    """

    def __init__(
        self,
        coarse: CoarseBlock,
        strategies: BlockStrategies,
        model: CostModel,
        options: UnitOptions,
        cache: BlockCache,
    ) -> None:
        self.cache = cache
        self.block, self.strategies, self.model, self.options = coarse.block, strategies, model, options
        self.values = coarse.block.values
        self.axes = Axes(model.sizes, model.joined, model.stages)
        self.ports = {*coarse.block.inputs, *coarse.block.outputs}
        self.maker_group = {v: i for i, s in enumerate(strategies.groups) for op in s.ops for v in op.outputs}
        self.net = Network(saved_values=set(options.saved_by_calls), rules=cache.rules)
        self.results_of_kept_ops = {v for op in coarse.block.ops if op.name in options.kept_ops for v in op.outputs}
        self.view_bases, self.buckets = viewed_operands(coarse.block), Buckets.of_block(coarse.block)
        self.crossing = self._crossing_values() - set(options.skipped_values)
        self.passes = memory_passes(coarse.block, model.fused)
        self.at_the_ends = weights_at_the_ends(coarse.block, self.options.ends.before)
        self.with_working_copy: set[int] = set()  # weights whose working copy is counted in a factor already

    def build(self) -> Network:
        # Readers come first: the factor of a tensor counts its bytes once, if any reader saves it.
        for i, strategy in enumerate(self.strategies.groups):
            self._mark_saved(i, strategy)
        for value in sorted(self.crossing):
            self._add_tensor(value)
        for i, strategy in enumerate(self.strategies.groups):
            self._add_group(i, strategy)
        if self.net.factors and (self.options.fixed_s or self.options.fixed_bytes):
            # What every plan pays may stand in any factor: it moves all sums by the same amount, so no choice changes.
            first = self.net.factors[0]
            cost = first.cost  # an array of its own: other networks may have this factor too
            cost[Component.STEP] += self.options.fixed_s
            cost[[Component.AFTER_FORWARD, Component.AFTER_BACKWARD]] += self.options.fixed_bytes
            self.net.factors[0] = Factor(first.vars, cost, first.allowed)
        return self.net

    def _add_shared_factor(self, make: Callable[[], Factor], names: tuple[str, ...], *key: object) -> None:
        """Add a factor over the variables `names`. `key` is all on which its table depends but the mesh: networks and blocks with the same
        key share the table, and networks of one block the factor."""
        factors, tables = self.cache.factors, self.cache.tables
        if (factor := factors.get((names, key))) is None:
            if key not in tables:
                new = make()
                tables[key] = new.costs, new.allowed
            factor = factors[names, key] = Factor(names, *tables[key])
        self.net.factors.append(factor)

    def _weight_key(self, value: int) -> tuple[object, ...]:
        """Return what the costs of a weight depend on besides the forms of the weight and of the group that reads it."""
        return self.axes.stages, self.model.workload.zero, self.buckets.share(value), self.options.repeats

    def _crossing_values(self) -> set[int]:
        """Return the values that pass between groups, into calls, or through the block's boundary; and every parameter, used or not."""
        crossing = {v for v in self.ports if self.values[v].kind != "constant"}
        crossing.update(i for i, v in enumerate(self.values) if v.kind == "parameter")
        for item in self.block.items:
            if isinstance(item, Call):
                crossing.update(v for v in (*item.inputs, *item.outputs) if self.values[v].kind != "constant")
        for i, s in enumerate(self.strategies.groups):
            for op in s.ops:
                for v in op.inputs:
                    if self.values[v].kind == "activation" and self.maker_group.get(v) != i:
                        crossing.add(v)
        return crossing

    def segments(self, value: int) -> Segments:
        """Return the fused dims of a value, and the extents of their parts."""
        known = self.cache.operators.segments
        if value not in known:
            rank = len(self.values[value].meta.shape)
            known[value] = tuple((d, s) for d in range(rank) if (s := self.strategies.segments.get((value, d))))
        return known[value]

    def _moves(self, value: int, item_bytes: int | None = None) -> Redistributions:
        """Return redistributions of a value on this mesh, in its own dtype or in a dtype of `item_bytes`."""
        meta = self.values[value].meta
        item = ITEM_BYTES[meta.dtype] if item_bytes is None else item_bytes
        share = self.buckets.share(value)
        weight = self.values[value].kind == "parameter"
        return all_redistributions(
            meta.shape,
            item,
            self.model.sizes,
            self.model.links,
            self.segments(value),
            share,
            weight,
            self.model.joint_links,
        )

    def _weight_moves(self, value: int) -> WeightMoves:
        item = self.model.summed_item(ITEM_BYTES[self.values[value].meta.dtype])
        return WeightMoves(self._moves(value), self._moves(value, item))

    def _mark_saved(self, group: int, s: GroupStrategy) -> None:
        for op in s.ops:
            for v in op.saved:
                base: int | None = v
                # A view of a tensor from outside saves that tensor, so look for the nearest one.
                while base is not None:
                    if (
                        base in self.crossing
                        and self.maker_group.get(base) != group
                        and self.values[base].kind == "activation"
                    ):
                        self.net.saved_values.add(base)
                        break
                    base = self.view_bases.get(base)

    # --- tensors and weights -------------------------------------------------------------------------

    def _states_of(self, value: int) -> TensorStates:
        v, known = self.values[value], self.cache.states
        key = (value, self.axes.stages, self.model.workload.zero) if v.kind == "parameter" else (value,)
        if key not in known:
            if v.kind == "parameter":
                zero = 0 if is_small(self.block, value) else self.model.workload.zero
                known[key] = parameter_states(v.meta, v.grad, self.axes, zero, self.segments(value))
            else:
                known[key] = tensor_states(v.meta, v.grad, self.axes, self.segments(value))
        return known[key]

    def _add_tensor(self, value: int) -> None:
        v, states, name = self.values[value], self._states_of(value), tensor_name(value)
        self.net.sizes[name], self.net.tensors[name] = len(states), states
        # If a copy counted its ports too, the tensor between two copies would be counted by both.
        if value in self.ports:  # the caller's network counts the bytes of ports
            return
        if v.kind == "parameter":
            meta, segments = (v.meta, v.grad), self.segments(value)
            key = "stored", meta, segments, value in self.at_the_ends, *self._weight_key(value)
            self._add_shared_factor(partial(self._storage_factor, value), (name,), *key)
            return
        # A view has the storage of its root: if the root is kept already, saving the view holds no further byte.
        base = root(self.block, value)
        is_saved = value in self.net.saved_values and base not in self.results_of_kept_ops
        # The caller counts its operand once for all blocks that keep a view of it.
        is_saved = is_saved and not (self.options.at_least and base in self.block.inputs)
        share = 1.0 if value in self.results_of_kept_ops else self.options.saved_share if is_saved else 0.0
        make_factor = partial(self._delivered_factor, name, states, share)
        self._add_shared_factor(make_factor, (name,), "delivered", v.meta, v.grad, self.segments(value), share)

    def _delivered_factor(self, name: str, states: TensorStates, share: float) -> Factor:
        """Return the factor of a tensor of whose bytes this `share` is kept for backward."""
        cost = zero_costs(len(states))
        cost[Component.AFTER_FORWARD] = states.local_bytes * share
        return Factor((name,), cost, np.ones(len(states), dtype=bool))

    def _storage_factor(self, value: int) -> Factor:
        """Return the factor of a weight's cost without its uses."""
        states, trained = self.net.tensors[tensor_name(value)], self.values[value].grad
        cost = self._expose_edge_traffic(value, storage_cost(states, trained, self._weight_moves(value), self.model))
        allowed: Bools = np.asarray(np.isfinite(cost).all(axis=0))
        return Factor((tensor_name(value),), np.where(allowed, cost, 0.0), allowed)

    def _expose_edge_traffic(self, value: int, cost: Floats) -> Floats:
        """Add the once-a-step traffic of a weight that nothing hides: of the first copy in forward, of the last in backward; or all."""
        once = [Component.FORWARD_ONCE, Component.BACKWARD_ONCE]
        traffic_s = cost[once].sum(axis=0)
        if value in self.at_the_ends or self.model.late_sums:
            cost[Component.STEP] += traffic_s
            cost[once] = 0.0
        elif self.options.repeats > 1:
            cost[Component.STEP] += traffic_s / self.options.repeats
        return cost

    # --- groups --------------------------------------------------------------------------------------

    def _add_group(self, number: int, s: GroupStrategy) -> None:
        forms = self.cache.operators.forms
        if number not in forms:
            forms[number] = form_number(self.block, s, self.segments, self.passes)
        form, name = forms[number], s.group.name
        if form not in self.cache.index:
            index = joint_index(len(s.rows), len(self.model.sizes), self.model.joined)
            self.cache.index[form] = index[self._splits_evenly(s, index)]
        index = self.cache.index[form]
        # Rows that split unevenly never become states, so no factor has to forbid them.
        self.net.sizes[name], self.net.nodes[name] = len(index), GroupRows(s, index)
        work = GroupWork(
            self.block, s, index, self.model, self.options, self.passes, self._is_saved_by_reader, self.cache
        )

        def make_work_factor() -> Factor:
            return Factor((name,), work.cost(), np.ones(len(index), dtype=bool))

        self._add_shared_factor(make_work_factor, (name,), "work", form, work.cost_key)
        for value, uses in self._crossing_operands(s).items():
            names, share = (name, tensor_name(value)), self.buckets.share(value)
            if self.values[value].kind == "parameter":
                self._add_weight(form, s, index, value, uses)
            else:
                make_factor = partial(self._operand_factor, name, s, index, value, uses)
                self._add_shared_factor(make_factor, names, "operand", form, tuple(uses), share)
        for k, op in enumerate(s.ops):
            for j, value in enumerate(op.outputs):
                if value in self.crossing:
                    is_redelivered, second_share = self._is_redelivered(op), self._second_tensor_share(s, op, value)
                    make_factor = partial(self._result_factor, work, value, (k, j), is_redelivered, second_share)
                    # A result that is kept is not made in chunks.
                    key = (
                        form,
                        k,
                        j,
                        self.buckets.share(value),
                        is_redelivered,
                        second_share,
                        op.name in self.options.kept_ops,
                    )
                    self._add_shared_factor(make_factor, (name, tensor_name(value)), "result", *key)

    def _add_weight(self, form: int, s: GroupStrategy, index: Ints, value: int, uses: list[tuple[int, int]]) -> None:
        """Add the factor of a weight and the group of a `form` that reads it."""
        counts_working_copy = value not in self.with_working_copy
        self.with_working_copy.add(value)
        # Not where the group reads it: the 512 weights of the 128 experts of a layer stand in one group, and differ in their places alone.
        taken = tuple((tuple(row[k].inputs[i] for row in s.rows), value in s.ops[k].saved) for k, i in uses)
        weight = self.values[value].meta, self.values[value].grad, self.segments(value)
        reruns = tuple(s.ops[k].name in self.options.reruns for k, _ in uses)
        saved_share = self.options.saved_share if any(reruns) else 1.0
        at_ends = tuple(s.group.name in side for side in self.options.ends)
        make_factor = partial(self._weight_factor, s, index, value, uses, counts_working_copy)
        at_loss = self.options.counts_at_loss(s.group.name, len(uses))
        counted = counts_working_copy, reruns, saved_share, at_ends, at_loss, *self._weight_key(value)
        names = s.group.name, tensor_name(value)
        self._add_shared_factor(make_factor, names, "weight", form, taken, weight, *counted)

    def _crossing_operands(self, s: GroupStrategy) -> dict[int, list[tuple[int, int]]]:
        """Return the crossing tensors that the group reads, with the positions (op, operand) where it reads them.

        If the group makes a crossing tensor and also reads it, it reads the tensor in the state in which it was delivered.
        """
        positions: dict[int, list[tuple[int, int]]] = {}
        for k, op in enumerate(s.ops):
            for i, v in enumerate(op.inputs):
                if v in self.crossing:
                    positions.setdefault(v, []).append((k, i))
        return positions

    def _splits_evenly(self, s: GroupStrategy, index: Ints) -> Bools:
        """[joint row]: whether every device gets an equal part of every tensor, and of every part of a fused dim."""
        flags: dict[tuple[int, ...] | tuple[int, str], tuple[list[bool], tuple[int, ...]]] = {}
        for r, rows in enumerate(s.rows):
            for k, (op, row) in enumerate(zip(s.ops, rows, strict=True)):
                ends = (*zip(op.inputs, row.inputs, strict=True), *zip(op.outputs, row.outputs, strict=True))
                for v, (p, _) in ends:
                    if isinstance(p, Shard):
                        extents = self.strategies.segments.get((v, p.dim), (self.values[v].meta.shape[p.dim],))
                        flags.setdefault((v, p.dim), ([False] * len(s.rows), extents))[0][r] = True
                if row.divides:
                    flags.setdefault((k, row.name), ([False] * len(s.rows), row.divides))[0][r] = True
        splits = {(tuple(flag), extent) for flag, dims in flags.values() for extent in dims}
        go_together = self._rows_go_together(s, index)
        if not splits:
            return go_together
        parts = joint_parts(np.array([flag for flag, _ in splits]), index, self.model.sizes)
        extent_of_split = np.array([extent for _, extent in splits])
        even: Bools = (extent_of_split[:, None] % parts.astype(np.int64) == 0).all(axis=0)
        return even & go_together

    def _rows_go_together(self, s: GroupStrategy, index: Ints) -> Bools:
        """[joint row]: whether the rows go together on their axes (`Split.excludes`, `Split.within`). For one joint row this is
        `can_run_together` of ops/rules.py."""
        together, several = np.ones(len(index), dtype=bool), np.array(self.model.sizes) > 1
        for k in range(len(s.ops)):
            is_exclusive = np.array([bool(rows[k].excludes) for rows in s.rows])
            if is_exclusive.any():  # few operators have such rows
                excluded_names = {name for rows in s.rows for name in rows[k].excludes}
                is_excluded = np.array([rows[k].name in excluded_names for rows in s.rows])
                is_only_one = (is_excluded[index] & several).sum(axis=1) == 1
                together &= is_only_one | ~(is_exclusive[index] & several).any(axis=1)
            for r, (name, parts) in ((r, limits) for r, rows in enumerate(s.rows) if (limits := rows[k].within)):
                is_outer = np.array([rows[k].name == name for rows in s.rows])[index]
                # Parts made by axes before this one: sizes (4, 2) with both outer give cumprod (4, 8) / (4, 2) = (1, 4).
                outer_parts = np.where(is_outer, self.model.sizes, 1)
                parts_before = np.cumprod(outer_parts, axis=1) // outer_parts
                together &= ~((index == r) & several & (parts_before != parts)).any(axis=1)
        return together

    def _is_saved_by_reader(self, value: int) -> bool:
        """Return whether the tensor's own factor counts the delivered tensor as kept, since a reader or the plan keeps it."""
        is_saved = (
            value in self.net.saved_values
            or value in self.options.saved_by_readers
            or value in self.results_of_kept_ops
        )
        return value in self.crossing and is_saved

    # --- edges ---------------------------------------------------------------------------------------

    def _operand_factor(
        self, name: str, s: GroupStrategy, index: Ints, value: int, uses: list[tuple[int, int]]
    ) -> Factor:
        states = self.net.tensors[tensor_name(value)]
        allowed = np.ones((len(index), len(states)), dtype=bool)
        cost = zero_costs(len(index), len(states))
        # An operand is only sliced, padded or divided here. Traffic is paid where the tensor is made (`_result_factor`).
        local = self._moves(value).local
        base = 2 + len(states.meta.shape)
        for k, i in uses:
            consumed = [r[k].inputs[i] for r in s.rows]
            is_compatible, needs_copy = compatible_operand(consumed, states.axis_states)
            forward = joint_codes([placement_code(p) for p, _ in consumed], index, base)
            gradient = joint_codes([placement_code(g) for _, g in consumed], index, base)
            allowed &= joint_all(is_compatible, index, states.index)
            # on several axes, slices of one dim nest: only the innermost axis can slice or pad it without communication
            allowed &= (
                local[states.forward[None, :], forward[:, None]] & local[gradient[:, None], states.gradient[None, :]]
            )
            moved = states.local_bytes / self.model.cluster.gpu.bytes_per_s
            cost[Component.FORWARD] += np.where(joint_any(needs_copy, index, states.index), moved, 0.0)
        return Factor((name, tensor_name(value)), cost, allowed)

    def _is_redelivered(self, op: Op) -> bool:
        """Return whether the results of an operator that runs again in backward are delivered again."""
        rerun = self.options.reruns.get(op.name)
        return rerun is not None and rerun.delivers

    def _second_tensor_share(self, s: GroupStrategy, op: Op, value: int) -> float:
        """Return the share that is held at the peak of a result that its operator keeps as it was made, and the reader as it was
        delivered."""
        is_saved = any(root(self.block, v) == value for o in s.ops for v in o.saved) and self._is_saved_by_reader(value)
        return self.options.share(op) if is_saved else 0.0

    def _result_factor(
        self, work: GroupWork, value: int, position: tuple[int, int], is_redelivered: bool, second_share: float
    ) -> Factor:
        s, index = work.strategy, work.index
        states, v = self.net.tensors[tensor_name(value)], self.values[value]
        produced = [r[position[0]].outputs[position[1]] for r in s.rows]
        base = 2 + len(v.meta.shape)
        forward = joint_codes([placement_code(p) for p, _ in produced], index, base)
        gradient = joint_codes([placement_code(g) for _, g in produced], index, base)
        table = self._moves(value)
        forward_s = table.cost[forward[:, None], states.forward[None, :]]
        backward_s = table.cost[states.gradient[None, :], gradient[:, None]] if v.grad else np.zeros_like(forward_s)
        allowed = np.isfinite(forward_s) & np.isfinite(backward_s)
        allowed &= joint_all(can_deliver(produced, states.axis_states), index, states.index)
        delay_s = sent_s = forward_s
        if may_run_in_chunks(work, position[0], fused=bool(self.segments(value))):
            delay_s, sent_s = least_delay(work, position[0], forward, states, table, forward_s)
        cost, m = zero_costs(*allowed.shape), self._micro_batches
        cost[Component.FORWARD] = np.where(allowed, delay_s, 0.0)
        cost[Component.BACKWARD] = np.where(allowed, backward_s + delay_s if is_redelivered else backward_s, 0.0)
        cost[Component.COMMUNICATION] = np.where(allowed, m * (backward_s + (2 if is_redelivered else 1) * sent_s), 0.0)
        # The operator keeps the result as made and the reader as delivered: two tensors where these differ.
        if second_share:
            second_bytes = work.result_bytes(position[0], value) * second_share
            saves_exchanged = work.saves_exchanged_results(position[0])[:, None]
            differs = (forward[:, None] != states.forward[None, :]) & ~saves_exchanged
            cost[Component.AFTER_FORWARD] = np.where(differs, second_bytes[:, None], 0.0)
        return Factor((s.group.name, tensor_name(value)), cost, allowed)

    @property
    def _micro_batches(self) -> int:
        return self.model.workload.accumulate

    def _weight_factor(
        self, s: GroupStrategy, index: Ints, value: int, uses: list[tuple[int, int]], counts_working_copy: bool
    ) -> Factor:
        states, v = self.net.tensors[tensor_name(value)], self.values[value]
        table = self._weight_moves(value)
        allowed = np.ones((len(index), len(states)), dtype=bool)
        gathered = np.zeros((len(index), len(states)), dtype=bool)
        zeros = np.zeros((len(index), len(states)))
        traffic = UseTraffic(zeros, zeros, zeros, zeros, zeros)
        for k, i in uses:
            op, consumed = s.ops[k], [r[k].inputs[i] for r in s.rows]
            allowed &= joint_all(compatible_weight(consumed, states.axis_states), index, states.index)
            needed_in_backward = op.name in self.options.reruns or value in op.saved
            use = use_traffic(consumed, states, table, index, v.grad, needed_in_backward, self.model)
            gathered |= use.gather > 0
            traffic = traffic + use
        allowed &= np.isfinite(traffic.gather) & np.isfinite(traffic.gather_for_backward) & np.isfinite(traffic.scatter)
        before_first, after_last = (s.group.name in side for side in self.options.ends)
        repeats, micro_batches = self.options.repeats, self._micro_batches
        cost = traffic_cost(traffic, allowed, before_first, after_last, repeats, micro_batches)
        # A weight that several groups read has one working copy, which the first of them counts.
        if counts_working_copy:
            working_bytes = np.where(allowed, working_copy_bytes(states, v.grad, gathered, self.model), 0.0)
            cost[Component.AFTER_FORWARD] = cost[Component.AFTER_BACKWARD] = working_bytes
        cost[Component.AFTER_FORWARD] += np.where(
            allowed, self._regathered_bytes(s, index, states, value, uses, gathered), 0.0
        )
        return Factor((s.group.name, tensor_name(value)), cost, allowed)

    def _regathered_bytes(
        self,
        s: GroupStrategy,
        index: Ints,
        states: TensorStates,
        value: int,
        uses: list[tuple[int, int]],
        gathered: Bools,
    ) -> Floats:
        """[row, state]: bytes of a weight that is gathered at the peak: of the copy that is recomputed, or while the loss runs."""
        at_loss = self.options.counts_at_loss(s.group.name, len(uses))
        saved = [
            (k, i) for k, i in uses if value in s.ops[k].saved and (at_loss or s.ops[k].name in self.options.reruns)
        ]
        total = np.zeros((len(index), 1))
        for k, i in saved:
            parts = joint_parts(
                np.array([isinstance(r[k].inputs[i][0], Shard) for r in s.rows]), index, self.model.sizes
            )
            total += (states.meta.num_bytes / parts)[:, None]
        regathered: Floats = np.where(gathered, total * self.options.saved_share, 0.0)
        return regathered
