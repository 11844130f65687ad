"""DeepSpeed's JSON: batch sizes, `zero_optimization`, `bf16` and `fp16`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, accumulation, shared_out

NAME = "DeepSpeed"
OWN = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
WITHOUT_EFFECT = """
    zero_optimization.*bucket_size zero_optimization.sub_group_size zero_optimization.stage3_*
    activation_checkpointing.* zero_optimization.offload_*.pin_memory zero_optimization.offload_*.buffer_*
    zero_optimization.offload_*.fast_init zero_optimization.round_robin_gradients steps_per_print checkpoint.*
    data_types.* flops_profiler.* tensor_parallel.partition_config.* optimizer.params.* scheduler.* fp16.* bf16.*
    curriculum_learning.* aio.*
"""
HOST = "DeepSpeed keeps weights in float32 there too and updates on the CPU; priced with moments there and the update on the GPU"


def is_own(data: Mapping[str, Any]) -> bool:
    """Whether JSON or YAML is DeepSpeed's: its own names for batches or ZeRO."""
    return any(name in data for name in OWN)


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by DeepSpeed: stages 0 to 2 keep whole weights on every rank, stage 3 shards them. Sequence parallelism is Ulysses'."""
    offload, notes = offloaded(
        fields, "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"
    )
    fields.only("zero_optimization.zero_hpz_partition_size", 1, "a second copy of the weights inside a node (ZeRO++)")
    tp, cp = fields.whole("tensor_parallel.autotp_size", 1), fields.whole("sequence_parallel_size", 1)
    ranks = shared_out(
        fields, "tensor_parallel.autotp_size" if cp == 1 else "sequence_parallel_size", num_gpus, tp * cp
    )
    layout = by_stage(fields, "zero_optimization.stage", ranks, tp, cp)
    fields.ignore(WITHOUT_EFFECT)
    return fields.setup(layout, {**_options(fields, ranks), **offload}, notes)


def by_stage(fields: Fields, name: str, ranks: int, tp: int = 1, cp: int = 1, default: int = 0) -> Layout:
    """The layout of a ZeRO stage over data-parallel ranks, and over context ranks, which exchange heads. Raises InputError."""
    stage = fields.whole(name, default, least=0)
    if stage > 3:
        raise fields.wrong(name, stage, "0, 1, 2 or 3")
    kind = "ulysses" if cp > 1 else "ring"
    if stage == 3:
        return Layout(fsdp=ranks, tp=tp, cp=cp, cp_type=kind, zero=3 if ranks == 1 < cp else 0)
    return Layout(dp=ranks, tp=tp, zero=stage, cp=cp, cp_type=kind)


def offloaded(fields: Fields, optimizer: str, weights: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The option for states in the host's memory, and a note. Raises InputError for weights there, or states on a disk."""
    fields.off(
        weights,
        "weights in the host's memory",
        "set it to none; --offload prices the optimizer's moments there, and zero stage 3 (--layout fsdp=N) shards the weights",
    )
    device = fields.text(optimizer, "none")
    if device in ("none", "false"):
        return {}, ()
    if device != "cpu":
        raise InputError(
            f"{fields.where}: {optimizer} {device} keeps states on a disk, which cannot be priced; --offload prices them in "
            "the host's memory"
        )
    return {"offload": True}, (f"{optimizer} cpu of {fields.where}: {HOST}",)


def _options(fields: Fields, ranks: int) -> dict[str, Any]:
    times = fields.whole("gradient_accumulation_steps", 1)
    name = "train_micro_batch_size_per_gpu"
    if fields.has(name):
        micro = fields.whole(name, 1)
        if not fields.has("gradient_accumulation_steps"):
            times = accumulation(fields, "train_batch_size", micro, ranks) or 1
        fields.read.add("train_batch_size")
    else:
        fields.read.add(name)
        micro = accumulation(fields, "train_batch_size", times, ranks) or 1
    dtype = (
        {"dtype": "float16"}
        if fields.flag("fp16.enabled")
        else {"dtype": "bfloat16"}
        if fields.flag("bf16.enabled")
        else {}
    )
    kind = fields.text("optimizer.type", "adamw")
    optimizer = {"optimizer": "sgd"} if kind == "sgd" else {"optimizer": "adamw"}
    return {"micro_batch": micro, "accumulate": times, **dtype, **optimizer}
