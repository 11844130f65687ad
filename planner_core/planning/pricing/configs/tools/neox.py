"""GPT-NeoX's YAML, with which GPT-NeoX-20B and Pythia were trained: Megatron-LM's sizes and degrees beside DeepSpeed's batch and ZeRO.

"pipe-parallel-size": 4, "model_parallel_size": 2      ->  --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2

Its names are written with hyphens or underscores, in any mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError, named
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import (
    Fields,
    Setup,
    Table,
    count,
    read_batch_of_deepspeed,
    remaining_ranks,
    switch,
)

TABLE = Table(
    "GPT-NeoX",
    (
        count("seq", "seq_length"),
        switch("recompute", "checkpoint_activations", off="none", on="full"),
    ),
    sizes={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "intermediate_size": "intermediate_size",
    },
    no_effect="""
        vocab_* save* load* *checkpoint_factor *data_path* data_impl split max_position_embeddings checkpoint_num_layers
        *zero_optimization.*bucket_size optimizer.params.* *iters *interval log* tensorboard*
        tokenizer* *dropout *warmup *lr* weight_decay gradient_clipping fp16.* bf16.* steps_per_print wall_clock*
        make_vocab_size_divisible_by extra_save_iters *init_method output_layer_parallelism distributed_backend seed
        launcher deepspeed_* eval_* train_iters gpt_j_residual no_weight_tying pos_emb rotary* norm use_wandb wandb*
    """,
)
ATTENTIONS = {"global": "softmax", "flash": "flash2"}
"""Kinds of attention in `attention_config`, by the planner's kernels. `global` multiplies, and has a fused softmax."""


def recognises(data: Mapping[str, Any]) -> bool:
    """Return whether a YAML is GPT-NeoX's: its own names for the degrees. It holds DeepSpeed's names too, so it is tried before
    DeepSpeed."""
    names = {str(name).replace("-", "_") for name in data}
    return bool(names & {"pipe_parallel_size", "model_parallel_size"})


def read(fields: Fields, num_gpus: int) -> Setup:
    """Read a run by GPT-NeoX. ZeRO stages 0 and 1 keep whole weights; it refuses higher stages with a pipeline."""
    plain = {name.replace("-", "_"): value for name, value in fields.values.items()}
    if len(plain) < len(fields.values):
        twice = next(name for name in fields.values if "-" in name and name.replace("-", "_") in fields.values)
        raise InputError(f"{fields.where} has {twice} with hyphens and with underscores; leave one out")
    fields.values = plain
    tp = fields.read_int("model_parallel_size", 1)
    # 0 and 1 are both one stage; GPT-NeoX builds another class of model for 0.
    pp = max(1, fields.read_int("pipe_parallel_size", 1, minimum=0))
    ranks = remaining_ranks(fields, "model_parallel_size with pipe_parallel_size", num_gpus, tp * pp)
    stage = fields.read_int("zero_optimization.stage", 0, minimum=0)
    if stage > 1:
        raise InputError(
            f"{fields.where}: zero_optimization.stage {stage} is not read; set it to 1, or state ",
            named("layout", f"dp={ranks},zero={stage}"),
        )
    for name in ("zero_optimization.cpu_offload", "partition_activations"):
        fields.require_off(name, "memory of the host or of other ranks")
    sizes, batch = read_batch_of_deepspeed(fields, ranks)
    options = fields.read_options(TABLE) | {
        **sizes,
        "dtype": _read_dtype(fields),
        "stack": "megatron",  # the same kernels by their names: fused softmax, bias with GELU, Apex's FusedAdam
        "optimizer": "sgd" if fields.read_word("optimizer.type", "adam") == "sgd" else "adamw",
        "vocab_multiple": fields.read_int("make_vocab_size_divisible_by", 128) * tp,
        **_read_attention(fields),
    }
    layout = Layout(dp=ranks, tp=tp, pp=pp, zero=stage, sp=fields.read_flag("sequence_parallel") and tp > 1)
    return fields.finish(TABLE, layout, options, batch=batch)


def _read_dtype(fields: Fields) -> str:
    """Return the dtype of the products, of one of three fields."""
    precision = fields.read_word("precision", "")
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if fields.read_flag(f"{name}.enabled") or precision in (name, dtype):
            return dtype
    return "float32" if precision == "fp32" else "float16"


def _read_attention(fields: Fields) -> dict[str, str]:
    """Return the attention kernel, from entries such as [[["flash"], 32]]: kinds, and the number of layers or "all"."""
    kinds = fields.get("attention_config")
    words = {str(kind) for entry in kinds or [[["global"], "all"]] for kind in entry[0]}
    if len(words) != 1 or not words <= set(ATTENTIONS):
        raise fields.wrong_value("attention_config", kinds, f"{' or '.join(ATTENTIONS)} in every layer")
    return {"attention": ATTENTIONS[words.pop()]}
