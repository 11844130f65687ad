"""Trainers on transformers: axolotl's YAML, LLaMA-Factory's YAML, and TrainingArguments as YAML or JSON (of a script, of TRL's recipes).

All three say the batch, the tokens, adapters and what is recomputed; FSDP or DeepSpeed where they have them. They differ in names, which
a `Trainer` lists. A run that accelerate lays out says nothing of its layout here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner_core.core import InputError, Sentence, named
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import (
    Fields,
    FsdpDegrees,
    Setup,
    Table,
    count,
    fsdp_layout,
    read_dtype_flags,
    read_fsdp_strategy,
    remaining_ranks,
    switch,
)
from planner_core.planning.pricing.configs.tools import deepspeed

LIGER_LOSS = "chunked:8"
"""Liger runs head and loss as one kernel over parts of the tokens. The number of parts is the ratio of words to features, 8 or more for
the models of today."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """The names of one trainer's fields. `adapter`: the fields of the kind, the rank and the layers of adapters. `degrees`: the fields of
    each degree, the newest name first."""

    table: Table
    adapter: tuple[str, str, str]
    optimizer: str
    degrees: Mapping[str, tuple[str, ...]]


FSDP_NO_EFFECT = """
    *eval* dataset* dataloader_* save_* resume_from_checkpoint hub_* gradient_checkpointing_kwargs.*
    fsdp_config.*wrap* fsdp_config.*state_dict* fsdp_config.*prefetch fsdp_config.*ram_efficient*
    fsdp_config.*module_states fsdp_config.*orig_params fsdp_config.*limit_all_gathers fsdp_config.*version
    group_by_length
"""
ARGUMENTS_SETTINGS = (
    count("micro_batch", "per_device_train_batch_size", "per_gpu_train_batch_size", default=8),
    count("accumulate", "gradient_accumulation_steps", default=1),
    count("seq", "cutoff_len", "max_length", "max_seq_length", "max_seq_len", "block_size", "model_max_length"),
    switch("compiled", "torch_compile"),
    switch("loss", "use_liger_kernel", "use_liger", "enable_liger_kernel", off=None, on=LIGER_LOSS),
)
ARGUMENTS_NO_EFFECT = f"""
    {FSDP_NO_EFFECT} preprocessing_* *_workers overwrite_* *tokenizer* model_revision stage max_samples val_size ddp_*
    *_timeout fsdp_transformer_layer_cls_to_wrap activation_checkpointing_kwargs.* *generation* num_generations
    max_prompt_length shuffle_* image_* video_*
"""
ARGUMENTS_DEGREES = {
    "tp": ("parallelism_config.tp_size", "tp_size"),
    "cp": ("parallelism_config.cp_size",),
    "replicate": ("parallelism_config.dp_replicate_size",),
    "shard": ("parallelism_config.dp_shard_size",),
}
TRAINING_ARGUMENTS = Trainer(
    Table("transformers' TrainingArguments", ARGUMENTS_SETTINGS, no_effect=ARGUMENTS_NO_EFFECT),
    adapter=("use_peft", "lora_r", "lora_target_modules"),
    optimizer="optim",
    degrees=ARGUMENTS_DEGREES,
)
LLAMA_FACTORY = Trainer(
    Table("LLaMA-Factory", ARGUMENTS_SETTINGS, no_effect=ARGUMENTS_NO_EFFECT),
    adapter=("finetuning_type", "lora_rank", "lora_target"),
    optimizer="optim",
    degrees=ARGUMENTS_DEGREES,
)
AXOLOTL = Trainer(
    Table(
        "axolotl",
        (
            count("micro_batch", "micro_batch_size", default=1),
            count("accumulate", "gradient_accumulation_steps", default=1),
            count("seq", "sequence_len"),
            switch("compiled", "torch_compile"),
            switch("loss", "liger_fused_linear_cross_entropy", "cut_cross_entropy", off=None, on=LIGER_LOSS),
        ),
        no_effect=f"""
            {FSDP_NO_EFFECT} base_model* qat.group_size *buffer_size unfrozen_parameters*
            resize_token_embeddings_to_32x pretraining_dataset* val_set_size save* sample_packing* pad_to_sequence_len
            wandb_* special_tokens.* chat_template* fsdp_version min_sample_len eval_table_size eval_batch_size
            sequence_len_overflow_handling excess_length_strategy auto_resume_from_checkpoints curriculum_sampling
            heads_k_stride ring_attn_func lora_*
        """,
    ),
    adapter=("adapter", "lora_r", "lora_target_modules"),
    optimizer="optimizer",
    degrees={
        "tp": ("tensor_parallel_size",),
        "cp": ("context_parallel_size", "sequence_parallel_degree"),
        "ep": ("expert_parallel_size",),
        "replicate": ("dp_replicate_size",),
        "shard": ("dp_shard_size",),
    },
)


def recognises_axolotl(data: Mapping[str, Any]) -> bool:
    """Return whether a YAML is axolotl's: it names a `base_model` beside the data or the batch of a run."""
    return "base_model" in data and any(
        name in data for name in ("micro_batch_size", "sequence_len", "datasets", "num_epochs")
    )


