"""A plan in the words of the tools that run it: FSDP, tensor parallel, micro-batches, recomputation. Pure.

FSDP over 8, tensor parallel 2 with sequence parallelism, 1 micro-batch, no recomputation
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from explorer.text import units, words
from planner_core.core import Partial, Plan, Shard
from planner_core.cost import CONTEXT, DATA, EXPERT, IDLE, SHARD, TENSOR, axis_roles, weight_roles, zero_stage
from planner_core.cost.communication import VOLUME_RATE, sent_per_gpu
from planner_core.planning.methods import ALL, EXACT, METHODS, Layout
from planner_core.planning.pricing import BUBBLE, split_pipeline_step

RECOMPUTED = {
    "none": "no recomputation",
    "keep-matmuls": "recomputation of all but matmuls and attention",
    "selective": "selective recomputation",
    "keep-attention": "recomputation of all but attention",
    "full": "full recomputation",
}
SMALLEST_GAP = 0.001
"""The share that is written for a smaller gap."""


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What the mesh axes of one kind are for: `FSDP over 8`, in a name `FSDP 8`."""

    words: str
    name: str


def describe_plan(plan: Plan) -> str:
    """Say what to run, in one line."""
    return ", ".join([describe_layout(plan), describe_work(plan)])


MAX_NAME_LENGTH = 36
"""Letters of a name in a table."""


def degrees_name(plan: Plan) -> str:
    """Name what the axes are for, without exceptions: `FSDP 8 × TP 8 SP`."""
    return " × ".join(use.name for use in _axis_uses(plan))


def layout_name(plan: Plan) -> str:
    """Name the layout in one short line: `FSDP 8 × TP 8`.

    Exceptions are named where there is room, else the name ends in "mixed".
    """
    return _full_name(plan) if _has_short_name(plan) else f"{degrees_name(plan)}, mixed"


def _full_name(plan: Plan) -> str:
    return ", ".join((degrees_name(plan), *_exceptions_of_axes(plan)))


def _has_short_name(plan: Plan) -> bool:
    return not _exceptions_of_axes(plan) or len(_full_name(plan)) <= MAX_NAME_LENGTH


def describe_below_name(plan: Plan) -> str:
    """Say what to run, in one line below `layout_name`, which says the layout where it has room for it."""
    return describe_work(plan) if _has_short_name(plan) else describe_plan(plan)


def distinct_names(plans: Mapping[str, Plan]) -> dict[str, str]:
    """Return a name for each plan: its layout, and where others have the same layout what tells it from them.

    `FSDP 8, 2 micro-batches` beside `FSDP 8, 4 micro-batches`; the first of micro-batches, recomputation, exceptions and mesh in which
    plans of one name differ is said first.
    """
    names = {n: layout_name(p) for n, p in plans.items()}
    details: tuple[Callable[[Plan], tuple[str, ...]], ...] = (
        lambda p: (_micro_batches(p),),
        lambda p: (_recomputation_name(p),),
        lambda p: tuple(_exceptions_of_axes(p)),
        lambda p: (words.full_mesh_words(p),),
    )
    # Each detail is asked of the names as they stand, so plans that the first tells apart get no second.
    for describe in details:
        by_name: dict[str, list[str]] = {}
        for n, name in names.items():
            by_name.setdefault(name, []).append(n)
        for name, alike in by_name.items():
            said = {n: describe(plans[n]) for n in alike}
            common = set.intersection(*map(set, said.values()))
            for n in alike:
                names[n] = ", ".join((name, *(part for part in said[n] if part and part not in common)))
    return names


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


@dataclass(frozen=True, slots=True)
class Bound:
    """What a plan's search minimises, by the name of its column in rows for programs, and its least `value` in any plan of the space."""

    column: str
    value: float
    least: float | None
    gap: float | None
    """The share by which the value may be above the least there is; None where no bound is known."""


def bound_of(plan: Plan) -> Bound:
    """Return what a plan's search minimises, in seconds or bytes, with its bound."""
    if METHODS.get(plan.method, EXACT).by_volume:
        # It counts the bytes that a GPU sends as seconds of a `volume_link`.
        column, value, least = "sent_bytes", float(sent_per_gpu(plan)), plan.bound and VOLUME_RATE * plan.bound
    else:
        column = "communication_s" if plan.objective == "communication" else "gpu_time_s"
        value, least = plan.cost.seconds(plan.objective), plan.bound
    # The search adds a ten-millionth of other seconds to tell equal plans apart, so that its bound can be above the value itself.
    least = None if least is None else min(least, value)
    # Nothing is below no traffic, proven or not.
    gap = 0.0 if plan.optimal or not value else value / least - 1 if least else None
    return Bound(column, value, least, gap)


