"""Write options of torchtitan's command line."""

from __future__ import annotations

import json
import math
from typing import Any

from planner_core.core import InputError, Plan, named, named_form
from planner_core.cost import zero_stage
from planner_core.exporters.configs.common import (
    check_single_stack,
    count_recompute_policies,
    gathering_remarks,
    list_remarks,
    micro_batch_samples,
)
from planner_core.exporters.remarks import describe_launch
from planner_core.planning.methods import TOKENS_OR_GATHERED, Layout, TpLayout, parallel_degrees
from planner_core.planning.methods.tools import torchtitan
from planner_core.planning.pricing import nearest_settings


def write_torchtitan(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout]:
    """Write the options of torchtitan 0.3, one on a line: all of them for its own Llamas, only the settings for other models."""
    layout = parallel_degrees(plan)
    config = torchtitan.find_config(plan)
    stages, stage_remarks = _stage_options(plan)
    # torchtitan may keep gathered weights through backward, but here not beside context ranks, where its reader has no price.
    keeps_weights = plan.pipeline is None and zero_stage(plan) in (1, 2) and layout.data > layout.context == 1
    differences = [*_state_remarks(plan, layout, keeps_weights), *_rank_remarks(layout), *stage_remarks]
    load = plan.workload
    options = {
        "parallelism.data_parallel_replicate_degree": layout.data // layout.shards,
        "parallelism.data_parallel_shard_degree": layout.shards,
        "parallelism.tensor_parallel_degree": layout.size,
        **({"parallelism.context_parallel_degree": layout.context} if layout.context > 1 else {}),
        **({"parallelism.expert_parallel_degree": layout.expert} if layout.expert > 1 else {}),
        **({"parallelism.fsdp_reshard_after_forward": "never"} if keeps_weights else {}),
        **stages,
        **_batch_options(plan, layout),
        "training.global_batch_size": load.batch,
        "training.seq_len": load.seq,
        # Its default is bfloat16, and it takes no float16.
        **({"training.mixed_precision_param": "float32"} if load.dtype == "float32" else {}),
    }
    lines = ["--module llama3", f"--config {config}"] if config else []
    lines += [f"--{name} {value}" for name, value in options.items()]
    # torchtitan splits tokens beside tensor parallelism unless it is told not to.
    lines += [] if layout.sequence or layout.size == 1 else ["--parallelism.no-enable_sequence_parallel"]
    lines += ["--compile.enable"] if load.compiled else []
    policies = [p for p, _ in count_recompute_policies(plan).most_common()] or ["none"]
    policy = policies[0] if len(policies) == 1 and policies[0] in torchtitan.TORCHTITAN.recomputations else "full"
    lines.append(f"activation-checkpoint:{policy}")
    layout.recompute = policy
    if [policy] != policies:
        differences.append(
            f"the plan recomputes by {', '.join(policies)}, every layer whole here: less memory, more compute"
        )
    head = f"# {plan.model.name}, plan {json.dumps(plan.name)}: the degrees that torchtitan knows."
    layout.differences = [d for d in layout.differences if d.kind not in TOKENS_OR_GATHERED]
    return (
        "\n".join([head, *lines, ""]),
        list_remarks(
            layout,
            _usage_remarks(plan),
            differences,
            # With stages it gathers weights once a step and shards the optimizer's states (`_stage_options`).
            stage=1 if plan.pipeline and layout.shards > 1 else 0,
        ),
        layout,
    )


def _usage_remarks(plan: Plan) -> list[str]:
    """Return how to run the file."""
    config = torchtitan.find_config(plan)
    return [
        describe_launch(torchtitan.TORCHTITAN, plan, after=", by torchtitan 0.3"),
        f"its config {config} has Llama 3.1's rotary positions and trains on c4: change it in torchtitan"
        if config
        else "torchtitan has no config for this model: MODEL and CONFIG are a module of yours",
        "Degrees only: torchtitan splits each model its own way. Its options are checked against its "
        "ParallelismConfig; it was not run.",
    ]