def recognises_arguments(data: Mapping[str, Any]) -> bool:
    """Return whether settings are TrainingArguments: the batch by its own name."""
    return any(name in data for name in ("per_device_train_batch_size", "per_gpu_train_batch_size"))


def recognises_factory(data: Mapping[str, Any]) -> bool:
    """Return whether TrainingArguments are LLaMA-Factory's."""
    return recognises_arguments(data) and any(name in data for name in ("finetuning_type", "cutoff_len"))


def reader_of(trainer: Trainer) -> Callable[[Fields, int], Setup]:
    """Return the reader of a trainer's files."""

    def read(fields: Fields, num_gpus: int) -> Setup:
        lora, lora_notes = _read_adapters(fields, *trainer.adapter)
        optimizer, optimizer_notes = _read_optimizer(fields, trainer.optimizer)
        layout, layout_notes, software = _read_layout(fields, num_gpus, _read_degrees(fields, trainer))
        options = {
            **fields.read_options(trainer.table),
            "recompute": _read_recompute(fields),
            **read_dtype_flags(fields, "bf16", "fp16"),
            **optimizer,
            "stack": "accelerate",
            **software,
            **lora,
        }
        return fields.finish(trainer.table, layout, options, (*optimizer_notes, *layout_notes, *lora_notes))

    return read


def _read_degrees(fields: Fields, trainer: Trainer) -> FsdpDegrees:
    stated = {degree: fields.read_optional_int(fields.first_set(*names)) for degree, names in trainer.degrees.items()}
    # axolotl passed keys and values round a ring before it took torch's context parallelism, which gathers them.
    old_name = "sequence_parallel_degree" in fields.values and "context_parallel_size" not in fields.values
    return FsdpDegrees(
        tp=stated["tp"] or 1,
        cp=stated["cp"] or 1,
        cp_type="ring" if old_name or fields.has_value("ring_attn_func") else "gather",
        ep=stated.get("ep") or 1,
        replicate=stated["replicate"],
        shard=stated["shard"],
    )


def _read_recompute(fields: Fields) -> str:
    """`full` if any field recomputes layers. Raises InputError for checkpoints in the host's memory."""
    names = (
        "gradient_checkpointing",
        "activation_checkpointing",
        "fsdp_config.activation_checkpointing",
        "fsdp_config.fsdp_activation_checkpointing",
    )
    for name in names:
        value = fields.lowered(name)
        if value in ("offload", "offload_disk"):
            raise InputError(
                f"{fields.where}: {name} {value} keeps activations in the host's memory, which cannot be priced; set it to true"
            )
        if value == "unsloth":  # another implementation of the same
            fields.values[name] = True
    flags = [fields.read_flag(name) for name in names]
    return "full" if any(flags) else "none"


# --- adapters and the optimizer --------------------------------------------------------------------------------

QUANTIZED = ("load_in_4bit", "load_in_8bit", "quantization_bit", "gptq")
IN_4_BITS = {"load_in_4bit": ("true",), "quantization_bit": ("4",)}
"""The values that ask for bitsandbytes' weights in 4 bits."""
DOUBLE_QUANTIZATION = ("use_bnb_nested_quant", "double_quantization", "bnb_4bit_use_double_quant")
"""Whether scales are quantized too, by the names of tools."""


