"""torchtitan 0.3, by options of its command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner_core.core import Plan, divisors
from planner_core.planning.methods.layout import ORDERS, Layout
from planner_core.planning.methods.tools.tool import Inner, Tool, ToolStages

CONFIGS: dict[tuple[int | None, ...], str] = {
    (4096, 32, 32, 8, 128256): "llama3_8b",
    (8192, 80, 64, 8, 128256): "llama3_70b",
    (16384, 126, 128, 8, 128256): "llama3_405b",
}
"""Its configs of its Llamas, by width, layers, heads, groups and vocabulary."""
SCHEDULE_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""Its names for schedules of stages, which are those of `torch.distributed.pipelining`."""


def find_config(plan: Plan) -> str:
    """Return the name of torchtitan's own config for a plan's model, which the written options name; empty if it has none."""
    config = plan.model.config
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return CONFIGS.get(tuple(config.get(size) for size in sizes), "") if config.get("model_type") == "llama" else ""


def _option_of_model(plan: Plan) -> str:
    """Return the options of torchtitan's command line for a model that it has no config for: MODEL and CONFIG are then a user's."""
    return "" if find_config(plan) else " --module MODEL --config CONFIG"


def _list_layouts(num_gpus: int) -> Iterator[Layout]:
    """Replicate, FSDP2 or HSDP, beside tensor parallelism, which always splits the tokens between the products. Context ranks shard
    weights too, and gather keys and values. Experts are dealt to ranks that shard weights. Without replicas and context ranks
    fsdp_reshard_after_forward may be "never", which is ZeRO-2."""
    for tensor in divisors(num_gpus):
        for context in divisors(num_gpus // tensor):
            ranks = num_gpus // tensor // context
            for replicas in divisors(ranks):
                # Without ranks of fsdp the context ranks are left to shard weights over.
                states = 3 if context > 1 and replicas == ranks else 0
                layout = Layout(dp=replicas, fsdp=ranks // replicas, tp=tensor, sp=tensor > 1, cp=context, zero=states)
                yield replace(layout, cp_type="gather") if context > 1 else layout
            if context == 1 < ranks:
                yield Layout(dp=ranks, tp=tensor, sp=tensor > 1, zero=2)
    for shards in divisors(num_gpus)[1:]:
        for experts in divisors(shards)[1:]:
            yield Layout(dp=num_gpus // shards, fsdp=shards, ep=experts)
    for experts in divisors(num_gpus)[1:]:
        yield Layout(dp=num_gpus, ep=experts, zero=2)


TORCHTITAN = Tool(
    name="torchtitan",
    title="torchtitan",
    description="Degrees only, as options of torchtitan’s command line; its own parser takes them, no training was run.",
    suffix=".txt",
    writer="configs.torchtitan.write_torchtitan",
    launch="{torchrun} -m torchtitan.train{option} $(grep -v '^#' {file})",
    option=_option_of_model,
    states_run=True,
    shards_pairs_only=True,
    layouts=_list_layouts,
    searched="with tensor ranks that split tokens, experts over data-parallel ranks alone, and context ranks that gather, for long or "
    "few samples",
    recomputations=("none", "selective", "full"),
    stages=ToolStages((Inner.TENSOR, Inner.GATHER), ORDERS[:1], most_virtual=2, even=True),
)
