"""A plan in the words of the tools that run it: FSDP, tensor parallel, micro-batches, recomputation. Pure.

FSDP over 8, tensor parallel 2 with sequence parallelism, 1 micro-batch, no recomputation
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from explorer.text import units, words
from planner_core.core import Partial, Plan, Shard
from planner_core.cost import CONTEXT, DATA, EXPERT, IDLE, SHARD, TENSOR, axis_roles, weight_roles, zero_stage
from planner_core.planning.methods import Layout

RECOMPUTED = {
    "none": "no recomputation",
    "keep-matmuls": "recomputation of all but matmuls and attention",
    "selective": "selective recomputation",
    "keep-attention": "recomputation of all but attention",
    "full": "full recomputation",
}


def describe_plan(plan: Plan) -> str:
    """Say what to run, in one line."""
    return ", ".join([*_axes(plan), describe_work(plan)])


MAX_NAME_LENGTH = 36
"""Letters of a name in a table."""


def layout_name(plan: Plan) -> str:
    """Name the layout in one short line: `FSDP 8 × TP 8`.

    Exceptions are named where there is room, else the name ends in "mixed".
    """
    parts_with_exceptions = [part.partition(" with ") for part in _axes(plan)]
    parts = [
        _degree_name(head) + " SP" * tail.startswith("sequence parallelism") for head, _, tail in parts_with_exceptions
    ]
    exceptions = [tail for _, _, tail in parts_with_exceptions if tail and tail != "sequence parallelism"]
    exceptions = [t.removeprefix("sequence parallelism").removeprefix(" with ").removeprefix(", ") for t in exceptions]
    name = " × ".join(parts)
    full_name = f"{name}, {', '.join(filter(None, exceptions))}"
    if not any(exceptions):
        return name
    return full_name if len(full_name) <= MAX_NAME_LENGTH else f"{name}, mixed"


DEGREES = (
    ("pipeline parallel ", "PP "),
    ("data parallel over ", "DP "),
    ("FSDP over ", "FSDP "),
    ("tensor parallel ", "TP "),
    ("context parallel ", "CP "),
    ("expert parallel over ", "EP "),
    ("ZeRO-1 over ", "ZeRO-1 "),
    ("ZeRO-2 over ", "ZeRO-2 "),
    ("the same work on ", "same work on "),
)


def _degree_name(words_: str) -> str:
    for long, brief in DEGREES:
        if words_.startswith(long):
            return brief + words_.removeprefix(long).partition(" ")[0]
    return words_


def layout_line(layout: Layout) -> str:
    """Write a stated layout as teams do: `PP 2 × FSDP 8 × TP 8, SP`."""
    data = f"ZeRO-{layout.zero}" if layout.zero in (1, 2) else "DP"
    degrees = [("PP", layout.pp), (data, layout.dp), ("FSDP", layout.fsdp), ("CP", layout.cp), ("TP", layout.tp)]
    parts = [" × ".join(f"{word} {n}" for word, n in degrees if n > 1) or "DP 1"]
    parts += [f"EP {layout.ep}"] if layout.ep > 1 else []
    parts += ["SP"] if layout.sp else []
    parts += [layout.cp_type] if layout.cp > 1 and layout.cp_type != "ring" else []
    parts += [layout.run_schedule + f" {layout.vp}" * (layout.vp > 1)] if layout.schedule or layout.vp > 1 else []
    parts += [f"order={layout.order}"] if layout.order != Layout().order else []
    parts += [f"copies={'-'.join(map(str, layout.copies))}"] if layout.copies else []
    return ", ".join(parts)


def describe_extra_work(plan: Plan) -> str:
    """Say what a step does in addition to one plain pass: `4 micro-batches, full recomputation`; empty if nothing."""
    parts = [p for p in describe_work(plan).split(", ") if p not in ("1 micro-batch", RECOMPUTED["none"])]
    mixed = sum("recomputation" in p for p in parts)
    if mixed > 1:
        parts = [p for p in parts if "recomputation" not in p] + ["mixed recomputation"]
    return "; ".join(filter(None, (", ".join(parts), describe_bubble(plan))))


def describe_bubble(plan: Plan) -> str:
    """Write the share of a step in which a rank of the pipeline waits: `bubble 7 %`; empty where there is one stage."""
    cost = plan.cost.pipeline
    return f"bubble {units.percent(cost.bubble_s / plan.cost.step_time_s)}" if cost else ""


def describe_work(plan: Plan) -> str:
    """Say what a step does: micro-batches, recomputation, products in chunks, and where the moments are."""
    parts = [f"products in {plan.chunks} chunks"] if plan.chunks > 1 else []
    parts += ["moments in the host’s memory"] if plan.workload.get("offload") else []
    return ", ".join([*schedule_name(plan), _micro_batches(plan), _recomputation(plan), *parts])


ORDERS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved",
    "zb": "zero bubble",
    "zbv": "zero bubble in a V",
}


def schedule_name(plan: Plan) -> list[str]:
    """Name the order in which pipeline stages run, with the stages of a rank: `interleaved 2`; empty where there is one stage."""
    cut = plan.pipeline
    return [ORDERS[cut.schedule] + (f" {cut.virtual}" if cut.virtual > 1 else "")] if cut else []


def describe_layout(plan: Plan) -> str:
    """Say what the GPUs are for, in one line: the plan without what a step does."""
    return ", ".join(_axes(plan))


def _axes(plan: Plan) -> list[str]:
    """Describe the mesh axes of each kind together; first those that share the samples, then those that share each sample."""
    roles = weight_roles(plan)
    context, expert, idle = (
        [a for a, role in enumerate(axis_roles(plan)) if role == kind] for kind in (CONTEXT, EXPERT, IDLE)
    )
    sizes = {
        kind: math.prod(
            n for a, n in enumerate(plan.mesh.axis_sizes) if roles[a] == kind and a not in (*idle, *context)
        )
        for kind in (DATA, SHARD, TENSOR)
    }
    descriptions = []
    if sizes[DATA] > 1:
        stage = zero_stage(plan)
        descriptions.append(f"{f'ZeRO-{stage}' if stage in (1, 2) else 'data parallel'} over {sizes[DATA]}")
    if sizes[SHARD] > 1:
        descriptions.append(f"FSDP over {sizes[SHARD]}")
    if sizes[TENSOR] > 1:
        split = any(sequence_split(plan, axis) for axis, role in enumerate(roles) if role == TENSOR)
        descriptions.append(f"tensor parallel {sizes[TENSOR]}{' with sequence parallelism' * split}")
    if context:
        ranks = math.prod(plan.mesh.axis_sizes[axis] for axis in context)
        gathered = all(roles[axis] == SHARD for axis in context)
        descriptions.append(f"context parallel {ranks}{' (weights sharded over the same GPUs)' * gathered}")
    if expert:
        ranks = math.prod(plan.mesh.axis_sizes[axis] for axis in expert)
        descriptions.append(f"expert parallel over {ranks} of the same GPUs")
    # said even though no tool has a word for it: otherwise 2 × TP 8 of 16 GPUs would read as a plan of 8
    repeated = math.prod(plan.mesh.axis_sizes[axis] for axis in idle)
    if repeated > 1:
        descriptions.append(f"the same work on {repeated} GPUs")
    descriptions = descriptions or ([] if plan.pipeline else ["one GPU"])
    exceptions = {
        axis: _exceptions(plan, axis, role, sizes[role], left_out=("experts",) if axis in expert else ())
        for axis, role in enumerate(roles)
        if axis not in idle
    }
    merged = _merge_exceptions({axis: CONTEXT if axis in context else roles[axis] for axis in exceptions}, exceptions)
    descriptions = (
        [*descriptions[:-1], f"{descriptions[-1]} with {', '.join(merged)}"]
        if merged and descriptions
        else descriptions
    )
    return [f"pipeline parallel {plan.pipeline.ranks}", *descriptions] if plan.pipeline else descriptions


AXIS_NAMES = {DATA: "data", SHARD: "FSDP", TENSOR: "tensor", CONTEXT: "context"}
"""The name of an axis of each kind."""


def _merge_exceptions(kinds: Mapping[int, str], exceptions: Mapping[int, list[str]]) -> list[str]:
    """Merge exceptions that all axes share; where axes differ, name the axis of each."""
    nonempty = {axis: texts for axis, texts in exceptions.items() if texts}
    if len({tuple(texts) for texts in nonempty.values()}) <= 1 or len({kinds[axis] for axis in nonempty}) < len(
        nonempty
    ):
        return list(dict.fromkeys(text for texts in nonempty.values() for text in texts))
    return [f"{text} on the {AXIS_NAMES[kinds[axis]]} axis" for axis, texts in nonempty.items() for text in texts]


USUAL_PLACEMENT = {DATA: "whole", SHARD: "gathered", TENSOR: "split"}
"""What most weights do on an axis of each kind."""
EXCEPTION_PHRASES = {"split": "{} split{}", "gathered": "{} gathered at use{}", "whole": "{} whole{}"}


def _exceptions(plan: Plan, axis: int, role: str, size: int, left_out: tuple[str, ...]) -> list[str]:
    """Name the weights that are placed otherwise than most on one of the axes that make up `size` ranks, without `left_out`."""
    n = plan.mesh.axis_sizes[axis]
    over = f" over {n}" if n != size else ""
    by_placement = {
        placement: words.name_weights(plan, axis, placement, brief=True)
        for placement in EXCEPTION_PHRASES
        if n > 1 and placement != USUAL_PLACEMENT[role]
    }
    by_placement = {
        placement: [name for name in names if name not in left_out] for placement, names in by_placement.items()
    }
    return [
        EXCEPTION_PHRASES[placement].format(words.join_words(names_of), over)
        for placement, names_of in by_placement.items()
        if names_of
    ]


def sequence_split(plan: Plan, axis: int) -> bool:
    """Tell whether most sums over an axis end split by tokens (dim 1), as in Megatron-LM's sequence parallelism."""
    ends: Counter[bool] = Counter()
    for block in plan.blocks.values():
        for site in block.sites.values():
            steps = [step for edge in site.outputs for step in edge.forward if step.axis == axis]
            ends.update(step.dst == Shard(1) for step in steps if isinstance(step.src, Partial))
    return ends[True] > ends[False]


def _micro_batches(plan: Plan) -> str:
    count = int(plan.workload.get("accumulate", 1))
    return f"{count} micro-batch{'es' * (count != 1)}"


def _recomputation(plan: Plan) -> str:
    """Say what runs again in backward, over the copies of repeated blocks; of a model without any, over the whole."""
    blocks = [b for label, b in plan.blocks.items() if label] or list(plan.blocks.values())
    copies: Counter[str] = Counter()
    for block in blocks:
        copies[block.recompute] += len(block.prefixes)
    if len(copies) == 1:
        return _recomputed(next(iter(copies)))
    total = copies.total()
    return ", ".join(f"{_recomputed(kind)} in {n} of {total} blocks" for kind, n in copies.items() if kind != "none")


def _recomputed(kind: str) -> str:
    return RECOMPUTED[kind]
