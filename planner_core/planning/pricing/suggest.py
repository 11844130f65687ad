"""Suggest single changes of a stated run (layout, micro-batch, recomputation, software). Each suggestion is priced.

A change keeps the samples of a step where it can: larger micro-batches are fewer, and with more tensor-parallel ranks each data-parallel
rank has more samples. Since it cannot always, suggestions are ranked by tokens per second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from planner_core.core import Cluster, Plan, PlannerError, Sentence, named
from planner_core.planning.methods import CP_TYPES, TOOLS, Layout, list_schedules
from planner_core.planning.pricing.price import Pricer
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.stages import may_gain_much

MIN_GAIN = 0.01
"""The least gain in tokens per second of a suggestion, as a share."""
MAX_SUGGESTIONS = 5
LOSS_CHUNKS = 8
"""The number of chunks of a suggested loss."""
FASTER_ATTENTION = ("cudnn", "flash3")
MIN_CONTEXT_TOKENS = 16_384
"""The least tokens of a sample for which context parallelism is suggested."""
RECOMPUTATIONS = {
    "none": "no recomputation",
    "keep-matmuls": "recomputation of all but matmuls and attention",
    "selective": "selective recomputation: all but attention and every second matmul",
    "keep-attention": "recomputation of all but attention",
    "full": "full recomputation of every block",
}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change in words, the changed run, and its plan."""

    change: str
    stated: Statement
    plan: Plan
    tokens_per_s_per_gpu: float


def find_suggestions(pricer: Pricer, stated: Statement, plan: Plan) -> list[Suggestion]:
    """Return the best changes first: runs that fit and are faster, or, if the stated run does not fit, all runs that fit."""
    stated_speed = pricer.speed(plan, stated).tokens_per_s_per_gpu
    helpful = []
    # A kernel without a measured rate on this GPU has no price that could be compared.
    kernels = {rate.kernel for rate in pricer.cluster.gpu.attention.rates}
    changes = list_changes(stated, pricer.cluster.near_gpus, kernels)
    staged = _stage_changes(stated, pricer.cluster) if may_gain_much(plan) else ()
    for change, other in (*changes, *staged):
        pricer.report_progress(change)
        try:
            changed = pricer.plan(other)
        # Such as a micro-batch that does not divide: this change is none for the run, and the others may be.
        except PlannerError:
            continue
        if changed is None or not changed.fits:
            continue
        speed = pricer.speed(changed, other).tokens_per_s_per_gpu
        # If the stated run does not fit, its speed is of a run that nobody can start: then any that fits helps.
        if not plan.fits or speed > stated_speed * (1 + MIN_GAIN):
            helpful.append(Suggestion(change, other, changed, speed))
    return sorted(helpful, key=lambda s: -s.tokens_per_s_per_gpu)[:MAX_SUGGESTIONS]


def list_changes(stated: Statement, node: int, kernels: Collection[str]) -> Iterator[tuple[str, Statement]]:
    """Yield every single change to try, with its description. `node`: GPUs of a node. `kernels`: attention kernels that run on the GPU."""
    yield from _micro_batch_changes(stated)
    # A stack that is a tool's is of a run by that tool, which can be told few of them.
    tool = TOOLS.get(str(stated.stack))
    allowed = tool.recomputations if tool else RECOMPUTATIONS
    for recompute, description in RECOMPUTATIONS.items():
        if stated.recompute != recompute and recompute in allowed:
            yield description, stated.but(recompute=recompute)
    yield from _state_changes(stated, node)
    if not stated.offload:
        yield "the optimizer's moments in the host's memory", stated.but(offload=True)
    yield from _tensor_changes(stated)
    yield from _context_changes(stated, node)
    if not stated.compiled:
        yield "torch.compile", stated.but(compiled=True)
    yield from _software_changes(stated, kernels)
    if stated.rank_by_rank:
        yield "updated weights in buckets, as Megatron-LM and DeepSpeed send them", stated.but(rank_by_rank=False)


def other_cp_types(stated: Statement) -> Iterator[tuple[str, Statement]]:
    """Yield the run with each other kind of context parallelism, with its description."""
    layout = stated.layout
    for kind in CP_TYPES if layout.cp > 1 else ():
        if kind != layout.cp_type:
            yield f"cp_type={kind}", stated.but(layout=replace(layout, cp_type=kind))


