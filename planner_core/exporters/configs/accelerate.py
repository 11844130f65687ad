"""Write accelerate's configuration: DDP, FSDP2 or its DeepSpeed plugin, for a plan that splits the batch only."""

from __future__ import annotations

import json

from planner_core.core import Plan
from planner_core.cost import micro_batch, zero_stage
from planner_core.exporters.configs.common import count_recompute_policies, launch_sizes
from planner_core.exporters.data_parallel import BatchSharding, find_batch_sharding, list_fsdp_remarks
from planner_core.exporters.remarks import Remark, describe_launch
from planner_core.planning.methods import recompute_by_hand
from planner_core.planning.methods.tools import accelerate

QUOTED_NO = "'no'"
"""YAML reads a bare `no` as false."""


def write_accelerate(plan: Plan) -> tuple[str, tuple[str, ...], None]:
    """Write a file for `accelerate launch --config_file`. Raises InputError for a plan that shards more than the batch."""
    precision = accelerate.PRECISION_WORDS[plan.workload.dtype]
    sharding, (nodes, _) = find_batch_sharding(plan), launch_sizes(plan)
    kind, section, remarks = _write_plugin(plan, sharding)
    lines = [
        f"# {plan.model.name}, plan {json.dumps(plan.name)}, written by Shardscope: accelerate launch --config_file THIS train.py",
        "compute_environment: LOCAL_MACHINE",
        "debug: false",
        f"distributed_type: {kind}",
        *section,
        "machine_rank: 0  # another on every node",
        "main_training_function: main",
        f"mixed_precision: {QUOTED_NO if precision == 'no' else precision}",
        f"num_machines: {nodes}",
        f"num_processes: {plan.mesh.num_devices}",
        "rdzv_backend: static",
        "same_network: true",
        "use_cpu: false",
        "",
    ]
    return "\n".join(lines), remarks, None


def _describe_use(plan: Plan) -> Remark:
    return describe_launch(accelerate.ACCELERATE, plan, after=", by accelerate 1.15")


def _write_plugin(plan: Plan, sharding: BatchSharding) -> tuple[str, list[str], tuple[str, ...]]:
    """Write the section of what runs the plan: its `distributed_type`, its lines, and the remarks."""
    stage = zero_stage(plan)
    # FSDP and DeepSpeed share ZeRO-2 and 3: a plan that was searched for DeepSpeed says so by its stack.
    if stage and plan.workload.stack == "deepspeed" and sharding.replicate == 1:
        return "DEEPSPEED", _write_deepspeed_section(plan, stage), _list_deepspeed_remarks(plan, stage)
    if stage == 0 and plan.mesh.num_devices > 1:
        ddp = "every rank has the whole model (DDP), and trains on its own part of the batch"
        differences = [*sharding.differences, *recompute_by_hand(plan)]
        differing = (f"differs from the plan: {d}" for d in differences)
        return "MULTI_GPU", [], (_describe_use(plan), ddp, *differing, *_batch_remark(plan))
    policies = set(count_recompute_policies(plan))
    whole = f"the plan recomputes by {', '.join(sorted(policies))}, every layer whole here: less memory, more compute"
    differences = [whole] if policies - {"none", "full"} or len(policies) > 1 else []
    remarks = (*list_fsdp_remarks(plan, sharding, _describe_use(plan), differences), *_batch_remark(plan))
    return "FSDP", _write_fsdp_section(sharding, recomputes=bool(policies - {"none"})), remarks


def _write_fsdp_section(sharding: BatchSharding, *, recomputes: bool) -> list[str]:
    # One switch for all units: accelerate cannot free some after forward and keep others, as FSDP2's own code can.
    free = not sharding.units or any(sharding.units.values())
    wraps = [f"  fsdp_transformer_layer_cls_to_wrap: {','.join(sharding.classes)}"] if sharding.classes else []
    hybrid = [
        "parallelism_config:",
        f"  parallelism_config_dp_replicate_size: {sharding.replicate}",
        f"  parallelism_config_dp_shard_size: {sharding.shard}",
    ]
    return [
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_auto_wrap_policy: {'TRANSFORMER_BASED_WRAP' if wraps else 'NO_WRAP'}",
        *wraps,
        f"  fsdp_reshard_after_forward: {str(free).lower()}",
        *(["  fsdp_activation_checkpointing: true"] if recomputes else []),
        "  fsdp_offload_params: false",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        "  fsdp_cpu_ram_efficient_loading: true",
        *(hybrid if sharding.replicate > 1 else []),
    ]


def _write_deepspeed_section(plan: Plan, stage: int) -> list[str]:
    offload = "cpu" if plan.workload.offload else "none"
    return [
        "deepspeed_config:",
        f"  zero_stage: {stage}",
        f"  gradient_accumulation_steps: {plan.accumulate}",
        f"  offload_optimizer_device: {offload}",
        "  offload_param_device: none",
        *(["  zero3_init_flag: true", "  zero3_save_16bit_model: true"] if stage == 3 else []),
    ]


def _list_deepspeed_remarks(plan: Plan, stage: int) -> tuple[str, ...]:
    shares = {1: "optimizer states", 2: "gradients and optimizer states", 3: "weights, gradients and optimizer states"}
    differences = (*find_batch_sharding(plan, stage).differences, *recompute_by_hand(plan))
    return (
        _describe_use(plan),
        f"DeepSpeed's ZeRO-{stage} over all {plan.mesh.num_devices} ranks, which share {shares[stage]} and keep gradients in the model's "
        f"dtype; train.py takes batches of {micro_batch(plan)} samples on each rank",
        *(f"differs from the plan: {d}" for d in differences),
    )


def _batch_remark(plan: Plan) -> tuple[str, ...]:
    """Return the micro-batches of a step, for which accelerate's file has no field: the training script states them."""
    number = plan.accumulate
    if number == 1:
        return ()
    return (
        f"the file cannot state micro-batches: train.py has to take batches of {micro_batch(plan)} samples on each rank and "
        f"Accelerator(gradient_accumulation_steps={number})",
    )
