"""TrainingArguments of transformers, as YAML or JSON: of a script, of TRL's recipes, or of LLaMA-Factory.

They say the batch, the tokens and what is recomputed; FSDP and DeepSpeed where they have them. A run that accelerate lays out says nothing
of that here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import (
    Degrees,
    Fields,
    Setup,
    by_degrees,
    precision,
    shared_out,
    strategy_of,
)
from planner_core.planning.pricing.configs.tools import deepspeed

NAME, FACTORY = "transformers' TrainingArguments", "LLaMA-Factory"
OWN = ("per_device_train_batch_size", "per_gpu_train_batch_size")
OF_FACTORY = ("finetuning_type", "cutoff_len")
TOKENS = ("cutoff_len", "max_length", "max_seq_length", "max_seq_len", "block_size", "model_max_length")
"""What tools call the tokens of a sample."""
WITHOUT_EFFECT = """
    *eval* dataset* preprocessing_* *_workers dataloader_* save_* resume_from_checkpoint overwrite_* *tokenizer*
    model_revision hub_* stage max_samples val_size group_by_length ddp_* *_timeout
    gradient_checkpointing_kwargs.* fsdp_config.*wrap* fsdp_config.*state_dict* fsdp_config.*prefetch
    fsdp_config.*ram_efficient* fsdp_config.*module_states fsdp_config.*orig_params fsdp_config.*limit_all_gathers
    fsdp_config.*version fsdp_transformer_layer_cls_to_wrap activation_checkpointing_kwargs.* *generation*
    num_generations max_prompt_length shuffle_* image_* video_*
"""
Beside = Callable[[str, str], Mapping[str, Any]]
"""Reads a JSON file that lies beside a settings file: its path there, and the field that names it. Raises InputError."""


def is_own(data: Mapping[str, Any]) -> bool:
    """Whether settings are TrainingArguments: the batch by its own name."""
    return any(name in data for name in OWN)


def setup(fields: Fields, num_gpus: int, beside: Beside) -> Setup:
    """A run by the Trainer of transformers or one that is built on it."""
    fields.tool = FACTORY if any(name in fields.values for name in OF_FACTORY) else NAME
    own = (
        ("finetuning_type", "lora_rank", "lora_target")
        if fields.tool == FACTORY
        else ("use_peft", "lora_r", "lora_target_modules")
    )
    lora, some = adapters(fields, *own)
    micro = fields.whole(fields.first(*OWN), 8)
    options: dict[str, Any] = {
        "micro_batch": micro,
        "accumulate": fields.whole("gradient_accumulation_steps", 1),
        "recompute": recompute(fields),
        "compiled": fields.flag("torch_compile"),
        **precision(fields, "bf16", "fp16"),
    }
    tokens = fields.first(*TOKENS)
    if fields.has(tokens):
        options["seq"] = fields.whole(tokens, 1)
    optimizer, notes = optimizer_of(fields, "optim")
    parallel = "parallelism_config."
    told = Degrees(
        tp=fields.whole(fields.first(f"{parallel}tp_size", "tp_size"), 1),
        cp=fields.whole(f"{parallel}cp_size", 1),
        cp_type="gather",
        replicate=_degree(fields, f"{parallel}dp_replicate_size"),
        shard=_degree(fields, f"{parallel}dp_shard_size"),
    )
    layout, more, offload = by_plugin(fields, num_gpus, told, beside)
    loss = fused_linear(fields, "use_liger_kernel", "use_liger", "enable_liger_kernel")
    fields.ignore(WITHOUT_EFFECT)
    return fields.setup(layout, {**options, **optimizer, **offload, **loss, **lora}, (*notes, *more, *some))


def fused_linear(fields: Fields, *names: str) -> dict[str, str]:
    """The loss where the head and the loss are one kernel over parts of the tokens. Liger chooses the number of parts by the ratio of
    words to features, 8 or more for the models of today."""
    asked = [fields.flag(name) for name in names]
    return {"loss": "chunked:8"} if any(asked) else {}


def _degree(fields: Fields, name: str) -> int | None:
    return fields.whole(name, 1) if fields.has(name) else None


def recompute(fields: Fields) -> str:
    """What is recomputed: each layer whole, if anything is. Raises InputError for checkpoints in the host's memory."""
    names = (
        "gradient_checkpointing",
        "activation_checkpointing",
        "fsdp_config.activation_checkpointing",
        "fsdp_config.fsdp_activation_checkpointing",
    )
    for name in names:
        value = str(fields.values.get(name)).lower()
        if value in ("offload", "offload_disk"):
            raise InputError(
                f"{fields.where}: {name} {value} keeps activations in the host's memory, which cannot be priced; set it to true"
            )
        if value == "unsloth":
            fields.values[name] = True
    asked = [fields.flag(name) for name in names]
    return "full" if any(asked) else "none"


QUANTISED = ("load_in_4bit", "load_in_8bit", "quantization_bit", "gptq")
IN_4_BITS = {"load_in_4bit": ("true",), "quantization_bit": ("4",)}
"""The values that ask for bitsandbytes' weights in 4 bits."""
DOUBLE = ("use_bnb_nested_quant", "double_quantization", "bnb_4bit_use_double_quant")
"""Whether scales are quantized too, by the names of tools."""