def describe_aim(plan: Plan) -> str:
    """Say what a method made least in its own space, and how far above that its plan may be; empty where it is the step."""
    aim = ALL[plan.method].describe_aim(plan.objective) if plan.method in ALL else None
    if aim is None:
        return ""
    bound, least = bound_of(plan), f"{aim} in its space"
    if plan.optimal or not bound.value:
        return least
    if bound.gap is None:
        return f"not proven to have the {least}"
    return f"not proven: at most {units.percent(max(bound.gap, SMALLEST_GAP))} above the {least}"


def describe_gap(plan: Plan) -> str:
    """Say how far the best plan may be above the bound, in a few words: `at most 0.9 % above the bound`; `proven` where it is closed."""
    if plan.optimal:
        return "proven" if plan.is_step_proven else "its GPU work proven"
    gap = bound_of(plan).gap
    if gap is None or plan.objective != "time":
        return "not proven"
    # A gap that would be written as 0 % is not closed all the same.
    above = f"at most {units.percent(max(gap, SMALLEST_GAP))} above the bound"
    # The bound is of the GPU's part alone, and says little of a step that is mostly a wait for the host.
    return f"its GPU work {above}" if plan.cost.host_wait_s else above


def has_proven_step(plan: Plan) -> bool:
    """Tell whether no plan of its own space that fits has a shorter step; a method that made something else least has no such proof."""
    return plan.fits and plan.is_step_proven and not describe_aim(plan)


def describe_extra_work(plan: Plan, name: str = "") -> str:
    """Say what a step does in addition to one plain pass: `4 micro-batches, full recomputation`; empty if nothing.

    `name`: that of the plan where this stands below it (`distinct_names`), whose details are not said again.
    """
    micro_batches = [_micro_batches(plan)] if _num_micro_batches(plan) != 1 else []
    recomputed = ["mixed recomputation"] if len(_describe_recomputations(plan)) > 1 else [_recomputation_name(plan)]
    recomputed = [] if recomputed == [RECOMPUTED["none"]] else recomputed
    parts = [part for part in (*schedule_name(plan), *micro_batches, *recomputed) if not name.endswith(f", {part}")]
    return "; ".join(filter(None, (", ".join((*parts, *_describe_features(plan))), describe_bubble(plan))))


def describe_bubble(plan: Plan) -> str:
    """Write the share of a step in which the rank that works longest waits for others: `bubble 7 %`; empty where there is one stage."""
    return f"bubble {units.percent(split_pipeline_step(plan)[BUBBLE] / plan.cost.step_time_s)}" if plan.pipeline else ""


def describe_work(plan: Plan) -> str:
    """Say what a step does: micro-batches, recomputation, products in chunks, and where the moments are."""
    return ", ".join(
        [*schedule_name(plan), _micro_batches(plan), *_describe_recomputations(plan), *_describe_features(plan)]
    )


def _describe_features(plan: Plan) -> list[str]:
    chunks = [f"products in {plan.chunks} chunks"] if plan.chunks > 1 else []
    return [*chunks, *(["moments in the host’s memory"] if plan.workload.offload else [])]


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
    line, exceptions = ", ".join(use.words for use in _axis_uses(plan)), _exceptions_of_axes(plan)
    return f"{line} with {', '.join(exceptions)}" if exceptions else line


@dataclass(frozen=True, slots=True)
class _AxisRoles:
    """What the mesh axes are for: the role of the weights on each, the axes of context, of experts and without work of their own, and how
    many ranks share each role."""

    weights: Sequence[str]
    context: list[int]
    expert: list[int]
    idle: list[int]
    ranks: dict[str, int]

    @staticmethod
    def of(plan: Plan) -> _AxisRoles:
        weights = weight_roles(plan)
        context, expert, idle = (
            [a for a, role in enumerate(axis_roles(plan)) if role == kind] for kind in (CONTEXT, EXPERT, IDLE)
        )
        ranks = {
            kind: math.prod(
                n for a, n in enumerate(plan.mesh.axis_sizes) if weights[a] == kind and a not in (*idle, *context)
            )
            for kind in (DATA, SHARD, TENSOR)
        }
        return _AxisRoles(weights, context, expert, idle, ranks)


