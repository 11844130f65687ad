"""DeepSpeed's JSON: batch sizes, `zero_optimization`, `bf16` and `fp16`."""

from __future__ import annotations

from typing import Any

from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, accumulation, shared_out

NAME = "DeepSpeed"
MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by DeepSpeed: stages 0 to 2 keep whole weights on every rank, stage 3 shards them."""
    for name in ("offload_optimizer", "offload_param"):
        fields.off(f"zero_optimization.{name}.device", "CPU offload")
    fields.only("sequence_parallel_size", 1, "context parallelism")
    fields.only("zero_optimization.zero_hpz_partition_size", 1, "a second copy of the weights inside a node (ZeRO++)")
    tp = fields.whole("tensor_parallel.autotp_size", 1)
    ranks = shared_out(fields, "tensor_parallel.autotp_size", num_gpus, tp)
    stage = fields.whole("zero_optimization.stage", 0, least=0)
    if stage > 3:
        raise fields.wrong("zero_optimization.stage", stage, "0, 1, 2 or 3")
    layout = Layout(fsdp=ranks, tp=tp) if stage == 3 else Layout(dp=ranks, tp=tp, zero=stage)
    return Setup(layout, _options(fields, ranks), fields.unread())


def _options(fields: Fields, ranks: int) -> dict[str, Any]:
    times = fields.whole("gradient_accumulation_steps", 1)
    name = "train_micro_batch_size_per_gpu"
    if fields.has(name):
        micro = fields.whole(name, 1)
        if not fields.has("gradient_accumulation_steps"):
            times = accumulation(fields, "train_batch_size", micro, ranks) or 1
        fields.read.add("train_batch_size")
    else:
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
