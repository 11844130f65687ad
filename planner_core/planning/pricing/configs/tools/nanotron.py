"""nanotron's YAML, with which SmolLM was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, Table, choice, count, switch

MODEL = "model.model_config."
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "num_key_value_heads")
TABLE = Table(
    "nanotron",
    (
        count("micro_batch", "tokens.micro_batch_size", default=1),
        count("accumulate", "tokens.batch_accumulation_per_replica", default=1),
        count("seq", "tokens.sequence_length"),
        choice("dtype", "model.dtype", {name: name for name in ("bfloat16", "float16", "float32")}),
        switch("recompute", "parallelism.recompute_layer", off="none", on="full"),
    ),
    sizes={MODEL + name: name for name in SIZES},
    no_effect="""
        checkpoints.* data_stages* general.* logging.* lighteval* profiler* tokenizer.* optimizer.*
        model.init_method.* parallelism.tp_linear_async_communication parallelism.pp_engine
        parallelism.tp_recompute_allgather s3_upload* model.ddp_bucket_cap_mb model.make_vocab_size_divisible_by
        model.model_config.* tokens.limit_* tokens.val_* tokens.train_steps metrics_logging*
    """,
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Return whether a YAML is nanotron's: degrees by `parallelism.dp` and the batch by `tokens`."""
    degrees = data.get("parallelism")
    return isinstance(degrees, Mapping) and "dp" in degrees and isinstance(data.get("tokens"), Mapping)


def read(fields: Fields, num_gpus: int) -> Setup:
    """Read a run by nanotron. Its ZeRO-1 hands weights out tensor by tensor and rank by rank."""
    pp = fields.read_int("parallelism.pp", 1)
    engine = fields.read_word("parallelism.pp_engine", "1f1b", ("1f1b", "afab"))
    tp, cp = fields.read_int("parallelism.tp", 1), fields.read_int("parallelism.context_parallel_size", 1)
    dp = fields.read_int("parallelism.dp", max(1, num_gpus // tp // pp))
    ranks = dp * tp * cp * pp
    if ranks != num_gpus:
        raise InputError(
            f"{fields.where}: dp {dp} x tp {tp} x pp {pp} x context_parallel_size {cp} are {ranks} ranks, but the cluster has {num_gpus} "
            f"GPUs; give a cluster of {ranks}"
        )
    tp_mode = fields.read_word("parallelism.tp_mode", "all_reduce", ("all_reduce", "reduce_scatter"))
    zero = fields.read_int("optimizer.zero_stage", 0, minimum=0)
    if zero > 1:
        raise fields.wrong_value("optimizer.zero_stage", zero, "0 or 1")
    layout = Layout(
        dp=dp,
        tp=tp,
        cp=cp,
        sp=tp > 1 and tp_mode == "reduce_scatter",
        # A single rank has nobody to share its states with.
        zero=zero if dp > 1 else 0,
        ep=fields.read_int("parallelism.expert_parallel_size", 1),
        pp=pp,
        schedule="gpipe" if engine == "afab" and pp > 1 else "",
    )
    options = {**fields.read_options(TABLE), "stack": "nanotron", "rank_by_rank": zero == 1 and dp > 1}
    return fields.finish(TABLE, layout, options)
