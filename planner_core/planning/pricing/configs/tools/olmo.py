"""OLMo's YAML: FSDP, or data parallelism, over all GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.planning.pricing.configs.fields import (
    Fields,
    FsdpDegrees,
    Setup,
    Table,
    choice,
    count,
    fsdp_layout,
    micro_batches_of_step,
    read_fsdp_strategy,
    switch,
)

TABLE = Table(
    "OLMo",
    (
        count("micro_batch", "device_train_microbatch_size", default=1),
        count("seq", "model.max_sequence_length"),
        choice(
            "dtype",
            "precision",
            {"amp_bf16": "bfloat16", "amp_fp16": "float16", "fp32": "float32"},
            default="amp_bf16",
        ),
        switch("loss", "fused_loss", off=None, on="fused"),
    ),
    sizes={
        "model.n_layers": "num_hidden_layers",
        "model.d_model": "hidden_size",
        "model.n_heads": "num_attention_heads",
    },
    no_effect="""
        data.* save_* load_* *eval* sharded_checkpointer optimizer.* scheduler.* tokenizer.* speed_monitor.* model.*
        wandb.* fsdp.wrapping_strategy fsdp.precision fsdp.use_orig_params restore_* fast_forward_batches reset_*
        no_pre_train_checkpoint remote_save_folder
    """,
)
RECOMPUTATIONS = {"none": "none", "whole_layer": "full"}
"""The values of `activation_checkpointing` that can be priced. Its others recompute a part of the layers."""


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a YAML is OLMo's: the batch by its own names."""
    return "device_train_microbatch_size" in data or "global_train_batch_size" in data


def read(fields: Fields, num_gpus: int) -> Setup:
    """Read a run by OLMo."""
    sharded = any(n.startswith("fsdp") for n in fields.values)
    sharded = sharded and fields.read_word("distributed_strategy", "fsdp") == "fsdp"
    degrees = FsdpDegrees(
        replicate=fields.read_optional_int(fields.first_set("fsdp.hybrid_sharding_num_model_replicas")),
        strategy=read_fsdp_strategy(fields, "fsdp.sharding_strategy") if sharded else "no_shard",
    )
    layout = fsdp_layout(fields, num_gpus, degrees, "fsdp")
    recompute = fields.read_word("activation_checkpointing", "none")
    if recompute not in RECOMPUTATIONS:
        raise fields.wrong_value(
            "activation_checkpointing", recompute, "null or whole_layer, as a part of the layers cannot be priced"
        )
    options = fields.read_options(TABLE)
    options |= {
        "accumulate": micro_batches_of_step(fields, "global_train_batch_size", options["micro_batch"], layout.data)
        or 1,
        "recompute": RECOMPUTATIONS[recompute],
        "compiled": any(n.startswith("compile.") for n in fields.values),
    }
    fields.read.update(n for n in fields.values if n.startswith("compile"))
    return fields.finish(TABLE, layout, options)
