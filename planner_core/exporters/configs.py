"""Configuration files for Hugging Face transformers, DeepSpeed, Megatron-LM and torchtitan."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner_core.core import InputError, Plan
from planner_core.cost import zero_stage
from planner_core.exporters.data_parallel import splits_batch_only
from planner_core.exporters.observe import observe, rules
from planner_core.exporters.parallelize_module import remarks_of
from planner_core.exporters.stages import megatron_stages, titan_stages
from planner_core.planning.methods import (
    PEERS_TYPES,
    TOKENS_OR_GATHERED,
    CannotHold,
    Difference,
    NothingSplit,
    TpLayout,
    by_hand,
    degrees,
    drop_summed,
    patterns,
    split_site,
    starred,
    tensor_layout,
)

COMM_TYPES = {kind: word for word, kind in PEERS_TYPES.items() if word != "allgather"}
"""Megatron-LM's `--cp-comm-type` for each way of attention over context ranks."""
HF = {
    "colwise": "colwise",
    "gathered": "colwise_gather_output",
    "rowwise": "rowwise",
    "sliced": "rowwise_split_input",
    "vocabulary": "embedding_rowwise",
    "features": "embedding_colwise",
}
"""Names of the styles in transformers 5."""
DEEPSPEED_USE = (
    "deepspeed.initialize(model=model, config='FILE', ...) with DeepSpeed 0.19, "
    "which clips gradients to a norm of 1 unless told"
)
AUTOTP_STAGE = 2
"""The highest ZeRO stage beside AutoTP."""
EACH_COLUMN = "every column-split layer sums its input's gradient by itself here: {columns} backward all_reduces a step, not {groups}"


def hf_text(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout]:
    """`DistributedConfig` as JSON. transformers merges the keys over the model's own plan, so the other rules are switched off."""
    layout = tensor_layout(plan)
    seen = observe(plan, layout)
    tp_plan = {name: HF[style] for name, style in rules(plan, layout).items()}
    tp_plan.update(
        {starred(n.rpartition(".")[0]): "replicated_with_grad_allreduce" for g in layout.groups for n in g.summed}
    )
    for name in dict.fromkeys(map(starred, layout.experts)):
        tp_plan.update(
            {f"{name}.gate_up_proj": "packed_colwise", f"{name}.down_proj": "rowwise", name: "moe_tp_experts"}
        )
    off = [key for key in seen.built_in if key not in tp_plan]
    tp_plan.update(dict.fromkeys(off, "replicate"))
    remarks = [
        "from_pretrained(NAME, distributed_config=DistributedConfig(**json.load(open('FILE')))) under torchrun; needs accelerate",
        *_columns(layout),
        *([f"switched off, as the plan does not split them: {patterns(off)}"] if off else []),
    ]
    return _json({"tp_size": layout.size, "tp_plan": tp_plan}), remarks_of(layout, remarks, by_hand(plan)), layout


def autotp_stage(plan: Plan) -> int:
    """The ZeRO stage that a configuration with AutoTP states."""
    return min(zero_stage(plan), AUTOTP_STAGE)


def deepspeed_text(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout | None]:
    """DeepSpeed's AutoTP `partition_config`: column and row layers only; its ZeRO stages alone where the plan splits the batch only."""
    try:
        layout = tensor_layout(plan)
    except NothingSplit:
        if zero_stage(plan) not in (1, 2) or not splits_batch_only(plan):  # fsdp2 and accelerate hold stage 3
            raise
        return _deepspeed_zero(plan)
    drop_summed(layout)
    observe(plan, layout)
    found = rules(plan, layout)
    left = [n for n, s in found.items() if s not in ("colwise", "rowwise")] + list(
        dict.fromkeys(map(starred, layout.experts))
    )
    if left:
        told = "split in the plan, whole here; AutoTP is told of column and row pairs only"
        layout.differences.append(Difference.of(left, told))
    if not layout.groups:
        raise CannotHold(
            f'the plan "{plan.name}" splits experts only ({patterns(layout.experts)}), which AutoTP does not'
        )
    specs = [
        {"patterns": [_regex(n) for n, s in found.items() if s == style], "partition_type": kind}
        for style, kind in (("colwise", "column"), ("rowwise", "row"))
    ]
    stage = zero_stage(plan)
    data = {
        **_deepspeed_step(plan, autotp_stage(plan)),
        "tensor_parallel": {
            "autotp_size": layout.size,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        },
    }
    if stage > AUTOTP_STAGE:
        told = f"weights are gathered at use in the plan (ZeRO-3), whole here: AutoTP goes to stage {AUTOTP_STAGE}; more memory"
        layout.differences.append(Difference(told))
    remarks = remarks_of(layout, [DEEPSPEED_USE, *_columns(layout)], by_hand(plan), autotp_stage(plan))
    kept = {n: s for n, s in layout.styles.items() if s in ("colwise", "rowwise")}
    return _json(data), remarks, replace(layout, styles=kept, experts=[])


