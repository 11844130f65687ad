"""The same plan on a smaller model (see `small_config`) and a smaller mesh, which verification runs on a few real processes.

`retarget_plan` gives every operator of the small model's graph the states that the plan gives to the operator of the same name. It
finds the redistributions and the prices again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner_core.core import (
    ITEM_BYTES,
    Block,
    BlockLabel,
    BlockPlan,
    Call,
    DeviceMesh,
    Edge,
    Graph,
    InputError,
    Op,
    P,
    ParamPlan,
    Pipeline,
    Placements,
    Plan,
    R,
    Shard,
    SitePlan,
    State,
    Step,
    join_name,
    named_check,
    unevenly_split_dims,
)
from planner_core.cost import CostModel, can_run_in_chunks, ops_at_the_ends, price, price_pipeline, with_parts
from planner_core.cost.communication import Redistributions, Segments, all_redistributions
from planner_core.ops import SegmentMap, coarsen, graph_strategies


def small_mesh(mesh: DeviceMesh, ranks: int) -> DeviceMesh:
    """Return a mesh of `ranks` devices with the same axes. The innermost axes get the ranks first."""
    sizes = [1] * len(mesh.axis_sizes)
    left = ranks
    for axis in reversed(range(len(sizes))):
        if axis == 0:
            sizes[axis] = left
            # Two ranks on an axis run each of its collectives, so the others are left to the next axis.
        elif left > 1:
            sizes[axis] = 2 if left % 2 == 0 else left
            left //= sizes[axis]
    if any(big == 1 and small > 1 for big, small in zip(mesh.axis_sizes, sizes, strict=True)):
        raise InputError(f"{ranks} ranks cannot stand for a mesh of {mesh}")
    return DeviceMesh(mesh.axis_names, tuple(sizes))


def retarget_plan(plan: Plan, graph: Graph, model: CostModel, pipeline: Pipeline | None) -> Plan:
    """`plan` on another graph of the same architecture, and on another mesh with the same axes; with `pipeline` in these stages. Raises
    InputError if the plan lacks an operator of the graph, or if a tensor cannot be sharded evenly."""
    blocks = _Retargeting(plan, graph, model).blocks()
    if pipeline is None:
        cost = price(blocks, graph, model)
    else:
        pipeline = with_parts(pipeline, graph)
        cost = price_pipeline(blocks, graph, pipeline, model, ops_at_the_ends(coarsen(graph)))
    return replace(
        plan,
        cluster=model.cluster,
        mesh=model.mesh,
        blocks=blocks,
        cost=cost,
        # A few processes run the small model, so whether the large one fits its GPUs is no question here.
        fits=True,
        pipeline=pipeline,
        # Checkpoints of the small model have its own shapes: those of `plan` are of the large one.
        model=replace(
            plan.model, params=graph.num_params, config=dict(graph.config), layers=graph.num_repeats, own_shapes={}
        ),
        workload=model.workload,
    )


class _Retargeting:
    """Goes through a graph in order, and keeps the state in which every tensor is delivered.

    Operators and parameters are matched by their full names. So the two graphs may be folded differently. A layer that has operators
    which the plan's layer of the same number lacks is matched with the first layer of the plan that has them.
    """

    def __init__(self, plan: Plan, graph: Graph, model: CostModel) -> None:
        self.graph, self.model = graph, model
        self.whole = State((R,) * len(model.sizes), (R,) * len(model.sizes))
        self.sites, self.params, self.kept = plan.site_plans(), plan.param_plans(), plan.kept_sites()
        self.recompute = {p: b.recompute for b in plan.blocks.values() for p in b.prefixes}
        self.others = _other_layers(_op_forms(graph), ((name, _form_in(site)) for name, site in self.sites.items()))
        self.segments: dict[str, SegmentMap] = {
            name or graph.top.name: strategies.segments for name, strategies in graph_strategies(coarsen(graph)).items()
        }

    def blocks(self) -> dict[str, BlockPlan]:
        """Return the block plans of the new graph. Copies of a block that run in the same way share one."""
        top = self.graph.top
        delivered = self._param_states("", top)
        sites: dict[str, SitePlan] = {}
        variants: dict[str, list[BlockPlan]] = {}
        for item in top.items:
            if isinstance(item, Op):
                sites[item.name] = self._make_site("", top, item, delivered)
                continue
            bp, outs = self._place_call(item, delivered)
            delivered.update(zip(item.outputs, outs, strict=True))
            _add_block_plan(variants.setdefault(item.block, []), bp)
        plans_by_label = {"": BlockPlan(("",), self._make_params("", top), sites)}
        for name, plans in variants.items():
            plans_by_label.update({str(BlockLabel(name, k)): bp for k, bp in enumerate(plans)})
        return plans_by_label

    def _place_call(self, call: Call, outer: Mapping[int, State]) -> tuple[BlockPlan, list[State]]:
        block = self.graph.blocks[call.block]
        delivered = self._param_states(call.prefix, block)
        delivered.update({i: outer[o] for i, o in zip(block.inputs, call.inputs, strict=True) if o in outer})
        sites = {op.name: self._make_site(call.prefix, block, op, delivered) for op in block.ops}
        kept_ops = tuple(
            op.name for op in block.ops if self._name_in_plan(join_name(call.prefix, op.name)) in self.kept
        )
        recompute = self.recompute.get(self.others.get(call.prefix, call.prefix), "none")
        plan = BlockPlan((call.prefix,), self._make_params(call.prefix, block), sites, recompute, kept_ops)
        return plan, [delivered.get(o, self.whole) for o in block.outputs]

    def _params_of_copy(self, prefix: str, block: Block) -> dict[int, ParamPlan]:
        """Return how the plan stores the parameters that belong to this copy of a block, by value."""
        named = ((i, self._name_in_plan(join_name(prefix, v.name))) for i, v in block.own_parameters.items())
        return {i: self._fit_param(block, i, self.params[name]) for i, name in named if name in self.params}

    def _fit_param(self, block: Block, value: int, old: ParamPlan) -> ParamPlan:
        """Return the same forms of a weight; if the small weight cannot be cut so, along another dim of it that can."""
        table, forms = self._redistributions_of(block, value), (old.stored, old.working, old.gradient)
        # A refresh and a reduction name the placements between which they move, so such a weight keeps its dim.
        others = range(table.rank) if old.refresh is None and old.reduce is None else ()
        for dim in (None, *others):
            cut = [tuple(p if dim is None or not isinstance(p, Shard) else Shard(dim) for p in form) for form in forms]
            if all(np.isfinite(table.cost[code, code]) for code in map(table.code, cut)):
                return replace(old, stored=cut[0], working=cut[1], gradient=cut[2])
        return old

    def _name_in_plan(self, name: str) -> str:
        """Return the full name in the plan of an operator or parameter of the new graph."""
        layer, inner = _in_layer(name)
        return join_name(self.others[layer], inner) if layer in self.others else name

    def _param_states(self, prefix: str, block: Block) -> dict[int, State]:
        return {i: State(old.working, old.gradient) for i, old in self._params_of_copy(prefix, block).items()}

    def _make_params(self, prefix: str, block: Block) -> dict[str, ParamPlan]:
        return {
            block.values[i].name: replace(
                old, segments=self._list_segments(block, i, old.stored, old.working, old.gradient)
            )
            for i, old in self._params_of_copy(prefix, block).items()
        }

    def _fused_segments(self, block: Block, value: int) -> Segments:
        rank = len(block.values[value].meta.shape)
        return tuple((d, s) for d in range(rank) if (s := self.segments[block.name].get((value, d))))

    def _list_segments(self, block: Block, value: int, *forms: Placements) -> dict[int, tuple[int, ...]]:
        """Return the dims that are not cut as one into equal parts: fused dims, and dims whose last part of a weight is shorter."""
        shape = block.values[value].meta.shape
        return {**dict(self._fused_segments(block, value)), **unevenly_split_dims(shape, forms, self.model.sizes)}

    def _redistributions_of(self, block: Block, value: int) -> Redistributions:
        v, (sizes, links) = block.values[value], (self.model.sizes, self.model.links)
        weight = v.kind == "parameter"
        return all_redistributions(
            v.meta.shape,
            ITEM_BYTES[v.meta.dtype],
            sizes,
            links,
            self._fused_segments(block, value),
            weight=weight,
            joint=self.model.joint_links,
        )

    def _make_site(self, prefix: str, block: Block, op: Op, delivered: dict[int, State]) -> SitePlan:
        name = join_name(prefix, op.name)
        old = self.sites.get(self._name_in_plan(name))
        taken = () if old is None else old.inputs
        if len({e.dst for e in taken}) == 1:  # what stacks the results of all layers has other layers to stack
            taken = taken[:1] * len(op.inputs)
        if old is None or len(taken) != len(op.inputs) or len(old.outputs) != len(op.outputs):
            raise InputError(f"the plan does not say how to run {name}; plan this model again")
        inputs = tuple(self._make_operand(name, block, v, e, delivered) for v, e in zip(op.inputs, taken, strict=True))
        outputs = []
        for v, e in zip(op.outputs, old.outputs, strict=True):
            table = self._redistributions_of(block, v)
            # Forward goes from how the operator leaves its result to how it is delivered; its gradient comes the other way.
            back = self._find_steps(table, e.dst.gradient, e.src.gradient, name) if block.values[v].grad else ()
            forward = self._find_steps(table, e.src.forward, e.dst.forward, name)
            edge = Edge(e.src, e.dst, forward, back, self._list_segments(block, v), e.chunks)
            outputs.append(
                edge if can_run_in_chunks(block, op, edge, self.model.sizes, e.chunks) else replace(edge, chunks=1)
            )
            delivered[v] = e.dst
        return SitePlan(inputs, tuple(outputs))

    def _make_operand(self, name: str, block: Block, value: int, old: Edge, delivered: Mapping[int, State]) -> Edge:
        v, table = block.values[value], self._redistributions_of(block, value)
        # Constants are in no plan: every rank has them whole.
        src = delivered.get(value) or self.whole
        moved_to = tuple(R if p == P and s != P else p for p, s in zip(old.dst.forward, src.forward, strict=True))
        # A whole tensor becomes terms of a sum without a message: each rank divides its copy by their number.
        divide = tuple(Step(a, R, P) for a, (p, h) in enumerate(zip(old.dst.forward, moved_to, strict=True)) if p != h)
        forward = (*self._find_steps(table, src.forward, moved_to, name), *divide)
        back = self._find_steps(table, old.dst.gradient, src.gradient, name) if v.grad else ()
        forms = (src.forward, src.gradient) if v.kind == "parameter" else ()
        return Edge(src, old.dst, forward, back, self._list_segments(block, value, *forms))

    def _find_steps(self, table: Redistributions, src: Placements, dst: Placements, name: str) -> tuple[Step, ...]:
        try:
            return table.steps(src, dst)
        except ValueError:
            raise InputError(
                f"{name} cannot be split evenly on a mesh of {self.model.mesh}; use another ", named_check("ranks")
            ) from None


def _op_forms(graph: Graph) -> Iterator[tuple[str, Form]]:
    """Yield the operators of a graph by their full names."""
    ops: Sequence[Op]
    for item in graph.top.items:
        if isinstance(item, Op):
            prefix, block, ops = "", graph.top, [item]
        else:
            block = graph.blocks[item.block]
            prefix, ops = item.prefix, block.ops
        for op in ops:
            yield join_name(prefix, op.name), (len(op.inputs), tuple(block.values[v].grad for v in op.outputs))


def _form_in(site: SitePlan) -> Form:
    """Return the form of an operator of a plan. A gradient that is split is there; of others the plan does not say it."""
    return len(site.inputs), tuple(any(p != R for p in e.src.gradient) for e in site.outputs)


def _in_layer(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.gate/linear` -> (`model.layers.3`, `mlp.gate/linear`). A name without a number is in the layer ""."""
    match = re.match(r"(.*?\.\d+)\.(.*)", name)
    return (match[1], match[2]) if match else ("", name)


