"""The tensor-parallel plan of transformers: patterns of modules and the style of each, or `"auto"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, Table, remaining_ranks

TABLE = Table("transformers tp_plan", no_effect="model_type architectures *_token_id")
PLAN_FIELDS = ("tp_plan", "base_model_tp_plan")
SPLIT_STYLES = (
    "colwise",
    "rowwise",
    "colwise_rep",
    "colwise_gather_output",
    "packed_colwise",
    "packed_rowwise",
    "embedding_rowwise",
    "embedding_colwise",
    "rowwise_split_input",
    "auto",
)
WHOLE_STYLES = (
    "replicated_with_grad_allreduce",
    "gather",
    "local",
    "moe_tp_experts",
    "ep_router",
    "replicate",
    "isolated",
)
SEQUENCE_STYLES = ("sequence_parallel",)


def recognises(data: Mapping[str, Any]) -> bool:
    """Return whether settings are a plan, under the name that a config or a model gives it, or bare: patterns of modules and words."""
    bare = bool(data) and all(isinstance(v, str) for v in data.values()) and any("." in n or "*" in n for n in data)
    return bare or any(name in data for name in PLAN_FIELDS)


def read(fields: Fields, num_gpus: int) -> Setup:
    """Read a model that is loaded with `tp_plan`. `tp_size` ranks are tensor-parallel, by default all; the rest are data parallel."""
    plan_field = next((f for f in PLAN_FIELDS if any(_is_in(name, f) for name in fields.values)), "")
    styles = {name: str(value) for name, value in fields.values.items() if not plan_field or _is_in(name, plan_field)}
    for name, style in styles.items():
        if style not in (*SPLIT_STYLES, *WHOLE_STYLES, *SEQUENCE_STYLES):
            raise InputError(
                f"{fields.where}: {name} is {style!r}, which is not a known style; give e.g. colwise or rowwise"
            )
        fields.read.add(name)
    if not set(styles.values()) & set(SPLIT_STYLES):
        raise InputError(
            f"{fields.where}: {plan_field or 'tp_plan'} splits no layer; give e.g. colwise or rowwise, or auto"
        )
    tp = fields.read_int("tp_size", num_gpus)
    sp = tp > 1 and any(style in SEQUENCE_STYLES for style in styles.values())
    return fields.finish(
        TABLE, Layout(dp=remaining_ranks(fields, "tp_size", num_gpus, tp), tp=tp, sp=sp), {"stack": "accelerate"}
    )


def _is_in(name: str, plan_field: str) -> bool:
    return name == plan_field or name.startswith(f"{plan_field}.")
