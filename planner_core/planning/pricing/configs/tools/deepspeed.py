"""DeepSpeed's JSON: batch sizes, `zero_optimization`, `bf16` and `fp16`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError, Sentence, named
from planner_core.planning.methods import LayerStyles, Layout
from planner_core.planning.methods.tools import deepspeed
from planner_core.planning.pricing.configs.fields import (
    PRICED_BY_DEGREES,
    Fields,
    Setup,
    Table,
    read_batch_of_deepspeed,
    read_dtype_flags,
    remaining_ranks,
)

TABLE = Table(
    "DeepSpeed",
    no_effect="""
        zero_optimization.*bucket_size zero_optimization.sub_group_size zero_optimization.stage3_*
        activation_checkpointing.* zero_optimization.offload_*.pin_memory zero_optimization.offload_*.buffer_*
        zero_optimization.offload_*.fast_init zero_optimization.round_robin_gradients steps_per_print checkpoint.*
        flops_profiler.* optimizer.params.* scheduler.* fp16.* bf16.*
        curriculum_learning.* aio.*
    """,
)
SIGNATURE = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
DTYPES_OF_GRADIENTS = {
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32"), "float32"),
}
"""The dtype in which gradients are priced, by DeepSpeed's words: float16 has the bytes of bfloat16."""
PARTITION = "tensor_parallel.partition_config"
PARTITION_STYLES = {**{word: style for style, word in deepspeed.PARTITIONS.items()}, "skip": ""}
"""The styles of `methods.tp_layout`, by AutoTP's words; "skip" leaves a layer whole."""
STATES_ON_HOST = "DeepSpeed keeps weights in float32 there too and updates on the CPU; priced with moments there and the update on the GPU"


def recognises(data: Mapping[str, Any]) -> bool:
    """Return whether JSON or YAML is DeepSpeed's: its own names for batches or ZeRO."""
    return any(name in data for name in SIGNATURE)


def read(fields: Fields, num_gpus: int) -> Setup:
    """Read a run by DeepSpeed. Stages 0 to 2 keep whole weights on every rank, stage 3 shards them. Sequence parallelism is Ulysses'."""
    offload, notes = read_offload(
        fields, "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"
    )
    fields.require_value(
        "zero_optimization.zero_hpz_partition_size", 1, "a second copy of the weights inside a node (ZeRO++)"
    )
    tp, cp = fields.read_int("tensor_parallel.autotp_size", 1), fields.read_int("sequence_parallel_size", 1)
    degree_field = "tensor_parallel.autotp_size" if cp == 1 else "sequence_parallel_size"
    ranks = remaining_ranks(fields, degree_field, num_gpus, tp * cp)
    layout = zero_layout(fields, "zero_optimization.stage", ranks, tp, cp)
    sizes, batch = read_batch_of_deepspeed(fields, ranks)
    dtype = read_dtype_flags(fields, *(f"{section}.enabled" for section in deepspeed.DTYPE_SECTIONS.values()))
    gradients, gradient_notes = read_gradients(fields, dtype.get("dtype"), cp)
    options = {
        **sizes,
        "optimizer": "sgd" if fields.read_word("optimizer.type", "adamw") == "sgd" else "adamw",
        **dtype,
        **gradients,
        **offload,
        **(layers := read_layers(fields)),
    }
    layer_note = f"AutoTP finds the layers of {fields.where} by patterns of its own; {PRICED_BY_DEGREES}"
    layer_notes = (layer_note,) if tp > 1 and not layers else ()
    return fields.finish(TABLE, layout, options, (*notes, *gradient_notes, *layer_notes), batch)


