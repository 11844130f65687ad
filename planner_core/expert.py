"""The tensor-parallel plans that ship with transformers (`base_model_tp_plan`), as a baseline: `hf-expert`.

A plan maps patterns of module names to styles: a `colwise` linear layer is split by its output features, a `rowwise`
one by its input features, what no pattern names is replicated, and the residual stream is whole. The plans are data,
`assets/experts.json`, by model type; `python -m planner_core.capture.snapshots --experts` writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner_core.graph import Block, Graph, Op, Value, join_name
from planner_core.mesh import DeviceMesh
from planner_core.methods import AxisRules, Baseline, PairTest, batch_split, summed, whole
from planner_core.models import ASSETS
from planner_core.placement import R, Shard
from planner_core.problem import Restriction
from planner_core.rules import Pair, Row
from planner_core.tables import Network

TABLE = ASSETS.parent / "experts.json"
FROM_LAST = {"colwise": 2, "colwise_gather_output": 2, "packed_colwise": 2, "rowwise": 1, "rowwise_split_input": 1, "packed_rowwise": 1,
             "embedding_rowwise": 2, "embedding_colwise": 1}  # fmt: skip
"""Styles that split a weight: which of its dims, counted from the last."""


@cache
def expert_plans() -> Mapping[str, Mapping[str, str]]:
    """Pattern to style, by model type."""
    found: dict[str, dict[str, str]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def expert_plan(config: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The expert's plan for a model's config, or for the text half of a composite one."""
    parts = [config, *(v for v in config.values() if isinstance(v, Mapping))]
    return next((plan for part in parts if (plan := expert_plans().get(str(part.get("model_type"))))), None)


def split_dim(name: str, ndim: int, plan: Mapping[str, str]) -> int | None:
    """The dim along which `plan` splits the parameter of this full name; None: whole."""
    module, _, last = name.rpartition(".")
    for pattern, style in plan.items():
        for path in (name, module):
            if style in FROM_LAST and re.search(rf"(^|\.){_regex(pattern)}$", path):
                if last == "bias" and ndim == 1:
                    return 0 if FROM_LAST[style] == 2 else None
                return max(ndim - FROM_LAST[style], 0)
    return None


@cache
def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "[0-9]+")


@dataclass
class ExpertRules(AxisRules):
    """As Megatron-LM, but attention may also run whole, where the plan does not split it."""

    def _row_passes(
        self, where: Block, net: Network, ops: tuple[Op, ...], rows: tuple[Row, ...], test: PairTest
    ) -> bool:
        attention = [r.label for o, r in zip(ops, rows, strict=True) if o.fn == "scaled_dot_product_attention"]
        if test is not batch_split and attention == ["R"]:
            return all(r.label == "R" for r in rows)
        return super()._row_passes(where, net, ops, rows, test)


def expert_rules(graph: Graph, mesh: DeviceMesh, *, free: bool = False) -> Restriction | None:
    """The restriction to the expert's plan on the last mesh axis (data parallel on the first of two), or None if there is none.

    `free`: the same constraints (no more memory for weights, the same mesh), but each weight that the plan splits may be
    split along any of its dims.
    """
    plan = expert_plan(graph.config)
    if plan is None or len(mesh.axis_sizes) > 2:
        return None
    dims: dict[int, int | None] = {}
    first = {c.block: c.prefix for c in reversed(list(graph.calls()))}
    for block in (graph.top, *graph.blocks.values()):
        for value in block.values:
            if value.kind == "parameter":
                full = join_name(first.get(block.name, ""), value.name)
                dims[id(value)] = split_dim(full, len(value.meta.shape), plan)
    if all(d is None for d in dims.values()):
        return None

    def follows(v: Value, pair: Pair) -> bool:
        dim = dims.get(id(v))
        if dim is None:
            return pair[0] == R
        return isinstance(pair[0], Shard) if free else pair[0] == Shard(dim)

    if len(mesh.axis_sizes) == 1:
        return ExpertRules(graph, (whole,), (follows,))
    return ExpertRules(graph, (batch_split, whole), (summed, follows))


EXPERT = Baseline("hf-expert", "hf-expert", expert_rules, zero=0)
