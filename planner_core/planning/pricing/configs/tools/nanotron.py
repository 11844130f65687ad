"""nanotron's YAML, with which SmolLM was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup

NAME = "nanotron"
WITHOUT_EFFECT = """
    checkpoints.* data_stages* general.* logging.* lighteval* profiler* tokenizer.* optimizer.*
    model.init_method.* parallelism.tp_linear_async_communication parallelism.pp_engine
    parallelism.tp_recompute_allgather s3_upload* model.ddp_bucket_cap_mb model.make_vocab_size_divisible_by
    model.model_config.* tokens.limit_* tokens.val_* tokens.train_steps metrics_logging*
"""
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "num_key_value_heads")


def is_own(data: Mapping[str, Any]) -> bool:
    """Whether a YAML is nanotron's: degrees by `parallelism.dp` and the batch by `tokens`."""
    degrees = data.get("parallelism")
    return isinstance(degrees, Mapping) and "dp" in degrees and isinstance(data.get("tokens"), Mapping)


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by nanotron: its ZeRO-1 hands weights out tensor by tensor and rank by rank."""
    pp, engine = fields.whole("parallelism.pp", 1), fields.text("parallelism.pp_engine", "1f1b", ("1f1b", "afab"))
    tp, cp = fields.whole("parallelism.tp", 1), fields.whole("parallelism.context_parallel_size", 1)
    dp = fields.whole("parallelism.dp", max(1, num_gpus // tp // pp))
    ranks = dp * tp * cp * pp
    if ranks != num_gpus:
        raise InputError(
            f"{fields.where}: dp {dp} x tp {tp} x pp {pp} x context_parallel_size {cp} are {ranks} ranks, but the cluster has {num_gpus} "
            f"GPUs; give a cluster of {ranks}"
        )
    mode = fields.text("parallelism.tp_mode", "all_reduce", ("all_reduce", "reduce_scatter"))
    zero = fields.whole("optimizer.zero_stage", 0, least=0)
    if zero > 1:
        raise fields.wrong("optimizer.zero_stage", zero, "0 or 1")
    layout = Layout(
        dp=dp,
        tp=tp,
        cp=cp,
        sp=tp > 1 and mode == "reduce_scatter",
        zero=zero if dp > 1 else 0,
        ep=fields.whole("parallelism.expert_parallel_size", 1),
        pp=pp,
        schedule="gpipe" if engine == "afab" and pp > 1 else "",
    )
    options: dict[str, Any] = {
        "stack": "nanotron",
        "micro_batch": fields.whole("tokens.micro_batch_size", 1),
        "accumulate": fields.whole("tokens.batch_accumulation_per_replica", 1),
        "recompute": "full" if fields.flag("parallelism.recompute_layer") else "none",
        "rank_by_rank": zero == 1 and dp > 1,
    }
    if fields.has("tokens.sequence_length"):
        options["seq"] = fields.whole("tokens.sequence_length", 1)
    if fields.has("model.dtype"):
        options["dtype"] = fields.text("model.dtype", "bfloat16", ("bfloat16", "float16", "float32"))
    own = "model.model_config."
    sizes = {name: fields.whole(own + name, 1) for name in SIZES if fields.has(own + name)}
    fields.ignore(WITHOUT_EFFECT)
    return fields.setup(layout, options, (), sizes)
