"""From the states that the search chose to the block plans of a `Plan`.

A plan says for every operand, result and weight of every operator its placements, and the redistributions between them.

Example: an operator reads x as (S(0), S(0)) (tensor and gradient), and x is delivered as (R, R). The edge of this operand has
one forward step, R to S(0) (a slice), and one backward step, S(0) to R (an all_gather of the gradient).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner_core.core import (
    ITEM_BYTES,
    Block,
    BlockLabel,
    BlockPlan,
    Edge,
    Op,
    P,
    ParamPlan,
    Placements,
    R,
    Shard,
    SitePlan,
    State,
    Step,
    unevenly_split_dims,
)
from planner_core.cost import Buckets, CostModel, in_chunks
from planner_core.cost.communication import Redistributions, Segments, all_redistributions
from planner_core.ops import kept_ops
from planner_core.search.network.factors import GroupRows, tensor_name
from planner_core.search.network.folded import Problem
from planner_core.search.network.search_cache import Assignment, Copy
from planner_core.search.network.states import TensorStates


def make_block_plans(problem: Problem, assignment: Assignment) -> dict[str, BlockPlan]:
    """Return block plans by label: "" for the top block, then one for each different way in which a repeated block runs.

    The first way of block `layer` has the label "layer", the next ones "layer#1", "layer#2" and so on.
    """
    graph = problem.coarse.graph
    plans = {"": _cached_block_plan(problem, "", assignment.top, ("",))}
    copies_by_block: dict[str, list[tuple[Copy, list[str]]]] = {}
    for call, copy in zip(graph.calls(), assignment.copies, strict=True):
        variants_of = copies_by_block.setdefault(call.block, [])
        match = next((prefixes for other, prefixes in variants_of if _run_equally(other, copy)), None)
        if match is None:
            variants_of.append((copy, [call.prefix]))
        else:
            match.append(call.prefix)
    for name, variants in copies_by_block.items():
        for k, (copy, prefixes) in enumerate(variants):
            plans[str(BlockLabel(name, k))] = _cached_block_plan(
                problem, name, copy.states, tuple(prefixes), copy.variant
            )
    return plans


@dataclass(frozen=True, slots=True)
class _BlockStates:
    """One block with the states of its variables, from which the edges of its operators follow.

    A value stands on several edges, so what is asked about it is kept: its redistributions by their bytes of an element (`known_moves`),
    and how it is delivered (`known_states`).
    """

    block: Block
    buckets: Buckets
    model: CostModel
    tensors: Mapping[str, TensorStates]
    states: Mapping[str, int]
    segments: Mapping[tuple[int, int], tuple[int, ...]]
    known_moves: dict[tuple[int, int], Redistributions] = field(default_factory=dict)
    known_states: dict[int, State | None] = field(default_factory=dict)

    def moves(self, value: int) -> Redistributions:
        return self._cached_moves(value, ITEM_BYTES[self.block.values[value].meta.dtype])

    def gradient_moves(self, value: int) -> Redistributions:
        """Return redistributions of a value's gradient. Gradients of weights are kept in a dtype of their own."""
        v = self.block.values[value]
        if v.kind != "parameter":
            return self.moves(value)
        return self._cached_moves(value, self.model.workload.gradient_item(ITEM_BYTES[v.meta.dtype]))

    def _cached_moves(self, value: int, item: int) -> Redistributions:
        if (value, item) not in self.known_moves:
            self.known_moves[value, item] = self._find_moves(value, item)
        return self.known_moves[value, item]

    def _find_moves(self, value: int, item: int) -> Redistributions:
        v, share = self.block.values[value], self.buckets.share(value)
        weight = v.kind == "parameter"
        return all_redistributions(
            v.meta.shape,
            item,
            self.model.sizes,
            self.model.links,
            self._fused_dims(value),
            share,
            weight,
            self.model.joint_links,
        )

    def _fused_dims(self, value: int) -> Segments:
        rank = len(self.block.values[value].meta.shape)
        return tuple((d, s) for d in range(rank) if (s := self.segments.get((value, d))))

    def segments_of(self, value: int) -> dict[int, tuple[int, ...]]:
        """Return the dims of a value that are not cut as one into equal parts: the sizes of their fused parts, or the one extent of
        a weight's dim whose last part is shorter."""
        fused, v, state = dict(self._fused_dims(value)), self.block.values[value], self.delivered(value)
        if v.kind != "parameter" or state is None:
            return fused
        name, sizes = tensor_name(value), self.model.sizes
        forms = (state.forward, state.gradient, self.tensors[name].stored_at(self.states[name], len(sizes)))
        return {**fused, **unevenly_split_dims(v.meta.shape, forms, sizes)}

    def delivered(self, value: int) -> State | None:
        """Return the state in which a value is delivered between groups, or None if it stays inside one group."""
        if value not in self.known_states:
            name = tensor_name(value)
            known = self.tensors[name].state(self.states[name], len(self.model.sizes)) if name in self.tensors else None
            self.known_states[value] = known
        return self.known_states[value]


