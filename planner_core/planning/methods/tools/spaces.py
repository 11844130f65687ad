"""The layouts among which plans are searched: those of a tool's settings, or all of a model's.

A tool takes degrees: how many ranks hold whole weights, over how many the weights are sharded, over how many products are. Each
combination of degrees that fills the cluster is one `Space`. A search for a tool looks at all of them that its export holds exactly: on
up to three mesh axes, with context ranks only where samples are long or few, and beside tensor ranks then with tokens split there too.

Example: Megatron-LM on 4 GPUs takes tp = 1, 2 or 4, each with and without sequence parallelism and a distributed optimizer; and where
the model has experts, ep = 2 or 4 beside tp = 1, and ep = 2 beside tp = 2.
"""

from __future__ import annotations

from itertools import product

from planner_core.core import MAX_AXES, Cluster, Graph, divisors
from planner_core.planning.methods.layout import CP_TYPES, SHARDED, WHOLE_STAGES, Layout, Space
from planner_core.planning.methods.legality import may_state
from planner_core.planning.methods.tools.table import bounding_tool, find_tool

LONG_TOKENS = 16_384
"""Samples of so many tokens, or fewer samples than GPUs, may be shared by context ranks."""
MAX_SEARCHED_AXES = 2
"""The mesh axes of a search that nothing bounds."""


def tool_spaces(
    tool: str | None, cluster: Cluster, seq: int | None = None, batch: int | None = None
) -> tuple[Space, ...]:
    """Return all that a tool can be told on a cluster for samples of `seq` tokens, `batch` a step; empty if every plan may be chosen, since
    no tool is named or the form that runs every plan. Raises InputError for a tool whose settings are not known here."""
    tool = bounding_tool(tool)
    if tool is None:
        return ()
    long = _are_long_or_few(seq or 0, batch, cluster.num_gpus)
    layouts = (
        x for x in find_tool(tool).layouts(cluster.num_gpus) if (long or x.cp == 1) and len(x.degrees) <= MAX_AXES
    )
    return tuple(layout.space() for layout in layouts)


def list_layouts(graph: Graph, batch: int, num_gpus: int) -> list[Layout]:
    """List every layout of a model on meshes of one axis or two, for `batch` samples a step; context ranks if these are long or few."""
    words, sizes = may_state(graph), divisors(num_gpus)
    contexts = sizes if "cp" in words and _are_long_or_few(graph.workload["seq"], batch, num_gpus) else [1]
    layouts = []
    for tensor, context, shards in product(sizes, contexts, sizes):
        replicas, rest = divmod(num_gpus, tensor * context * shards)
        if rest:
            continue
        dealt = divisors(shards if shards > 1 else replicas) if "ep" in words else [1]
        # Replicas share states in stages 1 and 2; without them only context ranks are left to shard over, which is stage 3.
        stages = WHOLE_STAGES if replicas > 1 else (0, SHARDED) if context > 1 and shards == 1 else (0,)
        kinds = tuple(CP_TYPES) if context > 1 else ("ring",)
        for tokens, experts, zero, kind in product((False, True)[: min(tensor, 2)], dealt, stages, kinds):
            layouts.append(Layout(replicas, shards, tensor, tokens, context, experts, zero, kind))
    return [layout for layout in layouts if len(layout.degrees) <= MAX_SEARCHED_AXES]


def _are_long_or_few(seq: int, batch: int | None, num_gpus: int) -> bool:
    """Return whether context ranks may share samples of `seq` tokens, `batch` a step: they are long, or fewer than the GPUs."""
    return seq >= LONG_TOKENS or (batch is not None and batch < num_gpus)
