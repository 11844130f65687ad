"""The single changes of a stated run that help most: of its layout, micro-batch, recomputation or compilation. Each is priced.

If possible, a change keeps the samples of a step: a step has fewer micro-batches if they are larger, and with more tensor-parallel
ranks each data-parallel rank has more samples. If that is not possible, tokens per second are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from planner_core.core import Plan, PlannerError
from planner_core.planning.methods import CP_TYPES, Layout
from planner_core.planning.pricing.price import Pricer
from planner_core.planning.pricing.statement import Statement

HELPS = 0.01
"""A change that gains less than this share of the step is not reported."""
MOST = 5
PARTS = 8
"""Into how many parts a suggested loss is cut."""
FASTER_ATTENTION = ("cudnn", "flash3")
LONG = 16_384
"""Tokens of a sample from which context parallelism is tried where there is none."""
RECOMPUTATIONS = {
    "none": "no recomputation",
    "keep-matmuls": "recomputation of all but matmuls and attention",
    "selective": "selective recomputation: all but attention and every second matmul",
    "keep-attention": "recomputation of all but attention",
    "full": "full recomputation of every block",
}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change as text, the run with it, and the plan of that run."""

    change: str
    stated: Statement
    plan: Plan
    tokens_per_s_per_gpu: float


def suggestions(pricer: Pricer, stated: Statement, plan: Plan) -> list[Suggestion]:
    """The changes that help, the best first: runs that fit and are faster; if the stated run does not fit, all runs that fit."""
    now = pricer.speed(plan, stated).tokens_per_s_per_gpu
    found = []
    kernels = {rate.kernel for rate in pricer.cluster.gpu.attention.rates}
    for change, other in changes(stated, pricer.cluster.levels[0].size, kernels):
        pricer.say(change)
        try:
            made = pricer.plan(other)
        except PlannerError:
            continue
        if made is None or not made.fits:
            continue
        speed = pricer.speed(made, other).tokens_per_s_per_gpu
        if not plan.fits or speed > now * (1 + HELPS):
            found.append(Suggestion(change, other, made, speed))
    return sorted(found, key=lambda s: -s.tokens_per_s_per_gpu)[:MOST]


def changes(stated: Statement, node: int, kernels: Collection[str]) -> Iterator[tuple[str, Statement]]:
    """Every single change that is tried, with its text. `node` is the number of GPUs of a node; `kernels` are those of attention that run
    on the GPU."""
    yield from _micro_batches(stated)
    for kind, words in RECOMPUTATIONS.items():
        if stated.recompute != kind:
            yield words, stated.but(recompute=kind)
    yield from _states(stated, node)
    if not stated.offload:
        yield "the optimizer's moments in the host's memory", stated.but(offload=True)
    yield from _tensor(stated)
    yield from _context(stated, node)
    if not stated.compiled:
        yield "torch.compile", stated.but(compiled=True)
    yield from _software(stated, kernels)
    if stated.rank_by_rank:
        yield "updated weights in buckets, as Megatron-LM and DeepSpeed send them", stated.but(rank_by_rank=False)


def _context(stated: Statement, node: int) -> Iterator[tuple[str, Statement]]:
    """Another kind of context parallelism; or context ranks within a node in place of data-parallel ranks, where samples are long. The
    samples of a step stay the same."""
    now = stated.layout
    for kind in CP_TYPES if now.cp > 1 else ():
        if kind != now.cp_type:
            yield f"cp_type={kind}", stated.but(layout=replace(now, cp_type=kind))
    if now.cp > 1 or now.ep > 1 or (stated.seq or 0) < LONG:
        return
    wide = "fsdp" if now.fsdp > 1 else "dp"
    ranks, cp = getattr(now, wide), 2
    while ranks % cp == 0 and cp * now.tp <= node:
        other = replace(now, cp=cp, **{wide: ranks // cp})
        other = replace(other, zero=3) if wide == "fsdp" and other.data == 1 else other
        yield f"cp={cp} ({other})", stated.but(layout=other, accumulate=cp * stated.accumulate)
        cp *= 2


def _software(stated: Statement, kernels: Collection[str]) -> Iterator[tuple[str, Statement]]:
    """Another loss, dtype of gradients, or attention kernel."""
    if stated.loss in (None, "eager"):
        yield "--loss fused: a kernel that makes no float32 logits", stated.but(loss="fused")
        yield (
            f"--loss chunked:{PARTS}: head and loss in {PARTS} parts of the tokens",
            stated.but(loss=f"chunked:{PARTS}"),
        )
    if stated.gradients is None and stated.precision == "mixed":
        yield "--gradients bfloat16: gradients kept and summed in bfloat16", stated.but(gradients="bfloat16")
    for kernel in FASTER_ATTENTION:
        if kernel in kernels and stated.attention != kernel:
            yield f"--attention {kernel}", stated.but(attention=kernel)


def _micro_batches(stated: Statement) -> Iterator[tuple[str, Statement]]:
    micro, times = stated.micro_batch, stated.accumulate
    if times % 2 == 0:
        yield f"micro-batch {2 * micro}, {times // 2} of them", stated.but(micro_batch=2 * micro, accumulate=times // 2)
    else:
        yield f"micro-batch {2 * micro}, which doubles the samples of a step", stated.but(micro_batch=2 * micro)
    if micro % 2 == 0:
        yield f"micro-batch {micro // 2}, {2 * times} of them", stated.but(micro_batch=micro // 2, accumulate=2 * times)


def _states(stated: Statement, node: int) -> Iterator[tuple[str, Statement]]:
    """Other ways to store weights and optimizer states over the ranks that shard the batch."""
    now, ranks = stated.layout, stated.layout.data
    ways = [replace(now, dp=ranks, fsdp=1, zero=zero) for zero in (0, 1, 2)] + [replace(now, dp=1, fsdp=ranks, zero=0)]
    inside = max(1, node // (now.tp * now.cp))
    if ranks > inside > 1 and ranks % inside == 0:
        ways.append(replace(now, dp=ranks // inside, fsdp=inside, zero=0))
    for other in ways if ranks > 1 else []:
        if other != now:
            yield _named(other), stated.but(layout=other)


def _named(layout: Layout) -> str:
    if layout.fsdp == 1:
        kind = f"ZeRO-{layout.zero}" if layout.zero else "whole states on every rank"
    else:
        kind = "HSDP, sharded inside a node" if layout.dp > 1 else "FSDP over all ranks"
    return f"{kind} ({layout})"


def _tensor(stated: Statement) -> Iterator[tuple[str, Statement]]:
    """Sequence parallelism, and half or twice the tensor-parallel degree. The samples of a step stay the same."""
    now = stated.layout
    if now.tp > 1 and not now.sp:
        yield "sequence parallelism", stated.but(layout=replace(now, sp=True))
    wide = "fsdp" if now.fsdp > 1 else "dp"
    if getattr(now, wide) % 2 == 0:
        other = replace(now, tp=2 * now.tp, sp=True, **{wide: getattr(now, wide) // 2})
        yield f"tp={other.tp} ({other})", stated.but(layout=other, micro_batch=2 * stated.micro_batch)
    if now.tp % 2 == 0 and stated.micro_batch % 2 == 0:
        other = replace(now, tp=now.tp // 2, sp=now.sp and now.tp > 2, **{wide: 2 * getattr(now, wide)})
        yield f"tp={other.tp} ({other})", stated.but(layout=other, micro_batch=stated.micro_batch // 2)
