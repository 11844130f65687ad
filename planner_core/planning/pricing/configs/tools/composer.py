"""YAML with Composer's names for the batch: LLM Foundry's, with which MPT was trained, and OLMo's. Both run FSDP over all GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError, shorten_value
from planner_core.planning.pricing.configs.fields import (
    Fields,
    FsdpDegrees,
    Setup,
    Table,
    choice,
    count,
    fsdp_layout,
    read_batch,
    read_fsdp_strategy,
    switch,
)

MICRO_BATCH, BATCH = "device_train_microbatch_size", "global_train_batch_size"
COMMON = (
    count("micro_batch", MICRO_BATCH, default=1),
    choice(
        "dtype",
        "precision",
        {"amp_bf16": "bfloat16", "amp_fp16": "float16", "fp32": "float32"},
        default="amp_bf16",
    ),
)
SIZES = {
    "model.n_layers": "num_hidden_layers",
    "model.d_model": "hidden_size",
    "model.n_heads": "num_attention_heads",
}
OLMO = Table(
    "OLMo",
    (
        *COMMON,
        count("seq", "model.max_sequence_length"),
        switch("loss", "fused_loss", off=None, on="fused"),
    ),
    sizes=SIZES,
    no_effect="""
        data.* save_* load_* *eval* sharded_checkpointer optimizer.* scheduler.* tokenizer.* speed_monitor.* model.*
        wandb.* fsdp.wrapping_strategy fsdp.precision fsdp.use_orig_params restore_* fast_forward_batches reset_*
        no_pre_train_checkpoint remote_save_folder
    """,
)
RECOMPUTATIONS = {"none": "none", "whole_layer": "full"}
"""The values of OLMo's `activation_checkpointing` that can be priced. Its others recompute a part of the layers."""
FOUNDRY = Table(
    "LLM Foundry",
    (
        *COMMON,
        count("seq", "max_seq_len", "variables.max_seq_len"),
        switch("recompute", "fsdp_config.activation_checkpointing", off="none", on="full"),
    ),
    sizes=SIZES,
    no_effect="""
        train_loader.* eval_loader.* *eval* model.* tokenizer.* optimizer.* scheduler.* algorithms.* callbacks.*
        loggers.* save_* load_* variables.* data_* python_log_level console_log_interval log_to_console progress_bar
        fsdp_config.activation_checkpointing_reentrant fsdp_config.limit_all_gathers fsdp_config.state_dict_type
        fsdp_config.load_planner fsdp_config.save_planner autoresume dist_timeout
    """,
)
SUMS = {"pure": "in 16 bits, half the traffic of the 32 that are priced", "default": ""}
"""What LLM Foundry's `mixed_precision` changes: the dtype in which gradients are summed over the ranks."""


def recognises_foundry(data: Mapping[str, Any]) -> bool:
    """Return whether a YAML is LLM Foundry's: its loaders or FSDP beside the batch. It is tried before OLMo, which has the batch's names
    too."""
    return MICRO_BATCH in data and any(name in data for name in ("train_loader", "fsdp_config"))


def recognises_olmo(data: Mapping[str, Any]) -> bool:
    """Return whether a YAML is OLMo's: the batch by its own names."""
    return MICRO_BATCH in data or BATCH in data


def read_olmo(fields: Fields, num_gpus: int) -> Setup:
    """Read a run by OLMo."""
    sharded = any(n.startswith("fsdp") for n in fields.values)
    sharded = sharded and fields.read_word("distributed_strategy", "fsdp") == "fsdp"
    degrees = FsdpDegrees(
        replicate=fields.read_optional_int(fields.first_set("fsdp.hybrid_sharding_num_model_replicas")),
        strategy=read_fsdp_strategy(fields, "fsdp.sharding_strategy") if sharded else "no_shard",
    )
    recompute = fields.read_word("activation_checkpointing", "none")
    if recompute not in RECOMPUTATIONS:
        raise fields.wrong_value(
            "activation_checkpointing", recompute, "null or whole_layer, as a part of the layers cannot be priced"
        )
    compilation = {n: fields.get(n) for n in fields.values if n.startswith("compile")}
    options = {
        "stack": "fsdp2",
        "recompute": RECOMPUTATIONS[recompute],
        "compiled": any(n.startswith("compile.") for n in compilation),
    }
    return _finish(fields, OLMO, num_gpus, degrees, options)


def read_foundry(fields: Fields, num_gpus: int) -> Setup:
    """Read a run by LLM Foundry."""
    # Of other fields auto is left to the tool, but without the samples of a micro-batch there is no price.
    if fields.lowered(MICRO_BATCH) == "auto":
        raise InputError(f"{fields.where}: {MICRO_BATCH} auto is found while the run starts; write the samples there")
    fields.require_off(
        "fsdp_config.activation_cpu_offload", "activations in the host's memory", "activation_checkpointing is priced"
    )
    sharded = any(name.startswith("fsdp_config") for name in fields.values)
    strategy = read_fsdp_strategy(fields, "fsdp_config.sharding_strategy") if sharded else "no_shard"
    word = fields.read_word("fsdp_config.mixed_precision", "default")
    change = SUMS.get(word, f"as {word} says, which is not priced")
    notes = (f"fsdp_config.mixed_precision {word} of {fields.where} sums gradients {change}",) if change else ()
    degrees = FsdpDegrees(strategy=strategy, replicate=_read_replicas(fields, strategy))
    return _finish(fields, FOUNDRY, num_gpus, degrees, {"stack": "llm-foundry"}, notes)


def _read_replicas(fields: Fields, strategy: str) -> int | None:
    """Return the replicas of a `device_mesh` of [replicas, shards]; None without one. Raises InputError for a mesh that is not used."""
    mesh = fields.get("fsdp_config.device_mesh")
    # A mesh of one dim makes shards of all ranks, as the strategy says too.
    if not isinstance(mesh, list) or len(mesh) == 1:
        return None
    if not strategy.startswith("hybrid") or len(mesh) != 2:
        raise InputError(
            f"{fields.where}: fsdp_config.device_mesh {shorten_value(mesh)} beside sharding_strategy {strategy.upper()} is not read; "
            "leave it out, or set HYBRID_SHARD for [replicas, shards]"
        )
    return int(mesh[0])


def _finish(
    fields: Fields,
    table: Table,
    num_gpus: int,
    degrees: FsdpDegrees,
    options: Mapping[str, Any],
    notes: tuple[str, ...] = (),
) -> Setup:
    """Return the run of these degrees, with the options of the tool's table and the micro-batches of a step."""
    layout = fsdp_layout(fields, num_gpus, degrees, "fsdp")
    stated = fields.read_options(table)
    return fields.finish(table, layout, {**stated, "accumulate": 1, **options}, notes, read_batch(fields, BATCH))
