"""accelerate's YAML: `fsdp_config`, `parallelism_config`, `dynamo_config`."""

from __future__ import annotations

from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, shared_out

NAME = "accelerate"
MARKS = ("fsdp_config", "distributed_type", "compute_environment")
STRATEGIES = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by accelerate: FSDP or plain data parallelism over all processes; if it is hybrid, Replicate across nodes."""
    for name, what in (
        ("parallelism_config_cp_size", "context parallelism"),
        ("parallelism_config_sp_size", "context parallelism"),
    ):
        fields.only(f"parallelism_config.{name}", 1, what)
    fields.off("fsdp_config.fsdp_offload_params", "CPU offload")
    tp = fields.whole("parallelism_config.parallelism_config_tp_size", 1)
    ranks = shared_out(fields, "parallelism_config_tp_size", num_gpus, tp)
    asked = fields.whole("num_processes", num_gpus)
    if asked != num_gpus:
        raise InputError(
            f"{fields.where}: num_processes is {asked}, but the cluster has {num_gpus} GPUs; give a cluster of {asked}"
        )
    kind = fields.text("distributed_type", "fsdp", ("fsdp", "multi_gpu", "no"))
    layout = _sharded(fields, ranks, tp) if kind == "fsdp" else Layout(dp=ranks, tp=tp)
    options: dict[str, Any] = {"accumulate": fields.whole("gradient_accumulation_steps", 1)}
    if fields.has("mixed_precision"):
        options["dtype"] = DTYPES[fields.text("mixed_precision", "bf16", tuple(DTYPES))]
    options["compiled"] = fields.text("dynamo_config.dynamo_backend", "no") not in ("no", "eager")
    options["recompute"] = "full" if fields.flag("fsdp_config.fsdp_activation_checkpointing") else "none"
    return Setup(layout, options, fields.unread())


def _sharded(fields: Fields, ranks: int, tp: int) -> Layout:
    given = fields.text("fsdp_config.fsdp_sharding_strategy", "full_shard")
    strategy = STRATEGIES.get(given, given.removeprefix("_"))
    if strategy not in STRATEGIES.values():
        raise fields.wrong("fsdp_config.fsdp_sharding_strategy", given, f"one of {', '.join(STRATEGIES.values())}")
    again = fields.text(
        "fsdp_config.fsdp_reshard_after_forward", "true"
    )  # FSDP 2 has this field for what FSDP 1 calls a strategy
    if again in ("false", "shard_grad_op"):
        strategy = "shard_grad_op"
    copies = fields.whole("parallelism_config.parallelism_config_dp_replicate_size", 1)
    nodes = fields.whole("num_machines", 1)
    if strategy.startswith("hybrid") and copies == 1:
        copies = nodes
    if strategy == "no_shard":
        return Layout(dp=ranks, tp=tp)
    if strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        return Layout(dp=ranks, tp=tp, zero=2)
    return Layout(dp=copies, fsdp=shared_out(fields, "dp_replicate_size", ranks, copies), tp=tp)