def _stage_options(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """torchtitan's options for the stages of a plan, and remarks about what they cannot express."""
    cut = plan.pipeline
    if cut is None:
        return {}, []
    check_single_stack(plan, cut)
    if cut.outer:
        raise InputError(
            f"stages lie inside of {cut.outer} axes of the mesh {plan.mesh}, and torchtitan's pipeline is the outermost axis; state a "
            "layout without order, or give ",
            named_form("json"),
        )
    if cut.schedule == "zb" and cut.virtual == 1:
        raise InputError(
            f"{torchtitan.SCHEDULE_NAMES['zb']} of torchtitan takes at least 2 stages of a rank, and the plan has one; state a layout with "
            "vp=2, or give ",
            named_form("json"),
        )
    if (stage := zero_stage(plan)) > 1:
        # Not a remark: the memory of the first ranks was counted on it, so ZeRO-1 may not fit.
        raise InputError(
            f"the plan's stages hold weights under ZeRO-{stage}, and with stages torchtitan gathers weights once a step and keeps "
            "gradients whole (ZeRO-1), which takes more memory; plan with ",
            named("zero", 1),
            ", or give ",
            named_form("json"),
        )
    settings, dealt = nearest_settings(Layout(pp=cut.ranks, vp=cut.virtual, schedule=cut.schedule), cut.copies)
    options: dict[str, Any] = {
        "parallelism.pipeline_parallel_degree": cut.ranks,
        "parallelism.pipeline_parallel_schedule": torchtitan.SCHEDULE_NAMES[cut.schedule],
        # Its defaults take one layer from each end, for the embedding and the head, which the plan's cut has weighed already.
        **settings.options(),
    }
    if dealt == cut.copies:
        return options, []
    planned, written = ("-".join(map(str, copies)) for copies in (cut.copies, dealt))
    remark = (
        f"{len(cut.copies)} stages have {planned} layers in the plan, and {len(dealt)} have {written} here, the nearest that options of "
        "torchtitan's command line make; its Python config takes the plan's as module_fqns_per_model_part"
    )
    return options, [remark]


def _batch_options(plan: Plan, layout: TpLayout) -> dict[str, Any]:
    """Return the samples of a rank: one micro-batch, or with stages the batch that the pipeline cuts into micro-batches."""
    micro = micro_batch_samples(plan, layout)
    if plan.pipeline is None:
        return {"training.local_batch_size": micro}
    # With stages accumulation is the pipeline's own: a rank reads the samples of all micro-batches at once.
    samples = micro * plan.accumulate
    return {"parallelism.pipeline_parallel_microbatch_size": micro, "training.local_batch_size": samples}


def _state_remarks(plan: Plan, layout: TpLayout, keeps_weights: bool) -> list[str]:
    """Return a remark on optimizer states in parts. torchtitan has them only with weights in parts, which `layout` takes over.
    `keeps_weights`: the gathered weights stay until backward is over."""
    stage = zero_stage(plan)
    if stage not in (1, 2) or layout.data == 1 or layout.shards > 1:
        return []
    # Whole weights with whole states (DDP) would be as fast as the plan, but take memory that the plan may not have.
    layout.shards = layout.data
    # With stages torchtitan gathers weights once a step and scatters gradients once: what the plan calls ZeRO-1.
    if plan.pipeline and stage == 1:
        return []
    if not keeps_weights:
        return [f"weights are whole while they run in the plan (ZeRO-{stage}); torchtitan shards them too (FSDP)"]
    return gathering_remarks(plan)


def _rank_remarks(layout: TpLayout) -> list[str]:
    """Remarks on differences of context and expert ranks. `layout` takes over what torchtitan runs; its shards are those that
    `_state_remarks` sets, since experts may be dealt out over ranks that shard states alone."""
    remarks = []
    if layout.context > 1 and layout.cp_type != "gather":
        remarks.append(
            f"attention runs by {layout.cp_type} over the context ranks in the plan; torchtitan 0.3 gathers keys and values"
        )
    if layout.shards % layout.expert:
        remarks.append(
            "weights are whole on the ranks that experts are dealt out over; torchtitan shards weights over these ranks"
        )
        layout.shards = math.lcm(layout.shards, layout.expert)
    if layout.expert > 1 and layout.size * layout.context > 1:
        remarks.append(
            "experts are dealt out over data-parallel ranks in the plan, and each is split by the tensor axis; torchtitan deals whole "
            "experts to tensor-parallel and context ranks first; the price below is the plan's way"
        )
    return remarks
