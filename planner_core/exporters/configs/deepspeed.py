"""Write DeepSpeed's configuration: AutoTP with ZeRO, or ZeRO alone."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from planner_core.core import Plan, Sentence, list_names
from planner_core.cost import zero_stage
from planner_core.exporters.configs.common import column_remarks, dump_json, gradient_dtype, list_remarks
from planner_core.exporters.data_parallel import MAX_NAMED_WEIGHTS, find_batch_sharding, splits_batch_only
from planner_core.exporters.observe import inspect_model, styles_by_pattern
from planner_core.exporters.remarks import FILE
from planner_core.models import load_plan_graph
from planner_core.planning.methods import (
    CannotHold,
    Difference,
    NothingSplit,
    TpLayout,
    describe_modules,
    drop_summed,
    recompute_by_hand,
    star_numbers,
    tensor_layout,
)
from planner_core.planning.methods.tools import deepspeed

USAGE = Sentence(
    "Call deepspeed.initialize(model=model, config='",
    FILE,
    "', ...) with DeepSpeed 0.19, which clips gradients to a norm of 1 unless told",
)
ZERO_3 = 3
GATHERED_ON_SAVE = {"stage3_gather_16bit_weights_on_model_save": True}
SMALL_WEIGHTS_STAY = (
    "weights of at most 100,000 elements (norms, biases) stay gathered there once they were used (stage3_param_persistence_threshold)",
)
AUTOTP_STAGE = 2
"""The highest ZeRO stage together with AutoTP."""


def autotp_stage(plan: Plan) -> int:
    """Return the ZeRO stage that a configuration with AutoTP states."""
    return min(zero_stage(plan), AUTOTP_STAGE)


def write_deepspeed(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout | None]:
    """Write AutoTP's `partition_config`, which holds column and row layers only; or ZeRO alone if the plan splits the batch only."""
    try:
        layout = tensor_layout(plan)
    except NothingSplit:
        if not splits_batch_only(plan):
            find_batch_sharding(plan)  # raises what hinders ZeRO: that no linear layer is split does not
            raise
        return _write_zero(plan)
    drop_summed(layout)
    inspect_model(plan, layout)
    styles = styles_by_pattern(plan, layout)
    unsupported = [n for n, s in styles.items() if s not in deepspeed.PARTITIONS] + list(
        dict.fromkeys(map(star_numbers, layout.experts))
    )
    if unsupported:
        difference = "split in the plan, whole here; AutoTP is told of column and row pairs only"
        layout.differences.append(Difference.of(unsupported, difference))
    if not layout.groups:
        raise CannotHold(
            f'the plan "{plan.name}" splits experts only ({describe_modules(layout.experts)}), which AutoTP does not'
        )
    specs = [
        {"patterns": [_weight_regex(n) for n, s in styles.items() if s == style], "partition_type": kind}
        for style, kind in deepspeed.PARTITIONS.items()
    ]
    stage = zero_stage(plan)
    # The remarks below say what the file does not: a plan of ZeRO-3 is written as stage 2, and its price is that of stage 2.
    data = {
        **_step_settings(plan, autotp_stage(plan)),
        "tensor_parallel": {
            "autotp_size": layout.size,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        },
    }
    if stage > AUTOTP_STAGE:
        difference = f"weights are gathered at use in the plan (ZeRO-3), whole here: AutoTP goes to stage {AUTOTP_STAGE}; more memory"
        layout.differences.append(Difference(difference))
    differences = [*_gradient_remarks(plan, autotp_stage(plan)), *recompute_by_hand(plan)]
    remarks = list_remarks(layout, [USAGE, *column_remarks(layout)], differences, autotp_stage(plan))
    written = {n: s for n, s in layout.styles.items() if s in deepspeed.PARTITIONS}
    return dump_json(data), remarks, replace(layout, styles=written, experts=[])


