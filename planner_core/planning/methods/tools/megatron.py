"""Megatron-LM, by arguments, and the models that they state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

from planner_core.core import CallSite, Graph, Plan, divisors
from planner_core.planning.methods.layout import CP_TYPES, ORDERS, PEERS_TYPES, Layout
from planner_core.planning.methods.tools.tool import Inner, Tool, ToolStages

NORMED_BY_HEAD = ("qwen3",)
"""The model types whose norms of queries and keys are those of Megatron-LM's --qk-layernorm: one over the dims of each head."""
STATED_MODELS = ("llama", "mistral", "mixtral", "qwen2", "gpt2", *NORMED_BY_HEAD)
"""The model types whose every part Megatron-LM's flags state."""
QKV = ("q_proj", "k_proj", "v_proj")
CP_COMM_TYPES = {kind: word for word, kind in PEERS_TYPES.items() if word != "allgather"}
"""Its `--cp-comm-type` for each way of attention over context ranks."""


def megatron_fault(model: Plan | Graph) -> str:
    """Return why the flags written for Megatron-LM do not state the model of a plan, or of a graph before a plan is searched for; empty if
    they do. Its GPTModel would be another model, of another price."""
    if isinstance(model, Plan):  # an export has no graph
        params = {param for block in model.blocks.values() for param in block.params}
        return _find_fault(model.model.name, model.model.config, params, linear_biases(model), model.workload.seq)
    params_of = {block.name: {value.name for value in block.own_parameters.values()} for block in model.all_blocks}
    sites = ((params_of[block.name], op.site) for block in model.all_blocks for op in block.ops)
    biases = {site.module: f"{site.module}.bias" in names for names, site in sites if _may_have_bias(site)}
    every = {param for names in params_of.values() for param in names}
    return _find_fault(model.name, model.config, every, biases, int(model.workload["seq"]))


def _find_fault(
    name: str, config: Mapping[str, Any], params: Collection[str], biases: Mapping[str, bool], seq: int
) -> str:
    """Return the fault of a model with these parameters; `biases`: whether each linear layer has one; `seq`: tokens of a sample."""
    if config.get("model_type") != "gpt2" and not {"hidden_size", "num_attention_heads"} <= config.keys():
        return f"{name} has no hidden_size and num_attention_heads in its config, so Megatron-LM's flags do not describe it"
    kind = config.get("model_type")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    slides = "sliding_attention" in kinds if kinds else config.get("use_sliding_window", True)
    parts = {
        "norms of queries and keys": kind not in NORMED_BY_HEAD and any("q_norm" in param for param in params),
        # Without the field Megatron-LM divides the width by the heads, and the model has a size of its own.
        "heads of a size that its config leaves out (head_dim)": kind in NORMED_BY_HEAD and not config.get("head_dim"),
        # A window of the whole sequence masks nothing.
        f"sliding-window attention ({window} tokens)": bool(window and slides and window < seq),
        "norms behind the feed-forward": any("post_feedforward_layernorm" in param for param in params),
        f"rotary positions scaled by {scaling}": scaling not in ("default", "llama3"),
        f"the activation {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
    }
    lacking = [part for part, present in parts.items() if present]
    if kind not in STATED_MODELS and not lacking:
        lacking = [f"what a model of type {kind} has beside the parts of {', '.join(STATED_MODELS)}"]
    if lacking:
        return f"the flags written for Megatron-LM do not state {' and '.join(lacking)} of {name}"
    biased = [scope for scope, has_bias in biases.items() if has_bias]
    if len(biased) == len(biases) or all(scope.rpartition(".")[2] in QKV for scope in biased):
        return ""
    where = ", ".join(biased)
    return f"Megatron-LM has biases in all linear layers, in none, or in queries, keys and values only; {name} has them in {where}"


def linear_biases(plan: Plan) -> dict[str, bool]:
    """Return whether each linear layer of a plan's blocks has a bias. The head is left out: GPTModel's has none, whatever the flags say."""
    return {
        site.module: f"{site.module}.bias" in block.params
        for block in plan.blocks.values()
        for site in map(CallSite.parse, block.sites)
        if _may_have_bias(site)
    }


def _may_have_bias(site: CallSite) -> bool:
    return site.fn in ("linear", "addmm") and site.module != "lm_head"  # GPT-2's Conv1D is an addmm


def _list_layouts(num_gpus: int) -> Iterator[Layout]:
    """Tensor and sequence parallelism beside data, context or expert parallelism, and the distributed optimizer."""
    for tensor in divisors(num_gpus):
        ranks = num_gpus // tensor
        for zero in (0, 1) if ranks > 1 else (0,):
            for sequence in (False, True) if tensor > 1 else (False,):
                yield Layout(dp=ranks, tp=tensor, sp=sequence, zero=zero)
            for n in divisors(ranks)[1:]:
                for kind, sequence in product(CP_TYPES, (False, True) if tensor > 1 else (False,)):
                    yield Layout(dp=ranks // n, tp=tensor, sp=sequence, cp=n, cp_type=kind, zero=zero)
                # Beside tensor ranks Megatron-LM deals out experts with sequence parallelism alone.
                yield Layout(dp=ranks, tp=tensor, sp=tensor > 1, ep=n, zero=zero)


MEGATRON = Tool(
    name="megatron",
    title="Megatron-LM",
    description="Arguments for the degrees and the architecture: Megatron-LM cannot be told where each weight goes.",
    suffix=".txt",
    writer="configs.megatron.write_megatron",
    launch="{torchrun} pretrain_gpt.py $(cat {file})",
    states_run=True,
    shards_pairs_only=True,
    layouts=_list_layouts,
    searched="without its FSDP, and with context ranks for long or few samples and not beside expert ranks",
    # It runs core attention again, or by --recompute-modules parts that no policy of the planner does.
    other_recomputations={"selective": "its own selective, of core attention, is priced as none"},
    stages=ToolStages(tuple(Inner), ORDERS[:2], most_virtual=8, even=False),
    find_fault=megatron_fault,
)
"""Its two kinds of FSDP are not searched, which `price` reads."""
