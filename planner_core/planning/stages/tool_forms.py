"""What a tool can be told of pipeline stages: the layout of a rank's mesh, the ZeRO stage, where stages are cut, and one recomputation.

A tool's settings know no weight and no copy. So all copies run under one layout and one recomputation, and a search for a tool chooses
degrees, the use of the inner ranks (`Inner`), and how many copies each stage has.

    Megatron-LM   any copies (--pipeline-model-parallel-layout), any stages a rank, ZeRO-1 (its distributed optimizer)
    torchtitan    equally many copies, at most two stages a rank, FSDP: weights are gathered once a step and gradients scattered once,
                  which is ZeRO-1 (with stages it does not reshard after forward, and torch's stages sum after the last backward alone)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner_core.core import Graph
from planner_core.planning.methods import Inner, Layout, ToolStages
from planner_core.planning.methods.legality import may_state
from planner_core.planning.stages.degrees import MICRO_BATCH_SAMPLES, PipelineDegrees

MAX_ZERO_OF_TOOLS = 1
"""The highest ZeRO stage of weights that run in stages: both tools send their traffic once a step."""


def may_deal_experts(stages: ToolStages, graph: Graph) -> bool:
    """Return whether inner ranks of a tool may have experts, and samples, of their own."""
    return Inner.EXPERT in stages.inner and "ep" in may_state(graph)


def list_tool_degrees(stages: ToolStages, degrees: PipelineDegrees, graph: Graph) -> Iterator[PipelineDegrees]:
    """Yield the degrees once for each use of their inner ranks; none if the tool does not run as many stages, or stages of such a
    model."""
    if degrees.virtual > stages.most_virtual or not _is_single_stack(graph):
        return
    words = may_state(graph)
    for inner in stages.inner if degrees.tensor > 1 else (Inner.TENSOR,):
        # Experts are dealt to ranks that share the samples, so each of them needs as many as a rank without experts.
        if inner is Inner.EXPERT and ("ep" not in words or degrees.samples % degrees.tensor):
            continue
        if degrees.samples not in MICRO_BATCH_SAMPLES and inner is not Inner.EXPERT:
            continue
        if inner not in (Inner.TENSOR, Inner.EXPERT) and "cp" not in words:
            continue
        yield replace(degrees, inner=inner)


def layout_of_tool(stages: ToolStages, d: PipelineDegrees) -> Layout | None:
    """Return the degrees as a layout; None if the tool does not know this place of the pipeline's ranks."""
    n, data = d.tensor, d.data
    layout = Layout(dp=data, zero=d.zero if data > 1 else 0, pp=d.ranks, vp=d.virtual)
    if d.inner == Inner.TENSOR:
        layout = replace(layout, tp=n, sp=n > 1)
    elif d.inner == Inner.EXPERT:
        layout = replace(layout, dp=data * n, ep=n, zero=d.zero)
    else:  # context ranks hold the same weights, so the ZeRO stage is over them too
        layout = replace(layout, cp=n, cp_type=d.inner, zero=d.zero)
    places = (replace(layout, order=order) for order in stages.orders)
    return next((one for one in places if one.pipe == d.pipe), None)


def _is_single_stack(graph: Graph) -> bool:
    """Return whether the model is layers in a row, of which alone these tools make stages; not an encoder and a decoder, or parts of a
    ResNet."""
    calls = sum(graph.num_repeats.values())
    return len(graph.num_repeats) == 1 or graph.config.get("num_hidden_layers") == calls
