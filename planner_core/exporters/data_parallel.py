"""Export plans that shard only the batch and store weights whole or sharded: FSDP2 (and HSDP) code, and accelerate's configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass

from planner_core.core import BlockLabel, ParamPlan, Plan, Shard, glob_name
from planner_core.cost import micro_batch
from planner_core.exporters.source import template_text
from planner_core.planning.methods import CannotHold, recompute_by_hand

WrittenText = tuple[str, tuple[str, ...], None]


@dataclass(frozen=True)
class BatchSharding:
    """FSDP2's view of a plan.

    Attributes:
        replicate, shard: The numbers of replicas and of shards of the weights.
        units: Whether a unit frees its weights after forward, by the pattern of its modules.
        classes: The classes of the units.
        differences: Differences from the plan.
    """

    replicate: int
    shard: int
    units: dict[str, bool]
    classes: tuple[str, ...]
    differences: tuple[str, ...]


def find_batch_sharding(plan: Plan) -> BatchSharding:
    """The sharding of a plan. Raises InputError if it shards more than the batch, or over axes that FSDP2's mesh cannot have."""
    sizes = plan.mesh.axis_sizes
    active = [a for a, n in enumerate(sizes) if n > 1]
    params = [(label, name, p) for label, b in plan.blocks.items() for name, p in b.params.items()]
    for axis in active:
        split = [f"{label}.{name}".lstrip(".") for label, name, p in params if not _is_whole(p, axis)]
        if split or axis not in plan.data_axes:
            what = f"splits the work of {split[0]}" if split else "splits other dims than the batch"
            raise CannotHold(
                f'the plan "{plan.name}" {what} over mesh axis {plan.mesh.axis_names[axis]}, and this form knows data parallelism only'
            )
    # FSDP2 takes a mesh of (replicas, shards), in this order: axes that shard weights must be the innermost ones.
    stored = [a for a in active if any(_is_sharded(p, a) for _, _, p in params)]
    if stored != active[len(active) - len(stored) :]:
        raise CannotHold(
            f'the plan "{plan.name}" shards weights over mesh axis {plan.mesh.axis_names[stored[0]]} and keeps them whole on one inside '
            "it, while FSDP2 shards over the innermost axes"
        )
    shard = 1
    for axis in stored:
        shard *= sizes[axis]
    units = {
        pattern: any(p.gathered for p in b.params.values())
        for label, b in plan.blocks.items()
        if label
        for pattern in _unit_patterns(b.prefixes)
    }
    classes = tuple(dict.fromkeys(BlockLabel.parse(label).block for label in plan.blocks if label))
    return BatchSharding(plan.mesh.num_devices // shard, shard, units, classes, tuple(_differences(plan, stored)))


def splits_batch_only(plan: Plan) -> bool:
    """Whether a plan splits the batch and no other work."""
    active = [a for a, n in enumerate(plan.mesh.axis_sizes) if n > 1]
    params = [p for b in plan.blocks.values() for p in b.params.values()]
    return all(a in plan.data_axes and all(_is_whole(p, a) for p in params) for a in active)


def _is_whole(p: ParamPlan, axis: int) -> bool:
    """Whether a weight is used whole on an axis."""
    return axis in p.gathered or not isinstance(p.working[axis], Shard)


def _is_sharded(p: ParamPlan, axis: int) -> bool:
    return isinstance(p.stored[axis], Shard)


def _unit_patterns(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    pattern = glob_name(prefixes)
    return prefixes if pattern.startswith("{") else (pattern,)


def _differences(plan: Plan, stored: list[int]) -> list[str]:
    whole = sorted(
        {
            n
            for b in plan.blocks.values()
            for n, p in b.params.items()
            if stored and not any(_is_sharded(p, a) for a in stored)
        }
    )
    once = [
        n
        for b in plan.blocks.values()
        for n, p in b.params.items()
        if any(_is_sharded(p, a) for a in stored) and not p.gathered
    ]
    differences = []
    if whole:
        shown = ", ".join(whole[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
        differences.append(
            f"{shown}: whole in the plan, sharded here with the rest of their unit; less memory, more traffic"
        )
    if once:
        differences.append(
            "weights that the plan gathers once a step (ZeRO-1, ZeRO-2) are gathered here in every micro-batch"
        )
    differences += recompute_by_hand(plan)
    if any(b.kept for b in plan.blocks.values()):
        differences.append("some results are kept in the plan, and none here: less memory, more compute")
    return differences


def _remarks(sharding: BatchSharding, use: str) -> tuple[str, ...]:
    axes = f"{sharding.shard} shards" + (f", {sharding.replicate} times" if sharding.replicate > 1 else "")
    return (
        use,
        f"every weight is stored in {axes}; each rank trains on its own part of the batch",
        *(f"differs from the plan: {d}" for d in sharding.differences),
    )


def write_fsdp2(plan: Plan) -> WrittenText:
    """A Python module with `shard(model)`. Raises InputError for a plan that shards more than the batch."""
    sharding, load = find_batch_sharding(plan), plan.workload
    use = "Import `shard` from FILE and call shard(model) on the whole model, equal on every rank, before the optimizer is made"
    remarks = _remarks(sharding, use)
    quoted = json.dumps(plan.name, ensure_ascii=False)
    head = [
        f'"""FSDP2 of {plan.model["name"]} over {plan.mesh.num_devices} devices: the plan {quoted}, written by Shardscope.',
        "",
        *(f"- {r.replace('FILE', 'this file')}" for r in remarks),
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from fnmatch import fnmatchcase",
        "",
        "import torch",
        "from torch import nn",
        "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh",
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        "",
        f"MODEL = {json.dumps(str(plan.model['name']))}",
        f"REPLICATE, SHARD = {sharding.replicate}, {sharding.shard}",
        "UNITS = {  # pattern of modules -> whether gathered weights are freed after forward, and gathered again for backward",
        *(f'    "{pattern}": {frees},' for pattern, frees in sharding.units.items()),
        "}",
        f"DTYPE, REDUCE = torch.{load['dtype']}, torch.{load.get('gradient_dtype', 'float32')}",
    ]
    return "\n".join(head) + "\n\n\n" + template_text("fsdp_template", "shard"), remarks, None


def _batch_remark(plan: Plan) -> tuple[str, ...]:
    """The micro-batches of a step, for which accelerate's file has no field: the training script states them."""
    number = int(plan.workload["accumulate"])
    if number == 1:
        return ()
    return (
        f"the file cannot state micro-batches: train.py has to take batches of {micro_batch(plan)} samples on each rank and "
        f"Accelerator(gradient_accumulation_steps={number})",
    )


def write_accelerate(plan: Plan) -> WrittenText:
    """A file for `accelerate launch --config_file`. Raises InputError for a plan that shards more than the batch."""
    # One switch for all units: accelerate cannot free some after forward and keep others, as FSDP2's own code can.
    sharding, nodes = find_batch_sharding(plan), max(1, plan.mesh.num_devices // 8)
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(str(plan.workload["dtype"]), "'no'")
    free = "true" if not sharding.units or any(sharding.units.values()) else "false"
    wraps = [f"  fsdp_transformer_layer_cls_to_wrap: {','.join(sharding.classes)}"] if sharding.classes else []
    hybrid = (
        [
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {sharding.replicate}",
            f"  parallelism_config_dp_shard_size: {sharding.shard}",
        ]
        if sharding.replicate > 1
        else []
    )
    lines = [
        f"# {plan.model['name']}, plan {json.dumps(plan.name)}, written by Shardscope: accelerate launch --config_file THIS train.py",
        "compute_environment: LOCAL_MACHINE",
        "debug: false",
        "distributed_type: FSDP",
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_auto_wrap_policy: {'TRANSFORMER_BASED_WRAP' if wraps else 'NO_WRAP'}",
        *wraps,
        f"  fsdp_reshard_after_forward: {free}",
        "  fsdp_offload_params: false",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        "  fsdp_cpu_ram_efficient_loading: true",
        *hybrid,
        "machine_rank: 0  # another on every node",
        "main_training_function: main",
        f"mixed_precision: {precision}",
        f"num_machines: {nodes}",
        f"num_processes: {plan.mesh.num_devices}",
        "rdzv_backend: static",
        "same_network: true",
        "use_cpu: false",
        "",
    ]
    return (
        "\n".join(lines),
        _remarks(sharding, "accelerate launch --config_file FILE train.py, by accelerate 1.15") + _batch_remark(plan),
        None,
    )
