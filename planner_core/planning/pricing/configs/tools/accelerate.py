"""accelerate's YAML: FSDP, DeepSpeed or Megatron-LM by its plugin, `parallelism_config`, `dynamo_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Degrees, Fields, Setup, by_degrees, shared_out, strategy_of
from planner_core.planning.pricing.configs.tools.deepspeed import by_stage, offloaded

NAME = "accelerate"
OWN = ("distributed_type", "compute_environment")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
KINDS = ("fsdp", "deepspeed", "megatron_lm", "multi_gpu", "no", "tp")
WITHOUT_EFFECT = """
    fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_*_wrap fsdp_config.fsdp_state_dict_type
    fsdp_config.fsdp_backward_prefetch fsdp_config.fsdp_cpu_ram_efficient_loading
    fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_use_orig_params fsdp_config.fsdp_limit_all_gathers
    fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_version machine_rank main_* rdzv_backend same_network tpu_*
    use_cpu debug downcast_bf16 gpu_ids enable_cpu_affinity deepspeed_config.deepspeed_*launcher*
    deepspeed_config.zero3_* parallelism_config.*sp_seq_length* compute_environment parallelism_config.*backend
    parallelism_config.*attn_implementation deepspeed_config.gradient_clipping
"""


def is_own(data: Mapping[str, Any]) -> bool:
    """Whether a YAML is of accelerate: it says where and by what processes are started."""
    return any(name in data for name in OWN)


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by accelerate: FSDP, DeepSpeed or plain data parallelism over all processes; if it is hybrid, Replicate across nodes."""
    asked = fields.whole("num_processes", num_gpus)
    if asked != num_gpus:
        raise InputError(
            f"{fields.where}: num_processes is {asked}, but the cluster has {num_gpus} GPUs; give a cluster of {asked}"
        )
    kind = fields.text("distributed_type", "fsdp", KINDS)
    layout, notes, offload = _layout(fields, kind, num_gpus)
    options: dict[str, Any] = {"accumulate": _accumulate(fields, kind), **offload}
    if fields.has("mixed_precision"):
        options["dtype"] = DTYPES[fields.text("mixed_precision", "bf16", tuple(DTYPES))]
    options["compiled"] = fields.text("dynamo_config.dynamo_backend", "no") not in ("no", "eager")
    again = ("fsdp_config.fsdp_activation_checkpointing", "megatron_lm_config.megatron_lm_recompute_activations")
    options["recompute"] = "full" if fields.flag(again[0]) else "none"
    if fields.flag(again[1]):
        notes += (
            f"{again[1]} of {fields.where} runs core attention again, which a flash kernel does too: priced as none",
        )
    fields.ignore(WITHOUT_EFFECT)
    return fields.setup(layout, options, notes)


def _accumulate(fields: Fields, kind: str) -> int:
    own = {"deepspeed": "deepspeed_config", "megatron_lm": "megatron_lm_config"}.get(kind, "fsdp_config")
    other = f"{own}.megatron_lm_num_micro_batches" if kind == "megatron_lm" else f"{own}.gradient_accumulation_steps"
    return fields.whole(fields.first("gradient_accumulation_steps", other), 1)


def _layout(fields: Fields, kind: str, num_gpus: int) -> tuple[Layout, tuple[str, ...], dict[str, Any]]:
    """The layout, notes, and options that it brings."""
    if kind == "megatron_lm":
        return _by_megatron(fields, num_gpus), (), {}
    told = _degrees(fields)
    if kind == "deepspeed":
        return _by_deepspeed(fields, told, num_gpus)
    fields.off(
        "fsdp_config.fsdp_offload_params",
        "weights in the host's memory",
        "set it to false; --offload prices the optimizer's moments there",
    )
    if told.cp > 1 and told.cp_type == "ulysses":
        raise InputError(
            f"{fields.where}: parallelism_config_sp_size needs distributed_type DEEPSPEED; write that, or cp_size for context parallelism "
            "of FSDP"
        )
    if kind in ("multi_gpu", "no", "tp"):
        told = Degrees(tp=told.tp, cp=told.cp, cp_type=told.cp_type, strategy="no_shard")
    return by_degrees(fields, num_gpus, told, "parallelism_config_tp_size"), (), {}


def _degrees(fields: Fields) -> Degrees:
    def degree(name: str) -> int:
        return fields.whole(f"parallelism_config.parallelism_config_{name}_size", 1)

    cp, sp = degree("cp"), degree("sp")
    word = "parallelism_config.parallelism_config_cp_comm_strategy"
    passed = fields.text(word, "allgather", ("allgather", "alltoall")) == "alltoall"
    strategy = strategy_of(fields, "fsdp_config.fsdp_sharding_strategy")
    again = fields.text(
        "fsdp_config.fsdp_reshard_after_forward", "true"
    )  # FSDP 2's field for what FSDP 1 calls a strategy
    strategy = "shard_grad_op" if again in ("false", "shard_grad_op") else strategy
    copies, shards = degree("dp_replicate"), degree("dp_shard")
    nodes = fields.whole("num_machines", 1)
    if strategy.startswith("hybrid") and copies == 1:
        copies = nodes
    has_shards = shards > 1
    return Degrees(
        tp=degree("tp"),
        cp=max(cp, sp),
        cp_type="ulysses" if sp > 1 else "ring" if passed else "gather",
        replicate=copies if copies > 1 or not has_shards else None,
        shard=shards if has_shards else None,
        strategy=strategy,
    )


def _by_deepspeed(fields: Fields, told: Degrees, num_gpus: int) -> tuple[Layout, tuple[str, ...], dict[str, Any]]:
    own = "deepspeed_config"
    if fields.has(f"{own}.deepspeed_config_file"):
        name = fields.values[f"{own}.deepspeed_config_file"]
        raise InputError(f"{fields.where}: {own}.deepspeed_config_file says the stage; give {name} itself as --config")
    offload, notes = offloaded(fields, f"{own}.offload_optimizer_device", f"{own}.offload_param_device")
    ranks = shared_out(fields, "parallelism_config_sp_size", num_gpus, told.tp * told.cp)
    return by_stage(fields, f"{own}.zero_stage", ranks, told.tp, told.cp, default=2), notes, offload


def _by_megatron(fields: Fields, num_gpus: int) -> Layout:
    own = "megatron_lm_config.megatron_lm_"
    tp, pp = fields.whole(f"{own}tp_degree", 1), fields.whole(f"{own}pp_degree", 1)
    ranks = shared_out(fields, f"{own}tp_degree with pp_degree", num_gpus, tp * pp)
    zero = 1 if fields.flag(f"{own}use_distributed_optimizer") else 0
    return Layout(dp=ranks, tp=tp, sp=tp > 1 and fields.flag(f"{own}sequence_parallelism"), zero=zero, pp=pp)
