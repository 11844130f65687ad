"""Pipeline stages in the words of Megatron-LM and torchtitan."""

from __future__ import annotations

from typing import Any

from planner_core.core import InputError, Pipeline, Plan

MEGATRON_ORDERS = ("1f1b", "interleaved")
TITAN_ORDERS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""The names of `torch.distributed.pipelining`, which torchtitan takes."""


def megatron_stages(plan: Plan) -> dict[str, Any]:
    """Megatron-LM's options for the stages of a plan; one stage is said too. Raises InputError for an order that it does not have."""
    cut = plan.pipeline
    if cut is None:
        return {"pipeline-model-parallel-size": 1}
    if cut.schedule not in MEGATRON_ORDERS:
        raise InputError(
            f"Megatron-LM runs stages as {' or '.join(MEGATRON_ORDERS)}, not as {cut.schedule}; plan with schedule=1f1b, or give --to json"
        )
    _one_row_of_layers(plan, cut)
    found: dict[str, Any] = {"pipeline-model-parallel-size": cut.ranks}
    if len(set(cut.copies)) > 1:
        return {**found, "pipeline-model-parallel-layout": megatron_layout(cut.copies)}
    return {**found, **({"num-virtual-stages-per-pipeline-rank": cut.virtual} if cut.virtual > 1 else {})}


def megatron_layout(copies: tuple[int, ...]) -> str:
    """`Et*3|t*2L`: E is the embedding, t a layer, L the loss (megatron-core's PipelineParallelLayerLayout)."""
    parts = [f"t*{n}" if n > 1 else "t" * n for n in copies]
    return f"E{'|'.join(parts)}L"


def titan_stages(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """torchtitan's options for the stages of a plan, and what they cannot say."""
    cut = plan.pipeline
    if cut is None:
        return {}, []
    _one_row_of_layers(plan, cut)
    found: dict[str, Any] = {
        "parallelism.pipeline_parallel_degree": cut.ranks,
        "parallelism.pipeline_parallel_schedule": TITAN_ORDERS[cut.schedule],
        "parallelism.pipeline_parallel_layers_per_stage": max(cut.copies),
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
    }
    if len(set(cut.copies)) == 1:
        return found, []
    own = "-".join(map(str, cut.copies))
    told = f"stages have {own} layers in the plan; torchtitan deals them out by itself, and takes others as module_fqns_per_model_part"
    return found, [told]


def _one_row_of_layers(plan: Plan, cut: Pipeline) -> None:
    layers = (plan.model.get("config") or {}).get("num_hidden_layers")
    if layers is not None and layers != sum(cut.copies):
        raise InputError(
            f"{plan.model['name']} is {sum(cut.copies)} copies of blocks, not its {layers} layers in a row, and stages of this tool hold "
            "nothing else; give --to json"
        )