def _run_equally(a: Copy, b: Copy) -> bool:
    return a is b or (a.variant == b.variant and a.states == b.states)


def _cached_block_plan(
    problem: Problem, name: str, states: Mapping[str, int], prefixes: tuple[str, ...], recompute: str = "none"
) -> BlockPlan:
    """Return the plan of the copies at `prefixes`. The problem keeps it, since many assignments have copies in the same states."""
    key = name, recompute, frozenset(states.items())
    plans = problem.cache.plans
    if key not in plans:
        plans[key] = _build_block_plan(problem, name, states, recompute)
    return replace(plans[key], prefixes=prefixes)


def _build_block_plan(problem: Problem, name: str, states: Mapping[str, int], recompute: str) -> BlockPlan:
    block = problem.coarse.graph.blocks[name] if name else problem.coarse.graph.top
    net = problem.first_variant(name).net if name else problem.top.net
    strategies = problem.strategies[name]
    site = _BlockStates(block, Buckets.of_block(block), problem.model, net.tensors, states, strategies.segments)
    sites: dict[str, SitePlan] = {}
    gathered: dict[int, set[int]] = {}
    for group, node in net.nodes.items():
        for k, op in enumerate(node.strategy.ops):
            sites[op.name] = _site_plan(site, node, states[group], k, op, gathered)
    # Operators of one group need not follow each other in the program, and a plan lists them in its order.
    order = {op.name: i for i, op in enumerate(block.ops)}
    params = {
        v.name: _param_plan(site, i, gathered.get(i, set()))
        for i, v in block.own_parameters.items()
        if tensor_name(i) in net.tensors
    }
    in_order = dict(sorted(sites.items(), key=lambda item: order[item[0]]))
    plan = BlockPlan((), params, in_order, recompute, kept_ops(block, recompute))
    return in_chunks(block, plan, problem.model)


def _site_plan(site: _BlockStates, node: GroupRows, r: int, k: int, op: Op, gathered: dict[int, set[int]]) -> SitePlan:
    rows = [node.strategy.rows[int(i)][k] for i in node.index[r]]
    inputs = []
    for position, value in enumerate(op.inputs):
        consumed = State(tuple(x.inputs[position][0] for x in rows), tuple(x.inputs[position][1] for x in rows))
        edge = _operand_edge(site, value, consumed)
        if site.block.values[value].kind == "parameter":
            gathered.setdefault(value, set()).update(
                a for a, p in enumerate(edge.dst.forward) if not isinstance(p, Shard)
            )
        inputs.append(edge)
    outputs = []
    for position, value in enumerate(op.outputs):
        produced = State(tuple(x.outputs[position][0] for x in rows), tuple(x.outputs[position][1] for x in rows))
        delivered = site.delivered(value) or produced
        table = site.moves(value)
        backward = table.steps(delivered.gradient, produced.gradient) if site.block.values[value].grad else ()
        outputs.append(
            Edge(
                produced, delivered, table.steps(produced.forward, delivered.forward), backward, site.segments_of(value)
            )
        )
    return SitePlan(tuple(inputs), tuple(outputs))


def _operand_edge(site: _BlockStates, value: int, consumed: State) -> Edge:
    v, table = site.block.values[value], site.moves(value)
    replicated = tuple(R if p == P else p for p in consumed.forward)
    if v.kind == "constant":  # it lies whole on every GPU, and has no gradient
        src = State((R,) * len(replicated), (R,) * len(replicated))
        backward: tuple[Step, ...] = ()
    else:
        src = site.delivered(value) or consumed
        backward = site.gradient_moves(value).steps(consumed.gradient, src.gradient) if v.grad else ()
    return Edge(src, consumed, _forward_steps(table, src.forward, consumed.forward), backward, site.segments_of(value))


def _forward_steps(table: Redistributions, src: Placements, dst: Placements) -> tuple[Step, ...]:
    """Return the steps from `src` to `dst`: gathers and slices first, then each R to P (a division)."""
    before_division = tuple(R if p == P and s != P else p for p, s in zip(dst, src, strict=True))
    divide = tuple(Step(a, R, P) for a, (p, h) in enumerate(zip(dst, before_division, strict=True)) if p != h)
    return (*table.steps(src, before_division), *divide)


def _param_plan(site: _BlockStates, value: int, gathered: set[int]) -> ParamPlan:
    name = tensor_name(value)
    state, stored = site.delivered(value), site.tensors[name].stored_at(site.states[name], len(site.model.sizes))
    assert state is not None
    at_use = tuple(sorted(a for a in gathered if isinstance(state.forward[a], Shard)))
    plan = ParamPlan(stored, state.forward, state.gradient, at_use, site.segments_of(value))
    if not site.block.values[value].grad:
        return replace(plan, trained=False)
    refresh = site.moves(value).steps(stored, state.forward)
    reduce = site.gradient_moves(value).steps(state.gradient, stored)
    same = (refresh, reduce) == (plan.refresh_steps(), plan.reduce_steps())
    return plan if same else replace(plan, refresh=refresh, reduce=reduce)