def _context_changes(stated: Statement, node: int) -> Iterator[tuple[str, Statement]]:
    """Another kind of context parallelism; for long samples, context ranks within a node in place of data-parallel ranks."""
    layout = stated.layout
    yield from other_cp_types(stated)
    if layout.cp > 1 or layout.ep > 1 or (stated.seq or 0) < MIN_CONTEXT_TOKENS:
        return
    wide = "fsdp" if layout.fsdp > 1 else "dp"
    ranks, cp = getattr(layout, wide), 2
    while ranks % cp == 0 and cp * layout.tp <= node:
        other = replace(layout, cp=cp, **{wide: ranks // cp})
        # With the last data-parallel rank gone weights would be whole: `zero=3` shards them over the context ranks.
        other = replace(other, zero=3) if wide == "fsdp" and other.data == 1 else other
        # Context ranks take the place of data-parallel ones, so `cp` times as many micro-batches keep the samples of a step.
        yield f"cp={cp} ({other})", stated.but(layout=other, accumulate=cp * stated.accumulate)
        cp *= 2


def _software_changes(stated: Statement, kernels: Collection[str]) -> Iterator[tuple[str, Statement]]:
    """Another loss, dtype of gradients or attention kernel."""
    if stated.loss in (None, "eager"):
        yield Sentence(named("loss", "fused"), ": a kernel that makes no float32 logits"), stated.but(loss="fused")
        in_chunks = f"chunked:{LOSS_CHUNKS}"
        yield (
            Sentence(named("loss", in_chunks), f": head and loss in {LOSS_CHUNKS} parts of the tokens"),
            stated.but(loss=in_chunks),
        )
    # In pure precision gradients are summed in the dtype that computes already.
    if stated.gradients is None and stated.precision == "mixed":
        changed = stated.but(gradients="bfloat16")
        yield Sentence(named("gradients", "bfloat16"), ": gradients summed in bfloat16"), changed
    for kernel in FASTER_ATTENTION:
        if kernel in kernels and stated.attention != kernel:
            yield Sentence(named("attention", kernel)), stated.but(attention=kernel)


def _micro_batch_changes(stated: Statement) -> Iterator[tuple[str, Statement]]:
    """Larger micro-batches of the same step, as far as each is twice the one before, and one of half the size."""
    micro, count = stated.micro_batch, stated.accumulate
    # The best is not always next to the stated one. Example: T5-large on 4 x 2 x 2 stages takes 2.9 s with one sample at a time, 1.5 s
    # with 2 and 0.45 s with 8, where short kernels no longer wait for the host.
    times = 2
    while count % times == 0:
        larger = stated.but(micro_batch=times * micro, accumulate=count // times)
        yield f"micro-batch {larger.micro_batch}, {larger.accumulate} of them", larger
        times *= 2
    if count % 2:
        yield f"micro-batch {2 * micro}, which doubles the samples of a step", stated.but(micro_batch=2 * micro)
    if micro % 2 == 0:
        yield f"micro-batch {micro // 2}, {2 * count} of them", stated.but(micro_batch=micro // 2, accumulate=2 * count)


def _state_changes(stated: Statement, node: int) -> Iterator[tuple[str, Statement]]:
    """Another sharding of weights and optimizer states over the data-parallel ranks."""
    layout, ranks = stated.layout, stated.layout.data
    layouts = [replace(layout, dp=ranks, fsdp=1, zero=zero) for zero in (0, 1, 2)] + [
        replace(layout, dp=1, fsdp=ranks, zero=0)
    ]
    # HSDP: as many shards as fit into a node beside tensor and context ranks, so that gathers stay on its links.
    inside = max(1, node // (layout.tp * layout.cp))
    if ranks > inside > 1 and ranks % inside == 0:
        layouts.append(replace(layout, dp=ranks // inside, fsdp=inside, zero=0))
    for other in layouts if ranks > 1 else []:
        if other != layout:
            yield _describe_states(other), stated.but(layout=other)


def _describe_states(layout: Layout) -> str:
    if layout.fsdp == 1:
        name = f"ZeRO-{layout.zero}" if layout.zero else "whole states on every rank"
    else:
        name = "HSDP, sharded inside a node" if layout.dp > 1 else "FSDP over all ranks"
    return f"{name} ({layout})"


def _stage_changes(stated: Statement, cluster: Cluster) -> Iterator[tuple[str, Statement]]:
    """As many pipeline stages as nodes, so that the links between nodes carry activations alone: with the stated tensor ranks or with those
    of a node, and with one or two stages a rank."""
    layout, node = stated.layout, cluster.near_gpus
    nodes = cluster.num_gpus // node
    tool = TOOLS.get(str(stated.stack))
    if nodes == 1 or layout.pp > 1 or (tool and not tool.stages):
        return
    for tp in dict.fromkeys((layout.tp, max(1, node // layout.cp))):
        data = layout.num_gpus // (nodes * tp * layout.cp)
        staged = replace(layout, dp=data, fsdp=1, tp=tp, sp=layout.sp or tp > layout.tp, pp=nodes)
        # Degrees that do not divide would leave GPUs without work.
        if data == 0 or staged.num_gpus != layout.num_gpus:
            continue
        # Sharded weights would be gathered in every micro-batch, of which stages have many.
        staged = replace(staged, zero=1 if data * layout.cp > 1 else 0)
        # Fewer data-parallel ranks compute more micro-batches, which keep the samples of a step.
        count, rest = divmod(stated.batch, stated.micro_batch * data)
        for vp in (1, 2) if "interleaved" in list_schedules(stated.stack) else (1,):
            other = replace(staged, vp=vp)
            if rest == 0:
                yield (
                    f"pp={nodes} ({other}), micro-batch {stated.micro_batch}, {count} of them",
                    stated.but(layout=other, accumulate=count),
                )


def _tensor_changes(stated: Statement) -> Iterator[tuple[str, Statement]]:
    """Sequence parallelism, and half or twice the tensor-parallel degree, with the same samples a step."""
    layout = stated.layout
    if layout.tp > 1 and not layout.sp:
        yield "sequence parallelism", stated.but(layout=replace(layout, sp=True))
    wide = "fsdp" if layout.fsdp > 1 else "dp"
    if getattr(layout, wide) % 2 == 0:
        # Half as many data-parallel ranks with micro-batches twice as large have the same samples a step.
        other = replace(layout, tp=2 * layout.tp, sp=True, **{wide: getattr(layout, wide) // 2})
        yield f"tp={other.tp} ({other})", stated.but(layout=other, micro_batch=2 * stated.micro_batch)
    if layout.tp % 2 == 0 and stated.micro_batch % 2 == 0:
        other = replace(layout, tp=layout.tp // 2, sp=layout.sp and layout.tp > 2, **{wide: 2 * getattr(layout, wide)})
        yield f"tp={other.tp} ({other})", stated.but(layout=other, micro_batch=stated.micro_batch // 2)
