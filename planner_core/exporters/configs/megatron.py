"""Write arguments of Megatron-LM: degrees, pipeline stages and the architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError, Pipeline, Plan, named, named_form
from planner_core.cost import zero_stage
from planner_core.exporters.configs.common import (
    check_single_stack,
    count_recompute_policies,
    list_remarks,
    micro_batch_samples,
)
from planner_core.exporters.remarks import describe_launch
from planner_core.planning.methods import (
    TOKENS_OR_GATHERED,
    TpLayout,
    list_schedules,
    parallel_degrees,
)
from planner_core.planning.methods.tools import megatron

GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
"""GPT-2's names of sizes, by the names of most configs."""


def write_megatron(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout]:
    """Write the degrees and the architecture, an argument a line. Megatron-LM has no plan by weight."""
    layout = parallel_degrees(plan)
    config = _with_llama_names(plan.model.config)
    if fault := megatron.megatron_fault(plan):
        raise InputError(fault)
    recompute, differences = _recompute_flags(plan)
    if recompute.get("recompute-method") == "block":
        layout.recompute = None
    layout.differences = [d for d in layout.differences if d.kind not in TOKENS_OR_GATHERED]
    # Before the degrees: beside experts Megatron-LM wants sequence parallelism, which this adds to the layout.
    differences += [*_expert_remarks(layout), *_padding_remarks(config.get("vocab_size"), layout.size)]
    flags: dict[str, Any] = {
        **_degree_flags(layout),
        **_stage_flags(plan, layout),
        **_size_flags(plan, config),
        "global-batch-size": plan.workload.batch,
        "micro-batch-size": micro_batch_samples(plan, layout),
        # Without either Megatron-LM trains in float32.
        "bf16": plan.workload.dtype == "bfloat16",
        "fp16": plan.workload.dtype == "float16",
        **({"optimizer": "sgd"} if plan.workload.optimizer == "sgd" else {}),
        **_architecture_flags(plan, config),
        **recompute,
        **_data_parallel_flags(plan, layout),
    }
    # A file of arguments has no comments: the launch line puts its whole text behind pretrain_gpt.py.
    lines = [
        f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items() if value is not False
    ]
    # Megatron-LM knows no FSDP2: where the plan shards weights, its distributed optimizer shards their states alone.
    stage = 1 if flags["use-distributed-optimizer"] else 0
    return "\n".join([*lines, ""]), list_remarks(layout, _usage_remarks(plan, flags), differences, stage), layout


def _degree_flags(layout: TpLayout) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "tensor-model-parallel-size": layout.size,
        "sequence-parallel": bool(layout.sequence),
    }
    if layout.context > 1:
        flags |= {"context-parallel-size": layout.context, "cp-comm-type": megatron.CP_COMM_TYPES[layout.cp_type]}
    if layout.expert > 1:
        flags |= {"expert-model-parallel-size": layout.expert, "moe-token-dispatcher-type": "alltoall"}
    return flags


def _data_parallel_flags(plan: Plan, layout: TpLayout) -> dict[str, Any]:
    """Context ranks hold the same weights, so they count as data-parallel ranks here."""
    several = layout.data * layout.context > 1
    sharded = several and zero_stage(plan) > 0
    return {"overlap-grad-reduce": several, "use-distributed-optimizer": sharded, "overlap-param-gather": sharded}


def _usage_remarks(plan: Plan, flags: Mapping[str, Any]) -> list[str]:
    remarks = [
        describe_launch(megatron.MEGATRON, plan),
        "yours to add: --tokenizer-type and --tokenizer-model, --data-path, --train-iters, --lr",
        "Degrees and the architecture: Megatron-LM splits every layer its own way, not weight by weight as the plan says. They are "
        "checked against megatron-core's TransformerConfig and GPTModel; Megatron-LM itself was not run.",
    ]
    if flags["use-distributed-optimizer"]:
        stage = f", the plan's weights are of stage {zero_stage(plan)}" if zero_stage(plan) > 1 else ""
        remarks.append(f"its distributed optimizer is ZeRO-1 over the data axis{stage}")
    return remarks


def _stage_flags(plan: Plan, layout: TpLayout) -> dict[str, Any]:
    """Megatron-LM's flags for the stages of a plan, also for one stage. Raises InputError for stages that it does not run."""
    cut = plan.pipeline
    if cut is None:
        return {"pipeline-model-parallel-size": 1}
    if cut.schedule not in (schedules := list_schedules(megatron.MEGATRON.name)):
        raise InputError(
            f"Megatron-LM runs stages as {' or '.join(schedules)}, not as {cut.schedule}; plan with schedule=1f1b, or give ",
            named_form("json"),
        )
    check_single_stack(plan, cut)
    if (stage := zero_stage(plan)) > 1:
        # Not a remark: the memory of the first ranks was counted on it, so ZeRO-1 may not fit.
        raise InputError(
            f"the plan's stages hold weights under ZeRO-{stage}, and Megatron-LM's distributed optimizer is ZeRO-1, which takes more "
            "memory; plan with ",
            named("zero", 1),
            ", or give ",
            named_form("json"),
        )
    flags: dict[str, Any] = {"pipeline-model-parallel-size": cut.ranks, **_order_flags(plan, cut, layout)}
    if len(set(cut.copies)) > 1:
        return {**flags, "pipeline-model-parallel-layout": stage_layout(cut.copies)}
    return {**flags, **({"num-virtual-stages-per-pipeline-rank": cut.virtual} if cut.virtual > 1 else {})}


