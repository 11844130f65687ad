"""The restriction to what a form of tensor parallelism does: given layers are sharded on one axis, and all else is Replicate there.

`parallelize_module` and transformers' `tp_plan` name layers, and a style for each (see `tp_layout`). So a plan for them is held exactly
if its layers run as their styles do: a head's classes are gathered before the loss, and layers without a style are whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import (
    Block,
    BlockPlan,
    DeviceMesh,
    Edge,
    Graph,
    Op,
    P,
    Plan,
    R,
    Shard,
    SitePlan,
    State,
    Step,
    Value,
    join_name,
)
from planner_core.cost import block_of
from planner_core.ops import Row, operator
from planner_core.planning.methods.hf_tp_plan import VendorRules, vendor_plan
from planner_core.planning.methods.restrictions import (
    WeightTest,
    is_batch_split,
    is_sequence_split,
    is_unsplit,
    zero_stage_test,
)
from planner_core.planning.methods.tools.tool import PairForm
from planner_core.planning.methods.tp_layout import SPLIT_DIM, WEIGHT, TpLayout, drop_summed, tensor_layout
from planner_core.search.network import NO_STAGE, Network, WeightState, allow_only, tensor_name

EXPERTS = {"gate_up_proj": 1, "down_proj": 2}
"""The dim of fused experts that is their inner width."""
STOCK = {"Linear", "Embedding"}
"""The modules that styles shard."""
WEIGHT_OF = {**WEIGHT, "embedding": 1, "moe_experts": 3}
"""Products, and the position of the (first) weight among the operands."""
PAIRED = ("colwise", "rowwise")
EXPERT_STYLE = "experts"


@dataclass(frozen=True, slots=True)
class LayerStyles:
    """The layers that a file splits by name: regular expressions for names of weights, each with a style of `tp_layout`, or "experts"
    for fused ones. The first that matches counts; other layers are whole."""

    rules: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"by {len(self.rules)} patterns"

    def of_module(self, module: str) -> str:
        """Return the style of a module; empty if it is whole."""
        return next((style for pattern, style in self.rules if re.match(pattern, f"{module}.weight")), "")

    def layout(self, graph: Graph, axis: int, size: int, data: int) -> TpLayout:
        """Return the layers of a model that these styles split on a tensor axis, over `size` ranks."""
        blocks = [("", graph.top), *((c.prefix, graph.blocks[c.block]) for c in graph.calls())]
        names = [join_name(prefix, v.name) for prefix, block in blocks for v in block.values if v.kind == "parameter"]
        styles = {module: self.of_module(module) for module in dict.fromkeys(n.rpartition(".")[0] for n in names)}
        experts = [module for module, style in styles.items() if style == EXPERT_STYLE]
        layers = {module: style for module, style in styles.items() if style in SPLIT_DIM}
        return TpLayout(axis, size, data, layers, experts=experts)


def may_split_tokens(form: PairForm, graph: Graph) -> bool:
    """Return whether a form shards tokens in a model. Stock styles do so in the layers of text models that transformers has a plan for; the
    code of others mixes parts of the tokens with whole tensors, and so does a router."""
    products = (op for b in graph.all_blocks for op in b.ops if op.fn in WEIGHT_OF)
    return form.tokens and vendor_plan(graph.config) is not None and all(op.module in STOCK for op in products)


def splittable_layers(plan: Plan, graph: Graph, form: PairForm) -> TpLayout:
    """Return the layers that a form shards where a plan shards all that it can. Raises InputError if there are none."""
    layout = tensor_layout(plan)
    ops = [("", op) for op in graph.top.ops] + [(c.prefix, o) for c in graph.calls() for o in graph.blocks[c.block].ops]
    names = [(join_name(prefix, op.site.module), op) for prefix, op in ops if op.fn in WEIGHT_OF]
    stock = {name for name, op in names if op.module in STOCK}
    experts = [name for name, op in names if op.fn == "moe_experts"]
    if not form.sums:
        drop_summed(layout)
    # Styles shard stock modules alone. A pair with another layer in it is given up as a whole.
    groups = [g for g in layout.groups if {*g.columns, g.row} <= stock]
    paired = {name for g in groups for name in (*g.columns, g.row)}
    alone = {n: "gathered" for n, s in layout.styles.items() if n in stock and n not in paired and s not in PAIRED}
    styles = {n: s for n, s in layout.styles.items() if n in paired} | alone
    return replace(layout, groups=groups, styles=styles, experts=experts if form.experts else [])


@dataclass
class FormRules(VendorRules):
    """Results that layers gather (the classes of a head) are Replicate on the tensor axis, and so is the loss."""

    layout: TpLayout

    def apply(self, block: str, net: Network) -> None:
        """Add factors that forbid the other states."""
        super().apply(block, net)
        where = block_of(self.graph, block)
        wide = self._gathered_widths(block, where)
        axis = self.layout.axis
        # A gathered result is whole on the tensor axis, and so is all of its width that the loss makes of it.
        for number, value, states in net.placed_values(where):
            meta = value.meta
            if value.kind == "activation" and meta.shape and meta.shape[-1] in wide:
                good = np.array([pair[0] != Shard(len(meta.shape) - 1) for pair in states.axis_states])
                net.factors.append(allow_only(tensor_name(number), good[states.index[:, axis]]))
        for name, node in net.nodes.items():
            rows = [
                [r.name for o, r in zip(node.strategy.ops, row, strict=True) if operator(o.fn).is_logits_loss]
                for row in node.strategy.rows
            ]
            # A loss of gathered logits takes all classes of a token.
            if wide and any(rows):
                good = np.array(["classes" not in names for names in rows], dtype=bool)
                net.factors.append(allow_only(name, good[node.index[:, axis]]))

    def _row_passes(self, where: Block, net: Network, ops: tuple[Op, ...], rows: tuple[Row, ...], axis: int) -> bool:
        if axis == self.layout.axis and any(_runs_in_part(op, row) for op, row in zip(ops, rows, strict=True)):
            return False
        return super()._row_passes(where, net, ops, rows, axis)

    def _gathered_widths(self, block: str, where: Block) -> set[int]:
        prefix = next((c.prefix for c in self.graph.calls() if c.block == block), "")
        return {
            where.values[op.outputs[0]].meta.shape[-1]
            for op in where.ops
            if op.fn == "linear" and self.layout.styles.get(join_name(prefix, op.site.module)) == "gathered"
        }


def _runs_in_part(op: Op, row: Row) -> bool:
    """Return whether a product with a whole weight runs on a part of its input."""
    at = WEIGHT_OF.get(op.fn)
    return at is not None and at < len(row.inputs) and row.inputs[at][0] == R and row.name != "R"


def form_rules(
    graph: Graph, mesh: DeviceMesh, layout: TpLayout, *, stage: int, sequence: bool, alone: bool
) -> FormRules:
    """Return the restriction on a mesh. `stage`: that of ZeRO on the data axes. `alone`: a layer that is of no pair may also be whole,
    or sharded along another dim."""
    axes, data = range(len(mesh.axis_sizes)), zero_stage_test(stage)
    return FormRules(
        graph,
        tuple((is_sequence_split if sequence else is_unsplit) if a == layout.axis else is_batch_split for a in axes),
        tuple(_weight_test(graph, layout, alone) if a == layout.axis else data for a in axes),
        layout=layout,
    )


def _weight_test(graph: Graph, layout: TpLayout, alone: bool) -> WeightTest:
    dims: dict[int, int | None] = {}
    choice: dict[int, set[int]] = {}
    # Names are of the first call; all copies of a block have the same layers, so they stand for all.
    first = {c.block: c.prefix for c in reversed(list(graph.calls()))}
    for block in graph.all_blocks:
        for index, value in enumerate(block.values):
            if value.kind == "parameter":
                name = join_name(first.get(block.name, ""), value.name)
                dims[id(value)] = _form_dim(name, layout)
                if alone and layout.styles.get(name.rpartition(".")[0]) == "gathered" and name.endswith("weight"):
                    # A weight that an embedding reads too is cut by its words, or not at all.
                    tied = sum(index in op.inputs for op in block.ops) > 1
                    choice[id(value)] = {0} if tied else {0, 1}

    def follows(v: Value, state: WeightState) -> bool:
        is_gathered = state.working != state.stored or (isinstance(state.working, Shard) and state.stage != NO_STAGE)
        if is_gathered:
            return False
        if id(v) in choice:
            return state.working == R or (isinstance(state.working, Shard) and state.working.dim in choice[id(v)])
        dim = dims.get(id(v))
        return state.working == (R if dim is None else Shard(dim))

    return follows


def _form_dim(name: str, layout: TpLayout) -> int | None:
    """Return the dim along which the form shards a parameter."""
    module, _, last = name.rpartition(".")
    if module in layout.experts:
        return EXPERTS.get(last)
    style = layout.styles.get(module)
    if style is None or (last == "bias" and SPLIT_DIM[style] == 1):
        return None
    return SPLIT_DIM[style]


def sum_for_each_column(plan: Plan, graph: Graph, axis: int) -> dict[str, BlockPlan]:
    """Return the blocks of a plan whose column-sharded layers do not share the sum of their input's gradient: each reader of a tensor
    reduces its own gradient on an axis, instead of the tensor that all of them read."""
    return {
        label: replace(bp, sites=_sites_alone(bp, block_of(graph, label), axis)) for label, bp in plan.blocks.items()
    }


def _sites_alone(bp: BlockPlan, block: Block, axis: int) -> dict[str, SitePlan]:
    sites = dict(bp.sites)
    sums = [
        (op, k, step)
        for op in block.ops
        for k, edge in enumerate(sites[op.name].outputs)
        for step in edge.backward
        if (step.axis, step.src, step.dst) == (axis, P, R)
    ]
    for op, k, step in sums:
        outputs = sites[op.name].outputs
        sites[op.name] = replace(
            sites[op.name], outputs=(*outputs[:k], _without_gradient_step(outputs[k], step), *outputs[k + 1 :])
        )
        # The sum moves from the result that all read to each of its readers.
        for name, i in ((o.name, i) for o in block.ops for i, v in enumerate(o.inputs) if v == op.outputs[k]):
            read = sites[name].inputs
            sites[name] = replace(sites[name], inputs=(*read[:i], _with_gradient_step(read[i], step), *read[i + 1 :]))
    return sites


def _without_gradient_step(edge: Edge, step: Step) -> Edge:
    """Return the edge of a result without a step of its gradient."""
    return replace(
        edge, dst=_replace_gradient(edge.dst, step), backward=tuple(s for s in edge.backward if s is not step)
    )


def _with_gradient_step(edge: Edge, step: Step) -> Edge:
    """Return the edge of an operand with a step of its gradient."""
    if edge.dst.gradient[step.axis] != P:  # it is whole, and was divided to be added to the others
        return replace(
            edge, src=_replace_gradient(edge.src, step), backward=tuple(s for s in edge.backward if s.axis != step.axis)
        )
    return replace(edge, src=_replace_gradient(edge.src, step), backward=(*edge.backward, step))


def _replace_gradient(state: State, step: Step) -> State:
    return State(state.forward, tuple(step.dst if a == step.axis else p for a, p in enumerate(state.gradient)))