def read_layers(fields: Fields) -> dict[str, LayerStyles]:
    """Return the layers that AutoTP is told by name as an option; none where it finds them by itself. Raises InputError."""
    name = f"{PARTITION}.layer_specs"
    specs = fields.get(name) or []
    defaults = fields.read_flag(f"{PARTITION}.use_default_specs", default=True)
    rules = []
    for spec in specs if isinstance(specs, (list, tuple)) else [specs]:
        patterns, kind = (
            (spec.get("patterns"), spec.get("partition_type")) if isinstance(spec, Mapping) else (None, None)
        )
        if kind not in PARTITION_STYLES or not isinstance(patterns, list) or not all(map(_is_pattern, patterns)):
            raise fields.wrong_value(name, spec, f"patterns with a partition_type of {', '.join(PARTITION_STYLES)}")
        rules += [(pattern, PARTITION_STYLES[kind]) for pattern in patterns]
    # With its own patterns beside these, which layers it splits depends on the model's type.
    return {"split_layers": LayerStyles(tuple(rules))} if rules and not defaults else {}


def _is_pattern(text: object) -> bool:
    """Return whether a value is a regular expression."""
    try:
        return isinstance(text, str) and re.compile(text) is not None
    except re.error:
        return False


def read_gradients(fields: Fields, dtype: str | None, cp: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the stack and the dtype of gradients as options, and a note where they are summed in another dtype than they are kept in.

    DeepSpeed keeps and sums gradients in the dtype of the model (the properties of its engine), but sums
    in float32 with sequence parallelism. `dtype`: the model's, if a file states it."""
    sums = "communication_data_type" if cp == 1 else "seq_parallel_communication_data_type"
    accum = "data_types.grad_accum_dtype"
    sum_dtype, grad_dtype = (
        DTYPES_OF_GRADIENTS[fields.read_word(name, default or "float32", tuple(DTYPES_OF_GRADIENTS))]
        for name, default in ((sums, dtype if cp == 1 else "float32"), (accum, dtype))
    )
    if dtype is None and not fields.has_value(sums) and not fields.has_value(accum):
        return {"stack": deepspeed.DEEPSPEED.name}, ()
    if sum_dtype == grad_dtype:
        return {"stack": deepspeed.DEEPSPEED.name, "gradients": grad_dtype}, ()
    note = f"gradients of {fields.where} are kept in {grad_dtype} ({accum}) and summed in {sum_dtype} ({sums}); priced in float32 for both"
    return {"stack": deepspeed.DEEPSPEED.name, "gradients": "float32"}, (note,)


def zero_layout(fields: Fields, name: str, ranks: int, tp: int, cp: int, default: int = 0) -> Layout:
    """Return the layout of a ZeRO stage over data-parallel ranks, and over context ranks, which exchange heads. Raises InputError."""
    stage = fields.read_int(name, default, minimum=0)
    if stage > 3:
        raise fields.wrong_value(name, stage, "0, 1, 2 or 3")
    cp_type = "ulysses" if cp > 1 else "ring"
    if stage == 3:
        return Layout(fsdp=ranks, tp=tp, cp=cp, cp_type=cp_type, zero=3 if ranks == 1 < cp else 0)
    return Layout(dp=ranks, tp=tp, zero=stage, cp=cp, cp_type=cp_type)


def read_offload(fields: Fields, optimizer: str, weights: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the option for states in the host's memory, and a note. Raises InputError for weights there, or states on a disk."""
    fields.require_off(
        weights,
        "weights in the host's memory",
        Sentence(
            "set it to none; ",
            named("offload"),
            " prices the optimizer's moments there, and zero stage 3 (",
            named("layout", "fsdp=N"),
            ") shards the weights",
        ),
    )
    device = fields.read_word(optimizer, "none")
    if device in ("none", "false"):
        return {}, ()
    if device != "cpu":
        raise InputError(
            f"{fields.where}: {optimizer} {device} keeps states on a disk, which cannot be priced; ",
            named("offload"),
            " prices them in the host's memory",
        )
    return {"offload": True}, (f"{optimizer} cpu of {fields.where}: {STATES_ON_HOST}",)