def adapters(fields: Fields, kind: str, rank: str, targets: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The rank of adapters and whether frozen weights are in 4 bits, as options; notes where only some layers have an adapter, or scales
    are in float32. Raises InputError for weights in 8 bits, and for other ways to freeze some: the model given has neither."""
    asked = str(fields.values.get(kind)).lower()
    with_adapters = asked in ("lora", "qlora", "true")
    nf4 = asked == "qlora" or (
        with_adapters and any(str(fields.values.get(name)).lower() in values for name, values in IN_4_BITS.items())
    )
    for name in (kind, *QUANTISED):
        value = str(fields.values.get(name)).lower()
        fields.read.add(name)
        plain = value in ("none", "", "false", "0", "full") or (name == kind and with_adapters)
        if plain or (nf4 and value in IN_4_BITS.get(name, ())):
            continue
        lower = (
            f"; --lora {fields.values.get(rank) or 8} with --layout prices frozen weights in 16 bits, and --nf4 beside it in 4"
            if value != "freeze"
            else ""
        )
        raise InputError(
            f"{fields.where} ({fields.tool}): {name} {value} freezes or quantises weights of the model in a way that its config does not "
            f"say; give the model as it is trained by path.py:function{lower}"
        )
    fields.read.update((targets, *DOUBLE))
    if not with_adapters:
        fields.read.add(rank)
        return {}, ()
    named = [t for t in fields.words(targets) if t not in ("all", "all-linear", "true")]
    note = f"{targets} of {fields.where} puts adapters beside {', '.join(named)} alone; priced beside every linear layer but the head"
    single = nf4 and any(str(fields.values.get(name)).lower() == "false" for name in DOUBLE)
    scales = f"{fields.where} keeps scales of 4-bit weights in float32, 0.05 bytes a number more than priced (double quantization)"
    notes = (*([note] if named else []), *([scales] if single else []))
    return {"lora": fields.whole(rank, 8), **({"nf4": True} if nf4 else {})}, notes


ADAMW = {
    "adamw": "fused",
    "adam": "fused",
    "adamw_torch": "foreach",
    "adamw_torch_fused": "fused",
    "adamw_hf": "for-loop",
    "adamw_apex_fused": "fused",
    "adamw_torch_xla": "for-loop",
}
"""How the Trainer's kinds of AdamW update weights. torch's own runs over lists of tensors if nothing else is asked for."""


def optimizer_of(fields: Fields, name: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """The optimizer as an option, and a note where its moments are kept in another form than the priced one."""
    kind = fields.text(name, "adamw")
    if kind.startswith("sgd"):
        return {"optimizer": "sgd"}, ()
    kernels = {"optimizer_kernels": ADAMW[kind]} if fields.has(name) and kind in ADAMW else {}
    note = f"{name} {kind} of {fields.where} keeps moments in a form of its own: priced as AdamW, whose two take 8 bytes a weight"
    return {"optimizer": "adamw", **kernels}, () if kind in ADAMW else (note,)


def by_plugin(
    fields: Fields, num_gpus: int, told: Degrees, beside: Beside
) -> tuple[Layout, tuple[str, ...], dict[str, Any]]:
    """The layout of the field `fsdp` or `deepspeed`, with notes and options that it brings; without either, data parallelism, or FSDP
    if degrees of shards are given."""
    stated = "deepspeed"
    nested = {n.removeprefix("deepspeed."): v for n, v in fields.values.items() if n.startswith("deepspeed.")}
    if fields.has(stated) or nested:
        data = nested or Fields.of(beside(str(fields.values[stated]), stated), fields.where).values
        fields.read.update([stated, *(f"deepspeed.{n}" for n in nested)])
        own = Fields(f"{fields.where}'s {fields.values.get(stated, stated)}", dict(data), tool=deepspeed.NAME)
        ranks = shared_out(fields, "tp_size", num_gpus, told.tp * told.cp)
        offload, notes = deepspeed.offloaded(
            own, "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"
        )
        return deepspeed.by_stage(own, "zero_optimization.stage", ranks, told.tp, told.cp), notes, offload
    words = set(fields.words("fsdp")) if fields.has("fsdp") else set()
    fields.read.update(("fsdp", "deepspeed"))
    if "offload" in words:
        raise InputError(
            f"{fields.where}: fsdp offload keeps weights in the host's memory, which cannot be priced; leave it out"
        )
    for name in ("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", "fsdp_config.cpu_offload"):
        fields.off(
            name, "weights in the host's memory", "set it to false; --offload prices the optimizer's moments there"
        )
    again = fields.text(
        fields.first("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward"), "true"
    )
    strategy = strategy_of(fields, fields.first("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy"))
    strategy = next(
        (w for w in ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard", "hybrid_shard_zero2") if w in words),
        strategy,
    )
    any_fsdp = words - {"false"} or any(n.startswith("fsdp_config") for n in fields.values) or told.shard
    if not any_fsdp:
        note = (
            f"{fields.where} has neither fsdp nor deepspeed: taken as data parallelism with whole weights; where accelerate says more, "
            "state --layout"
        )
        return by_degrees(fields, num_gpus, replace(told, strategy="no_shard"), "tp_size"), (note,), {}
    told = replace(told, strategy="shard_grad_op" if again == "false" else strategy)
    return by_degrees(fields, num_gpus, told, "tensor and context parallelism"), (), {}
