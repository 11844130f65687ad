"""Export plans that shard only the batch and store weights whole or sharded: FSDP2 (and HSDP) code."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from planner_core.core import BlockLabel, ParamPlan, Plan, Sentence, Shard, glob_name, list_names, named
from planner_core.cost import block_of, micro_batch, zero_stage
from planner_core.exporters.configs.common import gathering_remarks, gradient_dtype, stated_run, stated_tokens
from planner_core.exporters.remarks import FILE, PRICE_FILE, Remark, RemarkKind, name_file
from planner_core.exporters.source import template_text
from planner_core.models import load_plan_graph
from planner_core.planning.methods import CannotHold, Layout, recompute_by_hand

NEGLIGIBLE = 1e-3
"""Weights of a smaller share of a model's elements, such as its norms, change neither memory nor traffic by a digit that is shown."""

MAX_NAMED_WEIGHTS = 3
"""A remark names so many weights."""
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


def find_batch_sharding(plan: Plan, stage: int = 3) -> BatchSharding:
    """Return the sharding of a plan. `stage`: the ZeRO stage of the form, for the differences from the plan. Raises InputError if the plan
    shards more than the batch, or over axes that FSDP2's mesh cannot have."""
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
    shard = math.prod(sizes[axis] for axis in stored)
    units = {
        pattern: any(p.gathered for p in b.params.values())
        for label, b in plan.blocks.items()
        if label
        for pattern in _unit_patterns(b.prefixes)
    }
    classes = tuple(dict.fromkeys(BlockLabel.parse(label).block for label in plan.blocks if label))
    return BatchSharding(
        plan.mesh.num_devices // shard, shard, units, classes, tuple(_list_differences(plan, stored, stage))
    )


def splits_batch_only(plan: Plan) -> bool:
    """Return whether a plan splits the batch and no other work."""
    active = [a for a, n in enumerate(plan.mesh.axis_sizes) if n > 1]
    params = [p for b in plan.blocks.values() for p in b.params.values()]
    return all(a in plan.data_axes and all(_is_whole(p, a) for p in params) for a in active)


def _is_whole(p: ParamPlan, axis: int) -> bool:
    """Return whether a weight is used whole on an axis."""
    return axis in p.gathered or not isinstance(p.working[axis], Shard)


def _is_sharded(p: ParamPlan, axis: int) -> bool:
    return isinstance(p.stored[axis], Shard)


def _unit_patterns(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    pattern = glob_name(prefixes)
    # Braces list copies that share no pattern, and fnmatch, which the written code uses, knows no braces.
    return prefixes if pattern.startswith("{") else (pattern,)


def _list_differences(plan: Plan, stored: list[int], stage: int) -> list[str]:
    whole = {
        (label, n): p
        for label, b in plan.blocks.items()
        for n, p in b.params.items()
        if stored and not any(_is_sharded(p, a) for a in stored)
    }
    differences = []
    if whole:
        parts = {1: "optimizer states are ", 2: "gradients and optimizer states are "}.get(stage, "")
        names = list_names(sorted({n for _, n in whole}), MAX_NAMED_WEIGHTS)
        consequence = "; less memory, more traffic" if _share_of_weights(plan, whole) >= NEGLIGIBLE else ""
        differences.append(
            f"{names}: {parts}whole in the plan, sharded here with those of the other weights{consequence}"
        )
    if any(b.kept for b in plan.blocks.values()):
        differences.append("some results are kept in the plan, and none here: less memory, more compute")
    return differences


def _share_of_weights(plan: Plan, names: Collection[tuple[BlockLabel | str, str]]) -> float:
    """Return the share of a model's elements that these weights have, each given by the label of its block and its name."""
    graph, some, total = load_plan_graph(plan), 0, 0
    for label, block in plan.blocks.items():
        for value in block_of(graph, label).values:
            if value.kind == "parameter" and value.name in block.params:
                elements = math.prod(value.meta.shape) * len(block.prefixes)
                total += elements
                some += elements * ((label, value.name) in names)
    return some / max(1, total)


def list_fsdp_remarks(plan: Plan, sharding: BatchSharding, use: str, differences: Sequence[str]) -> tuple[str, ...]:
    """List how to use a form of FSDP2, and what it does otherwise than the plan."""
    axes = f"{sharding.shard} shards" + (f", {sharding.replicate} times" if sharding.replicate > 1 else "")
    once = gathering_remarks(plan) if zero_stage(plan) in (1, 2) else []
    return (
        use,
        f"every weight is stored in {axes}; each rank trains on its own part of the batch",
        *(f"differs from the plan: {d}" for d in (*sharding.differences, *once, *differences)),
    )


def _layout_remark(plan: Plan, sharding: BatchSharding) -> tuple[str, ...]:
    """Return the layout to state to `price`, which reads no module of Python; empty where no layout says what the units do."""
    frees = set(sharding.units.values())
    # A layout states one stage for all units, and ZeRO-2 of ranks without replicas.
    if len(frees) > 1 or (frees == {False} and sharding.replicate > 1):
        return ()
    # Weights that stay gathered between forward and backward, with sharded gradients and states, are ZeRO-2.
    layout = Layout(dp=sharding.shard, zero=2) if frees == {False} else Layout(sharding.replicate, sharding.shard)
    stated = {"layout": str(layout), "micro_batch": micro_batch(plan), "accumulate": plan.accumulate}
    stated |= stated_tokens(plan) | stated_run(plan)
    stated |= {"recompute": "full"} if recompute_by_hand(plan) else {}
    return (
        Remark(
            PRICE_FILE,
            " reads no such file; state it as ",
            Sentence.from_list(" ", (named(name, value) for name, value in stated.items())),
            kind=RemarkKind.READ_BACK,
        ),
    )


def write_fsdp2(plan: Plan) -> WrittenText:
    """Return a Python module with `shard(model)`. Raises InputError for a plan that shards more than the batch."""
    sharding, load = find_batch_sharding(plan), plan.workload
    use = Sentence(
        "Import `shard` from ",
        FILE,
        " and call shard(model) on the whole model, equal on every rank, before the optimizer is made",
    )
    remarks = list_fsdp_remarks(plan, sharding, use, recompute_by_hand(plan))
    quoted = json.dumps(plan.name, ensure_ascii=False)
    head = [
        f'"""FSDP2 of {plan.model.name} over {plan.mesh.num_devices} devices: the plan {quoted}, written by Shardscope.',
        "",
        *(f"- {name_file(r, 'this file')}" for r in remarks),
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
        f"MODEL = {json.dumps(plan.model.name)}",
        f"REPLICATE, SHARD = {sharding.replicate}, {sharding.shard}",
        "UNITS = {  # pattern of modules -> whether gathered weights are freed after forward, and gathered again for backward",
        *(f'    "{pattern}": {frees},' for pattern, frees in sharding.units.items()),
        "}",
        f"DTYPE, REDUCE = torch.{load.dtype}, torch.{gradient_dtype(plan)}",
    ]
    text = "\n".join(head) + "\n\n\n" + template_text("fsdp_template", "shard")
    return text, (*remarks, *_layout_remark(plan, sharding)), None