def _deepspeed_zero(plan: Plan) -> tuple[str, tuple[str, ...], None]:
    """ZeRO of DeepSpeed over all GPUs, for a plan that splits the batch only."""
    stage, params = zero_stage(plan), [p for b in plan.blocks.values() for p in b.params.values()]
    apart = [p for p in params if set(p.once_gathered_axes) != set(range(len(p.stored)))]
    data = {
        **_deepspeed_step(plan, stage),
        "train_micro_batch_size_per_gpu": max(
            1, plan.workload["batch"] // plan.workload["accumulate"] // plan.mesh.num_devices
        ),
    }
    remarks = (
        DEEPSPEED_USE,
        f"ZeRO stage {stage} over all {plan.mesh.num_devices} GPUs; every weight is of that stage here",
        *(
            [f"differs from the plan: {len(apart)} of its {len(params)} kinds of weights lie in another way there"]
            if apart
            else []
        ),
        *(f"differs from the plan: {d}" for d in by_hand(plan)),
    )
    return _json(data), remarks, None


def _deepspeed_step(plan: Plan, stage: int) -> dict[str, Any]:
    """Batch, ZeRO stage and type."""
    return {
        "train_batch_size": plan.workload["batch"],
        "gradient_accumulation_steps": int(plan.workload["accumulate"]),
        "zero_optimization": {
            "stage": stage,
            **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if plan.workload.get("offload") else {}),
        },
        **({"bf16": {"enabled": True}} if plan.workload["dtype"] == "bfloat16" else {}),
    }


