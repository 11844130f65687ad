"""The tensor-parallel plan of transformers: patterns of modules and the style of each, or `"auto"`."""

from __future__ import annotations

from planner_core.core import InputError
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, shared_out

NAME = "transformers tp_plan"
MARKS = ("tp_plan", "base_model_tp_plan")
WITHOUT_EFFECT = """
    model_type architectures *_token_id
"""
SPLIT = (
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
WHOLE = ("replicated_with_grad_allreduce", "gather", "local", "moe_tp_experts", "ep_router", "replicate", "isolated")
BY_TOKENS = ("sequence_parallel",)


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A model that is loaded with `tp_plan`. All ranks are tensor-parallel, or `tp_size` ranks if it is given and the rest are data
    parallel."""
    mark = next(m for m in MARKS if any(_under(name, m) for name in fields.values))
    styles = {name: str(value) for name, value in fields.values.items() if _under(name, mark)}
    for name, style in styles.items():
        if style not in (*SPLIT, *WHOLE, *BY_TOKENS):
            raise InputError(
                f"{fields.where}: {name} is {style!r}, which is not a known style; give e.g. colwise or rowwise"
            )
        fields.read.add(name)
    if not set(styles.values()) & set(SPLIT):
        raise InputError(f"{fields.where}: {mark} splits no layer; give e.g. colwise or rowwise, or auto")
    tp = fields.whole("tp_size", num_gpus)
    sp = any(style in BY_TOKENS for style in styles.values())
    return fields.setup(Layout(dp=shared_out(fields, "tp_size", num_gpus, tp), tp=tp, sp=sp and tp > 1), {})


def _under(name: str, mark: str) -> bool:
    return name == mark or name.startswith(f"{mark}.")