def _read_adapters(fields: Fields, kind: str, rank: str, targets: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the rank of adapters and whether frozen weights are in 4 bits, as options, with notes about what is priced in another way.

    Raises InputError for weights in 8 bits, and for other ways to freeze some: the given model has neither."""
    lora = fields.lowered(kind) in ("lora", "qlora", "true")
    nf4 = fields.lowered(kind) == "qlora" or (
        lora and any(fields.lowered(name) in values for name, values in IN_4_BITS.items())
    )
    # Each is read, so that a field which is off does not refuse the file by its name.
    for name in (kind, *QUANTIZED):
        value = fields.lowered(name)
        plain = value in ("none", "", "false", "0", "full") or (name == kind and lora)
        if plain or (nf4 and value in IN_4_BITS.get(name, ())):
            continue
        advice = Sentence(
            "; ",
            named("lora", fields.get(rank) or 8),
            " with ",
            named("layout"),
            " prices frozen weights in 16 bits, and ",
            named("nf4"),
            " beside it in 4",
        )
        raise InputError(
            f"{fields.where} ({fields.tool}): {name} {value} freezes or quantises weights of the model in a way that its config does not "
            "say; give the model as it is trained by path.py:function",
            *((advice,) if value != "freeze" else ()),
        )
    adapters = fields.if_used(lora)
    size, parts = adapters.read_int(rank, 8), adapters.read_words(targets)
    scales = [fields.lowered(name) for name in DOUBLE_QUANTIZATION]
    if not lora:
        return {}, ()
    notes: tuple[str, ...] = ()
    if layers := [t for t in parts if t not in ("all", "all-linear", "true")]:
        notes += (
            f"{targets} of {fields.where} puts adapters beside {', '.join(layers)} alone; priced beside every linear layer but the head",
        )
    if nf4 and "false" in scales:
        notes += (
            f"{fields.where} keeps scales of 4-bit weights in float32, 0.05 bytes a number more than priced (double quantization)",
        )
    return {"lora": size, **({"nf4": True} if nf4 else {})}, notes


BATCH_OF_TRAINER = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"
"""Fields of a trainer's DeepSpeed file that state its own batch once more: it refuses to start where they differ."""
ADAMW_KERNELS = {
    "adamw": "fused",
    "adam": "fused",
    "adamw_torch": "foreach",
    "adamw_torch_fused": "fused",
    "adamw_hf": "for-loop",
    "adamw_apex_fused": "fused",
    "adamw_torch_xla": "for-loop",
}
"""How the Trainer's kinds of AdamW update weights. torch's own runs over lists of tensors unless the fused one is asked for."""


def _read_optimizer(fields: Fields, name: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the optimizer as an option, with a note if its moments have another form than the priced one."""
    kind = fields.read_word(name, "adamw")
    if kind.startswith("sgd"):
        return {"optimizer": "sgd"}, ()
    if kind not in ADAMW_KERNELS:
        note = f"{name} {kind} of {fields.where} keeps moments in a form of its own: priced as AdamW, whose two take 8 bytes a weight"
        return {"optimizer": "adamw"}, (note,)
    kernels = {"optimizer_kernels": ADAMW_KERNELS[kind]} if fields.has_value(name) else {}
    return {"optimizer": "adamw", **kernels}, ()


# --- the layout ------------------------------------------------------------------------------------------------


def _read_layout(fields: Fields, num_gpus: int, degrees: FsdpDegrees) -> tuple[Layout, tuple[str, ...], dict[str, Any]]:
    """Return the layout of the field `fsdp` or `deepspeed`, with its notes and options. Without either it is data parallelism, or FSDP if
    degrees of shards are given."""
    inline = {n.removeprefix("deepspeed."): v for n, v in fields.values.items() if n.startswith("deepspeed.")}
    fields.get("deepspeed")
    if fields.has_value("deepspeed") or inline:
        return _deepspeed_layout(fields, num_gpus, degrees, inline)
    words = set(fields.read_words("fsdp"))
    if "offload" in words:
        raise InputError(
            f"{fields.where}: fsdp offload keeps weights in the host's memory, which cannot be priced; leave it out"
        )
    for name in ("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", "fsdp_config.cpu_offload"):
        fields.require_off(
            name,
            "weights in the host's memory",
            Sentence("set it to false; ", named("offload"), " prices the optimizer's moments there"),
        )
    reshard = fields.read_word(
        fields.first_set("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward"), "true"
    )
    strategy = read_fsdp_strategy(
        fields, fields.first_set("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy")
    )
    strategy = next(
        (w for w in ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard", "hybrid_shard_zero2") if w in words),
        strategy,
    )
    uses_fsdp = words - {"false"} or any(n.startswith("fsdp_config") for n in fields.values) or degrees.shard
    if not uses_fsdp:
        note = Sentence(
            f"{fields.where} has neither fsdp nor deepspeed: taken as data parallelism with whole weights; where accelerate says more, "
            "state ",
            named("layout"),
        )
        return fsdp_layout(fields, num_gpus, replace(degrees, strategy="no_shard"), "tp_size"), (note,), {}
    degrees = replace(degrees, strategy="shard_grad_op" if reshard == "false" else strategy)
    return fsdp_layout(fields, num_gpus, degrees, "tensor and context parallelism"), (), {}


def _deepspeed_layout(
    fields: Fields, num_gpus: int, degrees: FsdpDegrees, inline: Mapping[str, Any]
) -> tuple[Layout, tuple[str, ...], dict[str, Any]]:
    """Return the layout of DeepSpeed's settings, given inline or in a file that the field names. They become fields of the run, as
    `deepspeed.zero_optimization.stage`, so that one that is not read is reported like any other."""
    data = inline
    if not inline:
        assert fields.read_json is not None  # every reader of a file gets one
        data = Fields.from_nested(fields.read_json(str(fields.get("deepspeed")), "deepspeed"), fields.where).values
    where = f"{fields.where}'s {fields.values.get('deepspeed', 'deepspeed')}"
    settings = Fields(where, dict(data), tool=deepspeed.TABLE.tool)
    ranks = remaining_ranks(fields, "tp_size", num_gpus, degrees.tp * degrees.cp)
    offload, notes = deepspeed.read_offload(
        settings, "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"
    )
    layout = deepspeed.zero_layout(settings, "zero_optimization.stage", ranks, degrees.tp, degrees.cp)
    dtype = read_dtype_flags(fields, "bf16", "fp16") or read_dtype_flags(settings, "bf16.enabled", "fp16.enabled")
    gradients, gradient_notes = deepspeed.read_gradients(settings, dtype.get("dtype"), degrees.cp)
    settings.ignore(f"{deepspeed.TABLE.no_effect} {BATCH_OF_TRAINER}")
    fields.adopt("deepspeed", settings)
    return layout, (*notes, *gradient_notes), {**offload, **gradients}