def _micro_batch(plan: Plan, layout: TpLayout) -> int:
    """Samples of one micro-batch of one data-parallel rank."""
    return max(1, int(plan.workload["batch"]) // int(plan.workload["accumulate"]) // layout.data)


def megatron_text(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout]:
    """Arguments for Megatron-LM, which does not have a plan by weight: degrees and the architecture."""
    layout = degrees(plan)
    config = _named(plan.model.get("config") or {})
    if "hidden_size" not in config or "num_attention_heads" not in config:
        raise InputError(
            f"{plan.model['name']} has no hidden_size and num_attention_heads in its config, so Megatron-LM's flags do not describe it"
        )
    recompute, left = _megatron_recompute(plan)
    layout.differences = [d for d in layout.differences if d.kind not in TOKENS_OR_GATHERED]
    left += [*_beside_experts(layout), *_padded(config.get("vocab_size"), layout.size)]
    flags: dict[str, Any] = {
        "tensor-model-parallel-size": layout.size,
        **megatron_stages(plan),
        **({"sequence-parallel": True} if layout.sequence else {}),
        **(
            {"context-parallel-size": layout.context, "cp-comm-type": COMM_TYPES[layout.cp_type]}
            if layout.context > 1
            else {}
        ),
        **(
            {"expert-model-parallel-size": layout.expert, "moe-token-dispatcher-type": "alltoall"}
            if layout.expert > 1
            else {}
        ),
        **_sizes(plan, config),
        "global-batch-size": plan.workload["batch"],
        "micro-batch-size": _micro_batch(plan, layout),
        **({"bf16": True} if plan.workload["dtype"] == "bfloat16" else {}),
        **_architecture(plan, config),
        **recompute,
        **({"overlap-grad-reduce": True} if layout.data * layout.context > 1 else {}),
        **(
            {"use-distributed-optimizer": True, "overlap-param-gather": True}
            if layout.data * layout.context > 1 and zero_stage(plan)
            else {}
        ),
    }
    argv = [part for k, v in flags.items() for part in ([f"--{k}"] if v is True else [f"--{k}", str(v)])]
    return (
        _json({"flags": flags, "argv": argv}),
        remarks_of(
            layout,
            [
                "Degrees and the architecture: Megatron-LM splits every layer its own way, not weight by weight as the plan says. They are "
                "checked against megatron-core's TransformerConfig and GPTModel; Megatron-LM itself was not run.",
                "Yours to name: --tokenizer-type and --tokenizer-model, --data-path, --train-iters, --lr",
                *(
                    [
                        "its distributed optimizer is ZeRO-1 over the data axis"
                        + (f", the plan's weights are of stage {zero_stage(plan)}" if zero_stage(plan) > 1 else "")
                    ]
                    if "use-distributed-optimizer" in flags
                    else []
                ),
            ],
            left,
        ),
        layout,
    )


def _padded(words: Any, ranks: int) -> list[str]:
    """A remark on a vocabulary that does not divide over tensor-parallel ranks: Megatron-LM adds words that no text has."""
    if not isinstance(words, int) or words % ranks == 0:
        return []
    padded = -(-words // ranks) * ranks
    return [
        f"the vocabulary of {words} words is as the model has it in the plan, padded to {padded} for {ranks} ranks here"
    ]


def _beside_experts(layout: TpLayout) -> list[str]:
    """Remarks on how Megatron-LM differs from the plan where experts are dealt out. It then splits tokens over tensor-parallel ranks."""
    told = []
    if layout.expert > 1 and layout.size > 1 and not layout.sequence:
        layout.sequence = True
        told.append(
            "tokens are whole between the blocks in the plan; beside experts Megatron-LM wants them split (--sequence-parallel)"
        )
    if layout.expert > 1 and layout.context > 1:
        told.append("experts are dealt out over data-parallel ranks in the plan, over context ranks first here")
    return told


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose sizes have Llama's names, also if it has those of GPT-2."""
    found = {name: config[other] for name, other in GPT2_NAMES.items() if config.get(other) is not None}
    if "n_embd" in config and config.get("n_inner") is None:
        found["intermediate_size"] = 4 * config["n_embd"]
    return {**found, **config}


def _recomputed(plan: Plan) -> Counter[str]:
    """How many copies of repeated blocks follow each policy."""
    found: Counter[str] = Counter()
    for label, block in plan.blocks.items():
        if label:
            found[block.recompute] += len(block.prefixes)
    return found


def _megatron_recompute(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Megatron-LM's options for what the plan recomputes, and what they cannot say."""
    copies = _recomputed(plan)
    if copies.keys() <= {"none"}:
        return {}, []
    if copies.keys() <= {"none", "full"}:
        every = copies.keys() == {"full"}
        options = {
            "recompute-granularity": "full",
            "recompute-method": "uniform" if every else "block",
            "recompute-num-layers": 1 if every else copies["full"],
        }
        told = f"Megatron-LM recomputes the first {copies['full']} layers, the plan as many others"
        return options, [] if every else [told]
    names = ", ".join(sorted(copies.keys() - {"none"}))
    options = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    return options, [f"the plan recomputes by {names}, every layer whole here: less memory, more compute"]


def _architecture(plan: Plan, config: dict[str, Any]) -> dict[str, Any]:
    """The options that make Megatron-LM's transformer this model: its norm, activation, positions, embeddings and vocabulary."""
    names = {name for block in plan.blocks.values() for name in block.params}
    rope = config.get("rope_parameters") or {}
    base = rope.get("rope_theta", config.get("rope_theta"))
    scaling = {**(config.get("rope_scaling") or {}), **rope}
    flags: dict[str, Any] = {
        "swiglu": any("gate_proj" in n or "gate_up_proj" in n or n.endswith("w3.weight") for n in names)
        and config.get("hidden_act", "silu") == "silu",
        "normalization": "RMSNorm" if "rms_norm_eps" in config else None,
        "norm-epsilon": config.get("rms_norm_eps", config.get("layer_norm_eps")),
        "position-embedding-type": "learned_absolute" if base is None else "rope",
        "rotary-base": None if base is None else int(base),
        "use-rope-scaling": scaling.get("rope_type", scaling.get("type")) == "llama3",
        "kv-channels": config.get("head_dim"),
        "untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", True),
        "vocab-size": config.get("vocab_size"),
        "make-vocab-size-divisible-by": 1,  # Megatron-LM pads to 128 times the tensor degree otherwise
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "moe-router-topk": config.get("num_experts_per_tok"),
        "disable-bias-linear": not _has_bias(plan),
    }
    return {name: value for name, value in flags.items() if value is not None and value is not False}


def _has_bias(plan: Plan) -> bool:
    """Whether a linear layer adds a bias."""
    scopes = ((block, *split_site(site)) for block in plan.blocks.values() for site in block.sites)
    return any(f"{scope}.bias" in block.params for block, scope, fn in scopes if fn == "linear")


def _sizes(plan: Plan, config: dict[str, Any]) -> dict[str, Any]:
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    found = {
        "num-layers": config.get("num_hidden_layers"),
        "hidden-size": config["hidden_size"],
        "ffn-hidden-size": config.get("intermediate_size"),
        "num-attention-heads": heads,
        "seq-length": plan.workload["seq"],
        "max-position-embeddings": config.get("max_position_embeddings"),
        "num-experts": config.get("num_local_experts"),
        **({"group-query-attention": True, "num-query-groups": groups} if groups not in (None, heads) else {}),
    }
    return {k: v for k, v in found.items() if v is not None}


GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
"""Sizes under the names of most configs, and under GPT-2's."""
TITAN_LLAMAS = {
    (4096, 32, 32, 8, 128256): "llama3_8b",
    (8192, 80, 64, 8, 128256): "llama3_70b",
    (16384, 126, 128, 8, 128256): "llama3_405b",
}
"""torchtitan 0.3's own Llamas by width, layers, heads, groups and vocabulary, and the configs that train them."""


def _titan_config(config: dict[str, Any]) -> str:
    """The name of torchtitan's own config for a model; empty if it does not have one."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    found = {key: name for key, name in TITAN_LLAMAS.items() if list(key) == [config.get(size) for size in sizes]}
    return next(iter(found.values()), "") if config.get("model_type") == "llama" else ""


TITAN_POLICIES = ("none", "selective", "full")
"""The modes of torchtitan's `activation-checkpoint` that the planner has, too."""


def torchtitan_text(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout]:
    """Command-line options of torchtitan 0.3, one on a line: all of them for its own Llamas, only the settings for other models."""
    layout = degrees(plan)
    own = _titan_config(dict(plan.model.get("config") or {}))
    stages, apart = titan_stages(plan)
    left = [*_titan_ranks(layout), *apart]
    load = plan.workload
    options = {
        "parallelism.data_parallel_replicate_degree": layout.data // layout.shards,
        "parallelism.data_parallel_shard_degree": layout.shards,
        "parallelism.tensor_parallel_degree": layout.size,
        **({"parallelism.context_parallel_degree": layout.context} if layout.context > 1 else {}),
        **({"parallelism.expert_parallel_degree": layout.expert} if layout.expert > 1 else {}),
        **stages,
        **_titan_batch(plan, layout),
        "training.global_batch_size": load["batch"],
        "training.seq_len": load["seq"],
    }
    lines = ["--module llama3", f"--config {own}"] if own else []
    lines += [f"--{name} {value}" for name, value in options.items()]
    lines += [] if layout.sequence or layout.size == 1 else ["--parallelism.no-enable_sequence_parallel"]
    policies = [p for p, _ in _recomputed(plan).most_common()] or ["none"]
    policy = policies[0] if len(policies) == 1 and policies[0] in TITAN_POLICIES else "full"
    lines.append(f"activation-checkpoint:{policy}")
    if [policy] != policies:
        left.append(f"the plan recomputes by {', '.join(policies)}, every layer whole here: less memory, more compute")
    head = f"# {plan.model['name']}, plan {json.dumps(plan.name)}: the degrees that torchtitan knows."
    layout.differences = [d for d in layout.differences if d.kind not in TOKENS_OR_GATHERED]
    return (
        "\n".join([head, *lines, ""]),
        remarks_of(
            layout,
            [
                f"torchrun ... -m torchtitan.train {'' if own else '--module MODEL --config CONFIG '}"
                "$(grep -v '^#' FILE), by torchtitan 0.3",
                *(
                    [f"its config {own} has Llama 3.1's rotary positions and trains on c4: change it in torchtitan"]
                    if own
                    else ["torchtitan has no config for this model: MODEL and CONFIG are a module of yours"]
                ),
                "Degrees only: torchtitan splits each model its own way. Its options are checked against its "
                "ParallelismConfig; it was not run.",
            ],
            left,
        ),
        layout,
    )


def _titan_batch(plan: Plan, layout: TpLayout) -> dict[str, Any]:
    """Samples of a rank: of one micro-batch, or with stages of all that a pipeline cuts into micro-batches."""
    micro = _micro_batch(plan, layout)
    if plan.pipeline is None:
        return {"training.local_batch_size": micro}
    samples = micro * int(plan.workload["accumulate"])
    return {"parallelism.pipeline_parallel_microbatch_size": micro, "training.local_batch_size": samples}


def _titan_ranks(layout: TpLayout) -> list[str]:
    """Remarks on how torchtitan differs from the plan over context and expert ranks. `layout` is changed to what torchtitan runs."""
    told = []
    if layout.context > 1 and layout.cp_type != "gather":
        told.append(
            f"attention runs by {layout.cp_type} over the context ranks in the plan; torchtitan 0.3 gathers keys and values"
        )
        layout.cp_type = "gather"
    if layout.shards % layout.expert:
        told.append(
            "weights are whole on the ranks that experts are dealt out over; torchtitan shards weights over these ranks"
        )
        layout.shards = math.lcm(layout.shards, layout.expert)
    if layout.expert > 1 and layout.size * layout.context > 1:
        told.append(
            "experts are dealt out over data-parallel ranks in the plan, and each is split by the tensor axis; torchtitan deals whole "
            "experts to tensor-parallel and context ranks first; the price below is the plan's way"
        )
    return told


def _columns(layout: TpLayout) -> list[str]:
    columns, groups = sum(len(g.columns) for g in layout.groups), len(layout.groups)
    return [EACH_COLUMN.format(columns=columns, groups=groups)] if columns > groups else []


def _regex(name: str) -> str:
    return ".*" + re.escape(name).replace(r"\*", r"\d+") + r"\.weight$"


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1) + "\n"
