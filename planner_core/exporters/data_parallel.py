"""Export plans that shard only the batch, and store weights whole or sharded: FSDP2 (and HSDP) code, and accelerate's configuration."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass

from planner_core.core import ParamPlan, Plan, Shard, glob_name
from planner_core.exporters.source import fsdp_template as template
from planner_core.planning.methods import CannotHold, by_hand

Text = tuple[str, tuple[str, ...], None]


@dataclass(frozen=True)
class Sharding:
    """The number of replicas of the weights, and of shards; the units by pattern (and whether each frees its weights after forward)
    and by class; and differences from the plan."""

    replicate: int
    shard: int
    units: dict[str, bool]
    classes: tuple[str, ...]
    differences: tuple[str, ...]


def sharding(plan: Plan) -> Sharding:
    """The sharding of a plan. Raises InputError if it shards more than the batch, or over axes that a mesh of two dims cannot have."""
    sizes = plan.mesh.axis_sizes
    live = [a for a, n in enumerate(sizes) if n > 1]
    params = [(label, name, p) for label, b in plan.blocks.items() for name, p in b.params.items()]
    for axis in live:
        split = [f"{label}.{name}".lstrip(".") for label, name, p in params if not _whole(p, axis)]
        if split or axis not in plan.data_axes:
            what = f"splits the work of {split[0]}" if split else "splits other dims than the batch"
            raise CannotHold(
                f'the plan "{plan.name}" {what} over mesh axis {plan.mesh.axis_names[axis]}, and this form knows data parallelism only'
            )
    stored = [a for a in live if any(_sharded(p, a) for _, _, p in params)]
    if stored != live[len(live) - len(stored) :]:
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
        for pattern in _patterns(b.prefixes)
    }
    classes = tuple(dict.fromkeys(label.partition("#")[0] for label in plan.blocks if label))
    return Sharding(plan.mesh.num_devices // shard, shard, units, classes, tuple(_differences(plan, stored)))


def splits_batch_only(plan: Plan) -> bool:
    """Whether a plan splits no work but the batch."""
    live = [a for a, n in enumerate(plan.mesh.axis_sizes) if n > 1]
    params = [p for b in plan.blocks.values() for p in b.params.values()]
    return all(a in plan.data_axes and all(_whole(p, a) for p in params) for a in live)


def _whole(p: ParamPlan, axis: int) -> bool:
    """Whether a weight is used Replicate on an axis."""
    return axis in p.gathered or not isinstance(p.working[axis], Shard)


def _sharded(p: ParamPlan, axis: int) -> bool:
    return isinstance(p.stored[axis], Shard)


def _patterns(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    pattern = glob_name(prefixes)
    return prefixes if pattern.startswith("{") else (pattern,)


def _differences(plan: Plan, stored: list[int]) -> list[str]:
    kept = sorted(
        {
            n
            for b in plan.blocks.values()
            for n, p in b.params.items()
            if stored and not any(_sharded(p, a) for a in stored)
        }
    )
    some = [
        n
        for b in plan.blocks.values()
        for n, p in b.params.items()
        if any(_sharded(p, a) for a in stored) and not p.gathered
    ]
    found = []
    if kept:
        shown = ", ".join(kept[:3]) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")
        found.append(f"{shown}: whole in the plan, sharded here with the rest of their unit; less memory, more traffic")
    if some:
        found.append(
            "weights that the plan gathers once a step (ZeRO-1, ZeRO-2) are gathered here in every micro-batch"
        )
    found += by_hand(plan)
    if any(b.kept for b in plan.blocks.values()):
        found.append("some results are kept in the plan, and none here: less memory, more compute")
    return found


def _remarks(found: Sharding, use: str) -> tuple[str, ...]:
    axes = f"{found.shard} shards" + (f", {found.replicate} times" if found.replicate > 1 else "")
    return (
        use,
        f"every weight is stored in {axes}; each rank trains on its own part of the batch",
        *(f"differs from the plan: {d}" for d in found.differences),
    )


def fsdp2_text(plan: Plan) -> Text:
    """A Python module with `shard(model)`. Raises InputError for a plan that shards more than the batch."""
    found, load = sharding(plan), plan.workload
    use = "Import `shard` from FILE and call shard(model) on the whole model, equal on every rank, before the optimizer is made"
    remarks = _remarks(found, use)
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
        f"REPLICATE, SHARD = {found.replicate}, {found.shard}",
        "UNITS = {  # pattern of modules -> whether gathered weights are freed after forward, and gathered again for backward",
        *(f'    "{pattern}": {again},' for pattern, again in found.units.items()),
        "}",
        f"DTYPE, REDUCE = torch.{load['dtype']}, torch.{load.get('gradient_dtype', 'float32')}",
    ]
    return "\n".join(head) + "\n\n\n" + inspect.getsource(template.shard), remarks, None


def accelerate_text(plan: Plan) -> Text:
    """A file for `accelerate launch --config_file`. Raises InputError for a plan that shards more than the batch."""
    found, nodes = sharding(plan), max(1, plan.mesh.num_devices // 8)
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(str(plan.workload["dtype"]), "'no'")
    free = "true" if not found.units or any(found.units.values()) else "false"
    wraps = [f"  fsdp_transformer_layer_cls_to_wrap: {','.join(found.classes)}"] if found.classes else []
    hybrid = (
        [
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {found.replicate}",
            f"  parallelism_config_dp_shard_size: {found.shard}",
        ]
        if found.replicate > 1
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
    return "\n".join(lines), _remarks(found, "accelerate launch --config_file FILE train.py, by accelerate 1.15"), None
