"""axolotl's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.planning.pricing.configs.fields import Degrees, Fields, Setup, precision
from planner_core.planning.pricing.configs.tools.huggingface import (
    Beside,
    adapters,
    by_plugin,
    fused_linear,
    optimizer_of,
    recompute,
)

NAME = "axolotl"
WITHOUT_EFFECT = """
    base_model* qat.group_size *buffer_size dataloader_* unfrozen_parameters* resize_token_embeddings_to_32x
    dataset* pretraining_dataset* val_set_size *eval* save* sample_packing* pad_to_sequence_len
    resume_from_checkpoint gradient_checkpointing_kwargs.* hub_* wandb_* special_tokens.* chat_template*
    fsdp_version min_sample_len fsdp_config.*wrap* fsdp_config.*state_dict* fsdp_config.*prefetch
    fsdp_config.*ram_efficient* fsdp_config.*module_states fsdp_config.*orig_params fsdp_config.*limit_all_gathers
    fsdp_config.*version eval_table_size eval_batch_size sequence_len_overflow_handling excess_length_strategy
    auto_resume_from_checkpoints group_by_length curriculum_sampling heads_k_stride ring_attn_func lora_*
"""


def is_own(data: Mapping[str, Any]) -> bool:
    """Whether a YAML is axolotl's: it names a `base_model` beside the data or the batch of a run."""
    return "base_model" in data and any(
        n in data for n in ("micro_batch_size", "sequence_len", "datasets", "num_epochs")
    )


def setup(fields: Fields, num_gpus: int, beside: Beside) -> Setup:
    """A run by axolotl: FSDP by degrees or by accelerate's plugin, or DeepSpeed."""
    lora, some = adapters(fields, "adapter", "lora_r", "lora_target_modules")
    optimizer, notes = optimizer_of(fields, "optimizer")
    options: dict[str, Any] = {
        "micro_batch": fields.whole("micro_batch_size", 1),
        "accumulate": fields.whole("gradient_accumulation_steps", 1),
        "recompute": recompute(fields),
        "compiled": fields.flag("torch_compile"),
        **optimizer,
        **_dtype(fields),
    }
    if fields.has("sequence_len"):
        options["seq"] = fields.whole("sequence_len", 1)
    context = fields.first("context_parallel_size", "sequence_parallel_degree")
    told = Degrees(
        tp=fields.whole("tensor_parallel_size", 1),
        cp=fields.whole(context, 1),
        cp_type="gather" if _gathers(fields) else "ring",
        ep=fields.whole("expert_parallel_size", 1),
        replicate=_degree(fields, "dp_replicate_size"),
        shard=_degree(fields, "dp_shard_size"),
    )
    layout, more, offload = by_plugin(fields, num_gpus, told, beside)
    loss = fused_linear(fields, "liger_fused_linear_cross_entropy", "cut_cross_entropy")
    fields.ignore(WITHOUT_EFFECT)
    return fields.setup(layout, {**options, **offload, **loss, **lora}, (*notes, *more, *some))


def _gathers(fields: Fields) -> bool:
    """Whether context ranks gather keys and values, as torch's context parallelism does, and not ring-flash-attention."""
    return "context_parallel_size" in fields.values and not fields.has("ring_attn_func")


def _degree(fields: Fields, name: str) -> int | None:
    return fields.whole(name, 1) if fields.has(name) else None


def _dtype(fields: Fields) -> dict[str, str]:
    """The dtype; `bf16: auto` is bfloat16 where the GPU has it, which is the planner's own default."""
    for name in ("bf16", "fp16"):
        if str(fields.values.get(name)).lower() in ("auto", "full", "none"):
            fields.read.add(name)
            fields.values[name] = None if str(fields.values.get(name)).lower() != "full" else True
    return precision(fields, "bf16", "fp16")