def _order_flags(plan: Plan, cut: Pipeline, layout: TpLayout) -> dict[str, Any]:
    """Return the flag for stages that lie between tensor and data ranks. Raises InputError for another place of the pipeline's axis."""
    if cut.outer == 0:
        return {}
    # The axes outside of the pipeline's must be the data-parallel ranks, all of them.
    if layout.axis < cut.outer or math.prod(plan.mesh.axis_sizes[: cut.outer]) != layout.data:
        raise InputError(
            f"stages lie inside of {cut.outer} axes of the mesh {plan.mesh}, and Megatron-LM deals ranks in the orders tp-dp-pp and "
            "tp-pp-dp; state such a layout, or give ",
            named_form("json"),
        )
    return {"use-tp-pp-dp-mapping": True}


def stage_layout(copies: tuple[int, ...]) -> str:
    """`Et*3|t*2L`: E is the embedding, t a layer, L the loss (megatron-core's PipelineParallelLayerLayout)."""
    parts = [f"t*{n}" if n > 1 else "t" * n for n in copies]
    return f"E{'|'.join(parts)}L"


def _padding_remarks(words: Any, ranks: int) -> list[str]:
    """Return a remark on a vocabulary that does not divide over tensor-parallel ranks: Megatron-LM pads it with unused words."""
    if not isinstance(words, int) or words % ranks == 0:
        return []
    padded = -(-words // ranks) * ranks
    return [
        f"the vocabulary of {words} words is as the model has it in the plan, padded to {padded} for {ranks} ranks here"
    ]


def _expert_remarks(layout: TpLayout) -> list[str]:
    """Remarks on differences with expert parallelism. Megatron-LM then requires sequence parallelism, which `layout` takes over."""
    remarks = []
    if layout.expert > 1 and layout.size > 1 and not layout.sequence:
        layout.sequence = True
        remarks.append(
            "tokens are whole between the blocks in the plan; beside experts Megatron-LM wants them split (--sequence-parallel)"
        )
    if layout.expert > 1 and layout.context > 1:
        remarks.append("experts are dealt out over data-parallel ranks in the plan, over context ranks first here")
    return remarks


def _with_llama_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with Llama's names of sizes added to those of GPT-2."""
    renamed = {name: config[other] for name, other in GPT2_NAMES.items() if config.get(other) is not None}
    # GPT-2's own rule for a width that its config leaves out.
    if "n_embd" in config and config.get("n_inner") is None:
        renamed["intermediate_size"] = 4 * config["n_embd"]
    return {**renamed, **config}


def _recompute_flags(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Megatron-LM's flags for the plan's recomputation, and remarks about what they cannot express."""
    copies = count_recompute_policies(plan)
    if copies.keys() <= {"none"}:
        return {}, []
    if copies.keys() <= {"none", "full"}:
        every_layer = copies.keys() == {"full"}
        options = {
            "recompute-granularity": "full",
            "recompute-method": "uniform" if every_layer else "block",
            "recompute-num-layers": 1 if every_layer else copies["full"],
        }
        remark = f"Megatron-LM recomputes the first {copies['full']} layers, the plan as many others"
        return options, [] if every_layer else [remark]
    names = ", ".join(sorted(copies.keys() - {"none"}))
    options = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    return options, [f"the plan recomputes by {names}, every layer whole here: less memory, more compute"]


def _architecture_flags(plan: Plan, config: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that make Megatron-LM's transformer this model: norm, activation, positions, embeddings, vocabulary."""
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
        "qk-layernorm": any("q_norm" in n for n in names),
        "untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", True),
        "vocab-size": config.get("vocab_size"),
        "make-vocab-size-divisible-by": 1,  # Megatron-LM pads to 128 times the tensor degree otherwise
        # Megatron-LM drops 10 % by default, and a plan drops nothing.
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "moe-router-topk": config.get("num_experts_per_tok"),
        **_bias_flags(plan),
    }
    return {name: value for name, value in flags.items() if value is not None and value is not False}


def _bias_flags(plan: Plan) -> dict[str, bool]:
    """Return the flags for biases of linear layers: in all of them, or in none but queries, keys and values (`megatron_fault` refuses
    others)."""
    biases = megatron.linear_biases(plan)
    if biases and all(biases.values()):
        return {}
    return {"disable-bias-linear": True, "add-qkv-bias": any(biases.values())}


def _size_flags(plan: Plan, config: dict[str, Any]) -> dict[str, Any]:
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    flags = {
        "num-layers": config.get("num_hidden_layers"),
        "hidden-size": config["hidden_size"],
        "ffn-hidden-size": config.get("intermediate_size"),
        "num-attention-heads": heads,
        "seq-length": plan.workload.seq,
        # Megatron-LM asserts that the sequence fits; rotary positions have no table that ends.
        "max-position-embeddings": max(config.get("max_position_embeddings") or 0, plan.workload.seq),
        "num-experts": config.get("num_local_experts"),
        **({"group-query-attention": True, "num-query-groups": groups} if groups not in (None, heads) else {}),
    }
    return {k: v for k, v in flags.items() if v is not None}
