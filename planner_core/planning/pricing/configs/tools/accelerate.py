"""accelerate's YAML: FSDP, DeepSpeed or Megatron-LM by its plugin, `parallelism_config`, `dynamo_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError, Sentence, named
from planner_core.planning.methods import Layout
from planner_core.planning.methods.tools import accelerate
from planner_core.planning.pricing.configs.fields import (
    Fields,
    FsdpDegrees,
    Setup,
    Table,
    choice,
    fsdp_layout,
    read_fsdp_strategy,
    remaining_ranks,
    switch,
)
from planner_core.planning.pricing.configs.tools.deepspeed import read_gradients, read_offload, zero_layout

CONFIG, DEEPSPEED, FSDP = "parallelism_config.parallelism_config_", "deepspeed_config.", "fsdp_config.fsdp_"
MEGATRON = "megatron_lm_config.megatron_lm_"
DTYPES_BY_PRECISION = {word: dtype for dtype, word in accelerate.PRECISION_WORDS.items()}
HALVES = {word: dtype for word, dtype in DTYPES_BY_PRECISION.items() if dtype != "float32"}
TABLE = Table(
    "accelerate",
    (
        choice("dtype", "mixed_precision", DTYPES_BY_PRECISION),
        switch("recompute", f"{FSDP}activation_checkpointing", off="none", on="full"),
    ),
    no_effect="""
        fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_*_wrap fsdp_config.fsdp_state_dict_type
        fsdp_config.fsdp_backward_prefetch fsdp_config.fsdp_cpu_ram_efficient_loading
        fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_use_orig_params fsdp_config.fsdp_limit_all_gathers
        fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_version machine_rank main_* rdzv_backend same_network tpu_*
        use_cpu debug downcast_bf16 gpu_ids enable_cpu_affinity deepspeed_config.deepspeed_*launcher*
        deepspeed_config.zero3_* parallelism_config.*sp_seq_length* compute_environment parallelism_config.*backend
        parallelism_config.*attn_implementation deepspeed_config.gradient_clipping
    """,
)
PLUGINS = ("fsdp", "deepspeed", "megatron_lm", "multi_gpu", "no", "tp")


def recognises(data: Mapping[str, Any]) -> bool:
    """Return whether a YAML is of accelerate: it says where and by what processes are started."""
    return "distributed_type" in data or "compute_environment" in data


def read(fields: Fields, num_gpus: int) -> Setup:
    """Read a run by accelerate: FSDP, DeepSpeed or plain data parallelism over all processes."""
    processes = fields.read_int("num_processes", num_gpus)
    if processes != num_gpus:
        raise InputError(
            f"{fields.where}: num_processes is {processes}, but the cluster has {num_gpus} GPUs; give a cluster of {processes}"
        )
    plugin = fields.read_word("distributed_type", "fsdp", PLUGINS)
    layout, notes, offload = _read_layout(fields, plugin, num_gpus)
    options = {
        **fields.read_options(TABLE),
        "accumulate": _read_accumulate(fields, plugin),
        "compiled": fields.read_word("dynamo_config.dynamo_backend", "no") not in ("no", "eager"),
        **offload,
    }
    if plugin == "deepspeed" and not fields.has_value(f"{FSDP}activation_checkpointing"):
        del options["recompute"]  # its section has no field for that
    recompute_flag = f"{MEGATRON}recompute_activations"
    if fields.read_flag(recompute_flag):
        notes += (
            f"{recompute_flag} of {fields.where} runs core attention again, which a flash kernel does too: priced as none",
        )
    return fields.finish(TABLE, layout, options, notes)


def _read_accumulate(fields: Fields, plugin: str) -> int:
    section = {"deepspeed": "deepspeed_config", "megatron_lm": "megatron_lm_config"}.get(plugin, "fsdp_config")
    name = f"{MEGATRON}num_micro_batches" if plugin == "megatron_lm" else f"{section}.gradient_accumulation_steps"
    return fields.read_int(fields.first_set("gradient_accumulation_steps", name), 1)


def _read_layout(fields: Fields, plugin: str, num_gpus: int) -> tuple[Layout, tuple[str, ...], dict[str, Any]]:
    """Return the layout by the plugin, with its notes and options."""
    if plugin == "megatron_lm":
        return _megatron_layout(fields, num_gpus), (), {"stack": "megatron"}
    degrees = _read_degrees(fields)
    if plugin == "deepspeed":
        return _deepspeed_layout(fields, degrees, num_gpus)
    fields.require_off(
        f"{FSDP}offload_params",
        "weights in the host's memory",
        Sentence("set it to false; ", named("offload"), " prices the optimizer's moments there"),
    )
    if degrees.cp > 1 and degrees.cp_type == "ulysses":
        raise InputError(
            f"{fields.where}: parallelism_config_sp_size needs distributed_type DEEPSPEED; write that, or cp_size for context parallelism "
            "of FSDP"
        )
    # Without FSDP's plugin every data-parallel rank holds whole weights, as in DDP.
    if plugin in ("multi_gpu", "no", "tp"):
        degrees = FsdpDegrees(tp=degrees.tp, cp=degrees.cp, cp_type=degrees.cp_type, strategy="no_shard")
    # accelerate (its dataclasses.py) has FSDP sum gradients in the dtype that computes; float16 has the bytes of bfloat16.
    halves = plugin == "fsdp" and fields.lowered("mixed_precision") in HALVES
    options = {"stack": "accelerate", **({"gradients": "bfloat16"} if halves else {})}
    return fsdp_layout(fields, num_gpus, degrees, "parallelism_config_tp_size"), (), options


def _read_degrees(fields: Fields) -> FsdpDegrees:
    def degree(name: str) -> int:
        return fields.read_int(f"{CONFIG}{name}_size", 1)

    cp, sp = degree("cp"), degree("sp")
    comm = fields.read_word(f"{CONFIG}cp_comm_strategy", "allgather", ("allgather", "alltoall"))
    strategy = read_fsdp_strategy(fields, f"{FSDP}sharding_strategy")
    # FSDP 2 says by this field what FSDP 1 says by its strategy.
    reshard = fields.read_word(f"{FSDP}reshard_after_forward", "true")
    strategy = "shard_grad_op" if reshard in ("false", "shard_grad_op") else strategy
    copies, shards = degree("dp_replicate"), degree("dp_shard")
    nodes = fields.read_int("num_machines", 1)
    if strategy.startswith("hybrid") and copies == 1:
        copies = nodes  # hybrid sharding without degrees keeps shards inside a node
    return FsdpDegrees(
        tp=degree("tp"),
        cp=max(cp, sp),
        cp_type="ulysses" if sp > 1 else "ring" if comm == "alltoall" else "gather",
        replicate=copies if copies > 1 or shards == 1 else None,
        shard=shards if shards > 1 else None,
        strategy=strategy,
    )


def _deepspeed_layout(
    fields: Fields, degrees: FsdpDegrees, num_gpus: int
) -> tuple[Layout, tuple[str, ...], dict[str, Any]]:
    config_file = f"{DEEPSPEED}deepspeed_config_file"
    if fields.has_value(config_file):
        path = fields.values[config_file]
        raise InputError(f"{fields.where}: {config_file} says the stage; give {path} itself")
    offload, notes = read_offload(fields, f"{DEEPSPEED}offload_optimizer_device", f"{DEEPSPEED}offload_param_device")
    ranks = remaining_ranks(fields, "parallelism_config_sp_size", num_gpus, degrees.tp * degrees.cp)
    # Of a section without a stage accelerate makes stage 2; DeepSpeed's own default is 0.
    layout = zero_layout(fields, f"{DEEPSPEED}zero_stage", ranks, degrees.tp, degrees.cp, default=2)
    # A DeepSpeed section of accelerate has no fields for these dtypes, so DeepSpeed's own defaults hold.
    dtype = HALVES.get(fields.lowered("mixed_precision"))
    gradients, gradient_notes = read_gradients(fields, dtype, degrees.cp)
    return layout, (*notes, *gradient_notes), {**offload, **gradients}


def _megatron_layout(fields: Fields, num_gpus: int) -> Layout:
    tp, pp = fields.read_int(f"{MEGATRON}tp_degree", 1), fields.read_int(f"{MEGATRON}pp_degree", 1)
    ranks = remaining_ranks(fields, f"{MEGATRON}tp_degree with pp_degree", num_gpus, tp * pp)
    zero = 1 if fields.read_flag(f"{MEGATRON}use_distributed_optimizer") else 0
    sp = tp > 1 and fields.read_flag(f"{MEGATRON}sequence_parallelism")
    return Layout(dp=ranks, tp=tp, sp=sp, zero=zero, pp=pp)