def _write_zero(plan: Plan) -> tuple[str, tuple[str, ...], None]:
    """Write ZeRO over all GPUs, for a plan that splits the batch only. Raises CannotHold for replicas of shards."""
    stage, params = zero_stage(plan), [named for b in plan.blocks.values() for named in b.params.items()]
    if stage == ZERO_3 and (replicas := find_batch_sharding(plan).replicate) > 1:
        raise CannotHold(
            f'the plan "{plan.name}" shards weights over {plan.mesh.num_devices // replicas} of {plan.mesh.num_devices} GPUs, and '
            f"DeepSpeed's ZeRO-3 over all; fsdp={plan.mesh.num_devices} would do"
        )
    # DeepSpeed shards over all ranks together, so over every axis of the plan's mesh.
    every = set(range(len(plan.mesh.axis_sizes)))
    differing = (
        [n for n, p in params if every != set(p.gathered if stage == ZERO_3 else p.once_gathered_axes)] if stage else []
    )
    data = {
        **_step_settings(plan, stage),
        "train_micro_batch_size_per_gpu": max(1, plan.graph_batch // plan.mesh.num_devices),
    }
    names = list_names(sorted(set(differing)), MAX_NAMED_WEIGHTS)
    listed = f"{len(differing)} of its {len(params)} kinds of weights lie in another way there: {names}"
    remarks = (
        USAGE,
        f"ZeRO stage {stage} over all {plan.mesh.num_devices} GPUs; every weight is of that stage here",
        *(SMALL_WEIGHTS_STAY if stage == ZERO_3 else ()),
        *((f"differs from the plan: {listed}",) if differing else ()),
        *(f"differs from the plan: {d}" for d in (*_gradient_remarks(plan, stage), *recompute_by_hand(plan))),
    )
    return dump_json(data), remarks, None


def _gathered_ahead(plan: Plan) -> dict[str, Any]:
    """Return how far ZeRO-3 gathers ahead: as the plan does, the weights of one unit beside those of the unit that runs.

    DeepSpeed's own limit is 10^9 elements, which is 2 GB in 16 bits, whatever the model's layers have.
    """
    graph = load_plan_graph(plan)
    sizes = [
        sum(math.prod(v.meta.shape) for v in block.values if v.kind == "parameter") for block in graph.blocks.values()
    ]
    largest = max(sizes, default=0)
    # A model without repeated blocks has no unit to gather ahead.
    if not largest:
        return {}
    return {"stage3_prefetch_bucket_size": largest, "stage3_max_live_parameters": 2 * largest}


def _step_settings(plan: Plan, stage: int) -> dict[str, Any]:
    """Return the settings of a step: batch, ZeRO stage and dtype."""
    return {
        "train_batch_size": plan.workload.batch,
        "gradient_accumulation_steps": plan.accumulate,
        "zero_optimization": {
            "stage": stage,
            **(_gathered_ahead(plan) | GATHERED_ON_SAVE if stage == ZERO_3 else {}),
            **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if plan.workload.offload else {}),
        },
        # Without a section DeepSpeed trains in float32.
        **({section: {"enabled": True}} if (section := deepspeed.DTYPE_SECTIONS.get(plan.workload.dtype)) else {}),
        **_gradient_settings(plan, stage),
    }


def _gradient_settings(plan: Plan, stage: int) -> dict[str, Any]:
    """Return the dtype of gradients as the plan was priced, which DeepSpeed keeps and sums in that of the model unless a file says more."""
    if gradient_dtype(plan) == plan.workload.dtype:
        return {}
    # Without ZeRO DeepSpeed refuses to keep gradients in another dtype than the model's, so there they are only summed in it.
    accumulation = {"data_types": {"grad_accum_dtype": "fp32"}} if stage else {}
    return {"communication_data_type": "fp32", **accumulation}


def _gradient_remarks(plan: Plan, stage: int) -> list[str]:
    """Return the difference from the plan where gradients are kept in the model's dtype and summed in another."""
    if stage or gradient_dtype(plan) == plan.workload.dtype:
        return []
    return [
        f"gradients are kept in {plan.workload.dtype} here and summed over GPUs in {gradient_dtype(plan)}, which the plan and the "
        "price have for both: DeepSpeed keeps them in another dtype than the model's with ZeRO only"
    ]


def _weight_regex(name: str) -> str:
    """Return the pattern of a weight: `layers.*.q_proj` -> `.*layers\\.\\d+\\.q_proj\\.weight$`."""
    return ".*" + re.escape(name).replace(r"\*", r"\d+") + r"\.weight$"
