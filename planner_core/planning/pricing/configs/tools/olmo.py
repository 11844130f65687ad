"""OLMo's YAML: FSDP, or data parallelism, over all GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Degrees, Fields, Setup, accumulation, by_degrees, strategy_of

NAME = "OLMo"
PRECISION = {"amp_bf16": "bfloat16", "amp_fp16": "float16", "fp32": "float32"}
SIZES = {"model.n_layers": "num_hidden_layers", "model.d_model": "hidden_size", "model.n_heads": "num_attention_heads"}
WITHOUT_EFFECT = """
    data.* save_* load_* *eval* sharded_checkpointer optimizer.* scheduler.* tokenizer.* speed_monitor.* model.*
    wandb.* fsdp.wrapping_strategy fsdp.precision fsdp.use_orig_params restore_* fast_forward_batches reset_*
    no_pre_train_checkpoint remote_save_folder
"""
RECOMPUTE = {"none": "none", "whole_layer": "full", "one_in_two": "", "one_in_three": "", "fine_grained": ""}


def is_own(data: Mapping[str, Any]) -> bool:
    """Whether a YAML is OLMo's: the batch by its own names."""
    return "device_train_microbatch_size" in data or "global_train_batch_size" in data


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by OLMo."""
    sharded = any(n.startswith("fsdp") for n in fields.values) and fields.text("distributed_strategy", "fsdp") == "fsdp"
    copies = fields.first("fsdp.hybrid_sharding_num_model_replicas")
    told = Degrees(
        replicate=fields.whole(copies, 1) if fields.has(copies) else None,
        strategy=strategy_of(fields, "fsdp.sharding_strategy") if sharded else "no_shard",
    )
    layout: Layout = by_degrees(fields, num_gpus, told, "fsdp")
    micro = fields.whole("device_train_microbatch_size", 1)
    kind = fields.text("activation_checkpointing", "none")
    if not RECOMPUTE.get(kind):
        raise fields.wrong(
            "activation_checkpointing", kind, "null or whole_layer, as a part of the layers cannot be priced"
        )
    options: dict[str, Any] = {
        "micro_batch": micro,
        "accumulate": accumulation(fields, "global_train_batch_size", micro, layout.data) or 1,
        "recompute": RECOMPUTE[kind],
        "compiled": any(n.startswith("compile.") for n in fields.values),
        "dtype": PRECISION[fields.text("precision", "amp_bf16", tuple(PRECISION))],
    }
    if fields.flag("fused_loss"):
        options["loss"] = "fused"
    seq = fields.first("model.max_sequence_length")
    if fields.has(seq):
        options["seq"] = fields.whole(seq, 1)
    sizes = {other: fields.whole(name, 1) for name, other in SIZES.items() if fields.has(name)}
    fields.read.update(n for n in fields.values if n.startswith("compile"))
    fields.ignore(WITHOUT_EFFECT)
    return fields.setup(layout, options, (), sizes)