Form = tuple[int, tuple[bool, ...]]
"""The number of an operator's operands, and which of its results have a gradient: attention of one layer may have a mask, and of the
last layer's results some may not reach the loss."""
Forms = Iterable[tuple[str, Form]]


def _other_layers(small: Forms, planned: Forms) -> dict[str, str]:
    """For each layer of the `small` graph whose operators the planned layer of its number lacks: the first planned layer that has them."""
    small_layers, planned_layers = _forms_by_layer(small), _forms_by_layer(planned)
    others = {}
    for layer, forms in small_layers.items():
        stack = layer.rpartition(".")[0]
        alike = [
            k for k, theirs in planned_layers.items() if k.rpartition(".")[0] == stack and _has_operators(theirs, forms)
        ]
        if layer and alike and layer not in alike:
            others[layer] = alike[0]
    return others


def _has_operators(planned: Mapping[str, Form], forms: Mapping[str, Form]) -> bool:
    """Return whether a planned layer has these operators."""
    return all(
        name in planned
        and planned[name][0] == operands
        and all(mine or not theirs for mine, theirs in zip(grads, planned[name][1], strict=False))
        for name, (operands, grads) in forms.items()
    )


def _forms_by_layer(forms: Forms) -> dict[str, dict[str, Form]]:
    by_layer: dict[str, dict[str, Form]] = {}
    for name, form in forms:
        layer, inner = _in_layer(name)
        by_layer.setdefault(layer, {})[inner] = form
    return by_layer


def _add_block_plan(plans: list[BlockPlan], bp: BlockPlan) -> None:
    for k, other in enumerate(plans):
        if replace(other, prefixes=bp.prefixes) == bp:
            plans[k] = replace(other, prefixes=(*other.prefixes, *bp.prefixes))
            return
    plans.append(bp)
