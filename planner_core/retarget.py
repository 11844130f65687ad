"""The same plan on a smaller model and mesh: what verification on a few real processes runs.

`shrink` makes a config of the same architecture with small sizes; `retarget` pins every op of the small model's
graph to the states that the plan gives the op of the same name, and finds steps and prices anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner_core.coarsen import coarsen_block
from planner_core.errors import InputError
from planner_core.graph import ITEM_BYTES, Block, Call, Graph, Op
from planner_core.hardware import CostModel
from planner_core.mesh import DeviceMesh
from planner_core.placement import P, R, State
from planner_core.plan import BlockPlan, Edge, ParamPlan, Plan, SitePlan, Step
from planner_core.price import price
from planner_core.redistribute import Moves, Segments, moves
from planner_core.strategy import SegmentMap, block_strategies

SMALL: tuple[tuple[str, int], ...] = (
    (r"num_key_value_heads|num_kv_heads", 4),
    (r"(num_)?(attention_)?heads|n_heads?|num_heads|(encoder|decoder)_attention_heads|num_attention_heads", 8),
    (r"head_dim|d_kv|kv_channels", 8),
    (r"hidden_size|n_embd|d_model|word_embed_proj_dim|dim", 64),
    (r"intermediate_size|d_ff|ffn_dim|n_inner|(encoder|decoder)_ffn_dim|moe_intermediate_size|ffn_hidden_size", 128),
    (r"vocab_size", 256),
    (r"num_local_experts|num_experts|n_routed_experts", 8),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"num_labels", 16),
)
DEPTHS = r"num_hidden_layers|n_layers?|num_layers|num_decoder_layers|encoder_layers|decoder_layers"
LISTS = {"hidden_sizes": [64, 64, 128, 128], "depths": [2, 2, 2, 2], "embedding_size": 16}


def shrink(config: Mapping[str, Any], layers: int = 2) -> dict[str, Any]:
    """A config of the same architecture, small enough for a few CPU processes: 64 wide, 8 heads, `layers` deep."""
    small = dict(config)
    for key, value in config.items():
        if key in LISTS:
            small[key] = LISTS[key]
        if isinstance(value, dict):
            small[key] = shrink(value, layers) if key.endswith("config") else value
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if re.fullmatch(DEPTHS, key):
            small[key] = min(value, layers)
        for pattern, size in SMALL:
            if re.fullmatch(pattern, key):
                small[key] = min(value, size)
                break
    for key in ("bos_token_id", "eos_token_id"):
        if isinstance(small.get(key), int):
            small[key] = min(small[key], 1)
    heads, groups = small.get("num_attention_heads"), config.get("num_key_value_heads")
    if groups is not None and groups == config.get("num_attention_heads"):
        small["num_key_value_heads"] = heads
    return small


def small_mesh(mesh: DeviceMesh, ranks: int) -> DeviceMesh:
    """A mesh of `ranks` devices with the same axes; the innermost axes get the ranks first."""
    sizes = [1] * len(mesh.axis_sizes)
    left = ranks
    for axis in reversed(range(len(sizes))):
        if axis == 0:
            sizes[axis] = left
        elif left > 1:
            sizes[axis] = 2 if left % 2 == 0 else left
            left //= sizes[axis]
    if any(big == 1 and small > 1 for big, small in zip(mesh.axis_sizes, sizes, strict=True)):
        raise InputError(f"{ranks} ranks cannot stand for a mesh of {mesh}")
    return DeviceMesh(mesh.axis_names, tuple(sizes))


def retarget(plan: Plan, graph: Graph, model: CostModel) -> Plan:
    """`plan` on another graph of the same architecture and another mesh with the same axes; raises InputError where an op
    of the graph has no counterpart or a split is not even."""
    work = _Retarget(plan, graph, model)
    blocks = work.blocks()
    cost = price(blocks, graph, model)
    w = model.workload
    return replace(
        plan, mesh=model.mesh, blocks=blocks, cost=cost, fits=True,
        model={**plan.model, "params": graph.num_params, "config": dict(graph.config), "layers": graph.num_repeats},
        workload={"batch": w.batch, "seq": w.seq, "dtype": w.dtype, "optimizer": w.optimizer, "zero": w.zero, "recompute": w.recompute},
    )  # fmt: skip


class _Retarget:
    """Walks a graph in order, carrying the state in which every tensor is delivered."""

    def __init__(self, plan: Plan, graph: Graph, model: CostModel) -> None:
        self.plan, self.graph, self.model = plan, graph, model
        self.axes = len(model.sizes)
        self.segments: dict[str, SegmentMap] = {
            name: block_strategies(coarsen_block(b)).segments for name, b in (("", graph.top), *graph.blocks.items())
        }

    def blocks(self) -> dict[str, BlockPlan]:
        """Block plans of the new graph."""
        labels = _labels(self.plan, self.graph)
        made: dict[str, BlockPlan] = {}
        prefixes: dict[str, list[str]] = {}
        delivered = self._param_states("", self.graph.top)
        sites: dict[str, SitePlan] = {}
        for item in self.graph.top.items:
            if isinstance(item, Op):
                sites[item.name] = self._site("", self.graph.top, item, delivered)
                continue
            label = labels[item.prefix]
            outs = self._call(label, item, delivered, made)
            prefixes.setdefault(label, []).append(item.prefix)
            delivered.update(zip(item.outputs, outs, strict=True))
        made[""] = BlockPlan(("",), self._params("", self.graph.top), sites)
        return {label: replace(bp, prefixes=tuple(prefixes[label]) if label else ("",)) for label, bp in made.items()}

    def _call(self, label: str, call: Call, outer: Mapping[int, State], made: dict[str, BlockPlan]) -> list[State]:
        block = self.graph.blocks[call.block]
        delivered = self._param_states(label, block)
        for i, o in zip(block.inputs, call.inputs, strict=True):
            if o in outer:
                delivered[i] = outer[o]
        sites = {op.name: self._site(label, block, op, delivered) for op in block.ops}
        made.setdefault(label, BlockPlan((), self._params(label, block), sites))
        whole = State((R,) * self.axes, (R,) * self.axes)
        return [delivered.get(o, whole) for o in block.outputs]

    def _old(self, label: str) -> BlockPlan:
        return self.plan.blocks[label]

    def _param_states(self, label: str, block: Block) -> dict[int, State]:
        found = {}
        for i, v in enumerate(block.values):
            if v.kind == "parameter" and i not in block.inputs:
                old = self._old(label).params.get(v.name)
                if old is not None:
                    gradient = tuple(P if a in old.sync else p for a, p in enumerate(old.stored))
                    found[i] = State(old.stored, gradient)
        return found

    def _params(self, label: str, block: Block) -> dict[str, ParamPlan]:
        found = {}
        for i, v in enumerate(block.values):
            if v.kind == "parameter" and i not in block.inputs and v.name in self._old(label).params:
                found[v.name] = replace(self._old(label).params[v.name], segments=dict(self._parts(label, block, i)))
        return found

    def _parts(self, label: str, block: Block, value: int) -> Segments:
        table = self.segments[label.partition("#")[0]]
        rank = len(block.values[value].meta.shape)
        return tuple((d, s) for d in range(rank) if (s := table.get((value, d))))

    def _moves(self, label: str, block: Block, value: int) -> Moves:
        meta = block.values[value].meta
        return moves(meta.shape, ITEM_BYTES[meta.dtype], self.model.sizes, self.model.links, self._parts(label, block, value))

    def _site(self, label: str, block: Block, op: Op, delivered: dict[int, State]) -> SitePlan:
        old = self._old(label).sites.get(op.name)
        if old is None or len(old.inputs) != len(op.inputs) or len(old.outputs) != len(op.outputs):
            raise InputError(f"the plan does not say how to run {label.partition('#')[0]} {op.name}; plan this model again")
        inputs = tuple(self._operand(label, block, v, e, delivered) for v, e in zip(op.inputs, old.inputs, strict=True))
        outputs = []
        for v, e in zip(op.outputs, old.outputs, strict=True):
            table = self._moves(label, block, v)
            back = self._steps(table, e.dst.gradient, e.src.gradient, op) if block.values[v].grad else ()
            outputs.append(Edge(e.src, e.dst, self._steps(table, e.src.forward, e.dst.forward, op), back, dict(self._parts(label, block, v))))
            delivered[v] = e.dst
        return SitePlan(inputs, tuple(outputs))

    def _operand(self, label: str, block: Block, value: int, old: Edge, delivered: Mapping[int, State]) -> Edge:
        v, table = block.values[value], self._moves(label, block, value)
        src = delivered.get(value) or State((R,) * self.axes, (R,) * self.axes)
        held = tuple(R if p == P and s != P else p for p, s in zip(old.dst.forward, src.forward, strict=True))
        divide = tuple(Step(a, R, P) for a, (p, h) in enumerate(zip(old.dst.forward, held, strict=True)) if p != h)
        forward = (*self._steps(table, src.forward, held, v.name or value), *divide)
        back = self._steps(table, old.dst.gradient, src.gradient, v.name or value) if v.grad else ()
        return Edge(src, old.dst, forward, back, dict(self._parts(label, block, value)))

    def _steps(self, table: Moves, src: tuple[Any, ...], dst: tuple[Any, ...], where: object) -> tuple[Step, ...]:
        try:
            return table.steps(src, dst)
        except ValueError:
            name = where.name if isinstance(where, Op) else where
            raise InputError(f"{name} cannot be split evenly on a mesh of {self.model.mesh}; use other --ranks") from None


def _labels(plan: Plan, graph: Graph) -> dict[str, str]:
    """Which of the plan's ways each call of `graph` runs: as far along its block's copies as in the plan."""
    ways: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for label, bp in plan.blocks.items():
        for prefix in bp.prefixes:
            if label:
                ways.setdefault(label.partition("#")[0], []).append((tuple(map(int, re.findall(r"\d+", prefix))), label))
    found = {}
    repeats = graph.num_repeats
    seen: dict[str, int] = {}
    for call in graph.calls():
        if call.block not in ways:
            raise InputError(f"the plan has no block {call.block}; plan this model again")
        order = sorted(ways[call.block])
        k = seen.get(call.block, 0)
        seen[call.block] = k + 1
        found[call.prefix] = order[k * len(order) // repeats[call.block]][1]
    return found


