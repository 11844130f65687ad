"""The tensor-parallel plan of transformers: patterns of modules and the style of each, or `"auto"`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import EXPERT_STYLE, LayerStyles, Layout
from planner_core.planning.methods.tools import pairs
from planner_core.planning.pricing.configs.fields import PRICED_BY_DEGREES, Fields, Setup, Table, remaining_ranks

TABLE = Table("transformers tp_plan", no_effect="model_type architectures *_token_id")
PLAN_FIELDS = ("tp_plan", "base_model_tp_plan")
AUTO = "auto"
STYLES = {
    **{word: style for style, word in pairs.STYLES.items()},
    "colwise_rep": "gathered",
    "packed_colwise": "colwise",
    "packed_rowwise": "rowwise",
}
"""The styles that split a layer, by their words in `methods.tp_layout`."""
WHOLE_STYLES = (
    "replicated_with_grad_allreduce",
    "gather",
    "local",
    pairs.EXPERT_STYLE,
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
    styles = {name: str(fields.get(name)) for name in fields.values if not plan_field or _is_in(name, plan_field)}
    for name, style in styles.items():
        if style not in (AUTO, *STYLES, *WHOLE_STYLES, *SEQUENCE_STYLES):
            raise InputError(
                f"{fields.where}: {name} is {style!r}, which is not a known style; give e.g. colwise or rowwise"
            )
    if not set(styles.values()) & {AUTO, *STYLES}:
        raise InputError(
            f"{fields.where}: {plan_field or 'tp_plan'} splits no layer; give e.g. colwise or rowwise, or auto"
        )
    tp = fields.read_int("tp_size", num_gpus)
    sp = tp > 1 and any(style in SEQUENCE_STYLES for style in styles.values())
    layout = Layout(dp=remaining_ranks(fields, "tp_size", num_gpus, tp), tp=tp, sp=sp)
    layers = _read_layers(styles, plan_field)
    notes = (
        () if layers or tp == 1 else (f"{fields.where} leaves the layers to the model's own plan; {PRICED_BY_DEGREES}",)
    )
    return fields.finish(TABLE, layout, {"stack": "accelerate", **layers}, notes)


def _read_layers(styles: Mapping[str, str], plan_field: str) -> dict[str, LayerStyles]:
    """Return the layers that patterns name as an option; none for `auto`, which leaves them to the model's own plan."""
    if AUTO in styles.values():
        return {}
    words = {**STYLES, pairs.EXPERT_STYLE: EXPERT_STYLE}
    rules = []
    for name, style in styles.items():
        pattern = re.escape(name.removeprefix(f"{plan_field}.")).replace(r"\*", "[0-9]+")
        # A pattern may leave out the first modules of a path: those of a base model do.
        rules.append((rf"(?:.*\.)?{pattern}\.weight$", words.get(style, "")))
    return {"split_layers": LayerStyles(tuple(rules))}


def _is_in(name: str, plan_field: str) -> bool:
    return name == plan_field or name.startswith(f"{plan_field}.")