def _axis_uses(plan: Plan) -> list[AxisUse]:
    """Describe the mesh axes of each kind together; first those that share the samples, then those that share each sample."""
    axes = _AxisRoles.of(plan)
    stages = plan.pipeline.ranks if plan.pipeline else 0
    uses = [AxisUse(f"pipeline parallel {stages}", f"PP {stages}")] if stages else []
    if (ranks := axes.ranks[DATA]) > 1:
        stage = zero_stage(plan)
        use_words, name = (f"ZeRO-{stage}", f"ZeRO-{stage}") if stage in (1, 2) else ("data parallel", "DP")
        uses.append(AxisUse(f"{use_words} over {ranks}", f"{name} {ranks}"))
    if (ranks := axes.ranks[SHARD]) > 1:
        uses.append(AxisUse(f"FSDP over {ranks}", f"FSDP {ranks}"))
    if (ranks := axes.ranks[TENSOR]) > 1:
        split = any(sequence_split(plan, axis) for axis, role in enumerate(axes.weights) if role == TENSOR)
        use_words = f"tensor parallel {ranks}{' with sequence parallelism' * split}"
        uses.append(AxisUse(use_words, f"TP {ranks}{' SP' * split}"))
    if axes.context:
        ranks = math.prod(plan.mesh.axis_sizes[axis] for axis in axes.context)
        gathered = all(axes.weights[axis] == SHARD for axis in axes.context)
        use_words = f"context parallel {ranks}{' (weights sharded over the same GPUs)' * gathered}"
        uses.append(AxisUse(use_words, f"CP {ranks}"))
    if axes.expert:
        ranks = math.prod(plan.mesh.axis_sizes[axis] for axis in axes.expert)
        uses.append(AxisUse(f"expert parallel over {ranks} of the same GPUs", f"EP {ranks}"))
    # said even though no tool has a word for it: otherwise 2 × TP 8 of 16 GPUs would read as a plan of 8
    repeated = math.prod(plan.mesh.axis_sizes[axis] for axis in axes.idle)
    if repeated > 1:
        uses.append(AxisUse(f"idle over {repeated} (all do the same work)", f"idle {repeated}"))
    return uses or [AxisUse("one GPU", "one GPU")]


def _exceptions_of_axes(plan: Plan) -> list[str]:
    """Name the weights that are placed otherwise than most on an axis."""
    axes = _AxisRoles.of(plan)
    exceptions = {
        axis: _describe_exceptions(
            plan, axis, role, axes.ranks[role], left_out=("experts",) if axis in axes.expert else ()
        )
        for axis, role in enumerate(axes.weights)
        if axis not in axes.idle
    }
    kinds = {axis: CONTEXT if axis in axes.context else axes.weights[axis] for axis in exceptions}
    return _merge_exceptions(kinds, exceptions)


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


def _describe_exceptions(plan: Plan, axis: int, role: str, size: int, left_out: tuple[str, ...]) -> list[str]:
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


def _num_micro_batches(plan: Plan) -> int:
    return plan.accumulate


def _micro_batches(plan: Plan) -> str:
    count = _num_micro_batches(plan)
    return f"{count} micro-batch{'es' * (count != 1)}"


def _describe_recomputations(plan: Plan) -> list[str]:
    """Say what runs again in backward."""
    copies = _count_recomputations(plan)
    if len(copies) == 1:
        return [RECOMPUTED[next(iter(copies))]]
    total = copies.total()
    return [f"{RECOMPUTED[kind]} in {n} of {total} blocks" for kind, n in copies.items() if kind != "none"]


def _recomputation_name(plan: Plan) -> str:
    """Say what runs again in backward in a few letters: `recompute 6 of 32 blocks`."""
    copies = _count_recomputations(plan)
    if len(copies) == 1:
        return RECOMPUTED[next(iter(copies))]
    return f"recompute {copies.total() - copies['none']} of {copies.total()} blocks"


def _count_recomputations(plan: Plan) -> Counter[str]:
    """Count the copies of repeated blocks by what they recompute; of a model without any, the whole counts as one."""
    blocks = [b for label, b in plan.blocks.items() if label] or list(plan.blocks.values())
    copies: Counter[str] = Counter()
    for block in blocks:
        copies[block.recompute] += len(block.prefixes)
    return copies
