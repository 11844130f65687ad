"""The tensor-parallel plans that ship with transformers (`base_model_tp_plan`), as a baseline: `hf-expert`.

Such a plan maps patterns of module names to styles. A `colwise` linear layer is sharded by its output features, a `rowwise` one
by its input features. A module without a pattern is Replicate, and so is the residual stream. The plans are data, in
`assets/hf_tp_plans.json`, by model type; `python -m planner_core.models.snapshots.write --hf-tp-plans` writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from planner_core.core import ASSETS, Block, DeviceMesh, Graph, Op, R, Shard, Value, join_name, module_path
from planner_core.ops import Kind, Row, operator
from planner_core.planning.methods.restrictions import AxisRules, is_batch_split, is_unsplit, sums_gradient_whole
from planner_core.search.network import Network, Restriction, WeightState

TABLE = ASSETS / "hf_tp_plans.json"
FROM_LAST = {
    "colwise": 2,
    "colwise_gather_output": 2,
    "packed_colwise": 2,
    "rowwise": 1,
    "rowwise_split_input": 1,
    "packed_rowwise": 1,
    "embedding_rowwise": 2,
    "embedding_colwise": 1,
}
"""The styles that shard a weight, and the dim that each shards, counted from the last."""


@cache
def load_vendor_plans() -> Mapping[str, Mapping[str, str]]:
    """Pattern to style, by model type."""
    plans: dict[str, dict[str, str]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return plans


def vendor_plan(config: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the plan that ships with a model's config. For a composite model it includes the plan of its text model."""
    # The text model comes first: its plan counts where several parts have one.
    halves = [config.get("text_config"), *config.values()]
    plans = [
        load_vendor_plans().get(str(part.get("model_type"))) for part in (*halves, config) if isinstance(part, Mapping)
    ]
    text, composite = next(filter(None, plans[:-1]), {}), plans[-1] or {}
    # The composite's own patterns come last, so they win over those of its text model.
    return {**text, **composite} or None


def splits_evenly(shape: tuple[int, ...], dim: int, parts: int, packed: bool) -> bool:
    """Return whether `dim` can be sharded over `parts` devices; if it is `packed` (gate and up), each half must be."""
    return shape[dim] % (parts * (2 if packed else 1)) == 0


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """Return the style that `plan` gives to a parameter or its module; empty if it is not a style that shards."""
    module = name.rpartition(".")[0]
    styles = (
        s
        for p, s in plan.items()
        for path in (name, module)
        if s in FROM_LAST and re.search(rf"(^|\.){_pattern_regex(p)}$", path)
    )
    return next(styles, "")


def split_dim(name: str, ndim: int, plan: Mapping[str, str]) -> int | None:
    """Return the dim along which `plan` shards the parameter with this full name; None: it is Replicate."""
    style = style_of(name, plan)
    if not style:
        return None
    # A colwise layer's bias has its output features. A rowwise layer's is added to the sum, so it is whole.
    if name.rpartition(".")[2] == "bias" and ndim == 1:
        return 0 if FROM_LAST[style] == 2 else None
    return max(ndim - FROM_LAST[style], 0)


@cache
def _pattern_regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "[0-9]+")


@dataclass
class VendorRules(AxisRules):
    """Megatron-LM's restriction with two exceptions.

    Attention may be replicated if the plan does not shard it. Activations between a colwise and a rowwise layer are not
    treated as residual stream, even if they have its shape (the gate of an attention's result).
    """

    between: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Ids of the values that are made only from results of colwise layers."""

    def _in_stream(self, value: Value) -> bool:
        return id(value) not in self.between and super()._in_stream(value)

    def _activation_key(self) -> tuple[object, ...]:
        return *super()._activation_key(), self.between

    def _row_passes(self, where: Block, net: Network, ops: tuple[Op, ...], rows: tuple[Row, ...], axis: int) -> bool:
        attention = [r.name for o, r in zip(ops, rows, strict=True) if operator(o.fn).kind is Kind.ATTENTION]
        if self.activations[axis] is not is_batch_split and attention == ["R"]:
            return all(r.name == "R" for r in rows)
        return super()._row_passes(where, net, ops, rows, axis)


def _planned_dims(graph: Graph, plan: Mapping[str, str], parts: int) -> tuple[dict[int, int | None], set[int]]:
    """By id of a parameter: the dim that the plan shards, or None. And the ids of those that cannot be sharded as the plan says; these
    are not restricted."""
    dims: dict[int, int | None] = {}
    idle: set[int] = set()
    # Patterns are of full names; all copies of a block have the same layers, so its first call stands for them.
    first = _first_calls(graph)
    for block in graph.all_blocks:
        for value in block.values:
            if value.kind == "parameter":
                full = join_name(first.get(block.name, ""), value.name)
                dims[id(value)] = dim = split_dim(full, len(value.meta.shape), plan)
                if dim is not None and not splits_evenly(
                    value.meta.shape, dim, parts, style_of(full, plan).startswith("packed")
                ):
                    idle.add(id(value))
    return dims, idle


def _column_results(graph: Graph, plan: Mapping[str, str]) -> frozenset[int]:
    """Ids of the values that are made only from results of colwise layers, up to the next layer with a weight."""
    results: set[int] = set()
    first = _first_calls(graph)
    for block in graph.all_blocks:
        for op in block.ops:
            ends = [block.values[v] for v in op.inputs]
            weights = [v for v in ends if v.kind == "parameter" and len(v.meta.shape) > 1]
            activations = [v for v in ends if v.kind == "activation"]
            if weights:
                inside = all(
                    style_of(join_name(first.get(block.name, ""), w.name), plan) in ("colwise", "packed_colwise")
                    for w in weights
                )
            else:
                # With one operand of another origin the result may be the residual stream again.
                inside = bool(activations) and all(id(v) in results for v in activations)
            if inside:
                results.update(id(block.values[v]) for v in op.outputs)
    return frozenset(results)


def _first_calls(graph: Graph) -> dict[str, str]:
    """For each block: the module of its first call. `stack@1`, the second call of `stack`, is `stack`."""
    return {c.block: module_path(c.prefix) for c in reversed(list(graph.calls()))}


def vendor_rules(graph: Graph, mesh: DeviceMesh, *, along_any_dim: bool = False) -> Restriction | None:
    """Return the restriction to the plan that ships with the model, on the last mesh axis; the first of two axes is data parallel. None if
    the model does not have such a plan, or the axis divides none of its weights.

    `along_any_dim`: the same constraints (memory of weights, mesh), but each weight that the plan shards may be sharded along any dim.
    """
    plan = vendor_plan(graph.config)
    if plan is None or len(mesh.axis_sizes) > 2:
        return None
    dims, idle = _planned_dims(graph, plan, mesh.axis_sizes[-1])
    # On an axis that divides no weight of the plan nothing is left of it: Llama-3-8B on 15 GPUs, each of which repeated the whole work.
    if all(d is None or number in idle for number, d in dims.items()):
        return None

    def follows(v: Value, state: WeightState) -> bool:
        dim = dims.get(id(v))
        if dim is None:
            return state.working == R
        if id(v) in idle:
            return True
        return isinstance(state.working, Shard) if along_any_dim else state.working == Shard(dim)

    between = _column_results(graph, plan)
    if len(mesh.axis_sizes) == 1:
        return VendorRules(graph, (is_unsplit,), (follows,), between=between)
    return VendorRules(
        graph, (is_batch_split, is_unsplit), (sums_gradient_whole, follows), between=between, ranks=mesh.axis_sizes[0]
    )
