"""Megatron-Bridge's recipes and NeMo's YAML: Megatron-LM's options under the names of their attributes.

cfg.model.tensor_model_parallel_size = 8      ->  --tensor-model-parallel-size 8
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner_core.core import InputError
from planner_core.planning.pricing.configs.fields import Fields, Setup
from planner_core.planning.pricing.configs.python_text import CALL
from planner_core.planning.pricing.configs.tools import megatron

NAME, NEMO = "Megatron-Bridge", "NeMo"
SECTIONS = ("model", "train", "ddp", "trainer", "mixed_precision", "optimizer", "validation")
"""Sections whose fields are Megatron-LM's options."""
RENAMED = {
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "encoder_seq_length": "seq_length",
    "sequence_length": "seq_length",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "num_nodes": "nnodes",
    "devices": "nproc_per_node",
    "num_moe_experts": "num_experts",
}
PRECISION = {
    "bf16": "--bf16",
    "bf16-mixed": "--bf16",
    "bf16_mixed": "--bf16",
    "fp16": "--fp16",
    "16": "--fp16",
    "16-mixed": "--fp16",
    "fp16_mixed": "--fp16",
}
WITHOUT_EFFECT = """
    dataset.* checkpoint.* logger.* tokenizer.* scheduler.* rng.* dist.* profiling.* env_vars* exp_manager.*
    model.data.* model.tokenizer.* model.optim.* comm_overlap* rerun_state_machine.* validation.*
    inprocess_restart.* model.resume_from_checkpoint trainer.enable_checkpointing model.offload_modules () *.()
    name
"""


def is_own(data: Mapping[str, Any]) -> bool:
    """Whether a YAML is NeMo's or Megatron-Bridge's: a `model` with Megatron's degrees beside `trainer` or `train`."""
    model = data.get("model")
    parallel = isinstance(model, Mapping) and "tensor_model_parallel_size" in model
    return bool(parallel and any(isinstance(data.get(n), Mapping) for n in ("trainer", "train", "ddp")))


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by Megatron-Bridge or NeMo, priced as Megatron-LM's options of the same names."""
    if any(n.partition(".")[0] == "peft" and v is not None for n, v in fields.values.items()):
        raise InputError(
            f"{fields.where}: peft puts adapters beside weights that it freezes, which the model's config does not say; give the model "
            "with its adapters as path.py:function, and its layout as --layout"
        )
    fields.ignore(WITHOUT_EFFECT)
    fields.tool = NEMO if any(n.startswith("trainer.") for n in fields.values) else NAME
    values: dict[str, Any] = {}
    for name, value in fields.values.items():
        section, _, rest = name.partition(".")
        named = bool(rest) and not rest.endswith(CALL)
        if name in fields.without_effect or section not in SECTIONS or value is None or not named:
            continue
        option = f"--{RENAMED.get(rest, rest).replace('_', '-')}"
        if value is not False and option not in values:
            values[option] = value
    seq = fields.values.get("dataset.seq_length", fields.values.get("dataset.sequence_length"))
    if seq is not None:
        values.setdefault("--seq-length", seq)
    if str(fields.values.get("model.optim.name", "")).startswith("distributed"):
        values["--use-distributed-optimizer"] = True
    values.pop("--name", None)
    for name in ("mixed_precision", "trainer.precision"):
        word = str(fields.values.get(name, "")).lower()
        if word in PRECISION:
            values[PRECISION[word]] = True
    values = {n: v for n, v in values.items() if n not in ("--mixed-precision", "--precision")}
    flat = Fields(fields.where, values, tool=fields.tool)
    flat.ignore("--cuda-graph-* --recompute-modules --*.()")
    made = megatron.setup(flat, num_gpus, _low(fields))
    return replace(made, tool=fields.tool)


def _low(fields: Fields) -> tuple[str, ...]:
    """A note about products in 8 or 4 bits."""
    words = " ".join(str(v).lower() for n, v in fields.values.items() if n.startswith("mixed_precision"))
    low = next((kind for kind in ("mxfp8", "nvfp4", "fp8") if kind in words), "")
    return (
        (f"mixed_precision of {fields.where}: products in {low} are faster than in 16 bits, in which they are priced",)
        if low
        else ()
    )
