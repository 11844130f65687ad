"""The value `Request`: what a user asks for; and how planning tells what it does and how long that takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from planner_core.core import (
    DEFAULT_PRECISION,
    OPTIONS,
    ZERO,
    Cluster,
    InputError,
    Note,
    NoteKind,
    Sentence,
    Software,
    Workload,
    check_options,
    named,
    stack_names,
)
from planner_core.models import brings_inputs, default_sizes
from planner_core.planning.methods import METHODS, TOOLS, bounding_tool, find_method
from planner_core.search import OBJECTIVES
from planner_core.search.algebra import MAX_UNIT_POINTS

Progress = Callable[[str], None]
"""A function that gets a sentence about what is being done. It may raise an exception to stop."""
RARE_COLLECTIONS = 100_000, 50, 100
"""Thresholds of Python's garbage collection while planning (`gc.set_threshold`)."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect cycles rarely while entered.

    Planning builds millions of small values that live until its end. Young collections, 700 values apart by default, free few of them and
    take a tenth to a fifth of a request.
    """
    before = gc.get_threshold()
    # A caller that collects more rarely still has its reasons. So requests of several threads, which end in any order, do no harm: the
    # last one leaves either its caller's thresholds or these.
    gc.set_threshold(*map(max, before, RARE_COLLECTIONS))
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True, slots=True)
class Request(Software):
    """What a user asks for. None means the default of the model or of the cluster.

    `accumulate`: the number of micro-batches of a step; None: the search chooses it. `micro_batch`: samples that a data-parallel rank
    computes at once; None: what follows from the rest. `precision`: "mixed" (weights, moments and
    gradients in float32, and gradients reduced in it) or "pure" (all in the dtype that computes). `zero`: the ZeRO stage that
    weights may have instead of stage 0; None: each weight has any stage on each axis. `tool`: only plans that this tool
    can be told, e.g. "megatron". `expert_imbalance`, `chunks` and `offload`: those of `Workload`; what runs the step is that of
    `Software`. `prove`: close the gap between the plan and its
    bound, however long that takes; False: as far as a moment's work does. `lora`: the rank of adapters beside the linear layers of a
    model from a config, all else frozen; `nf4`: the frozen weights of these layers are in 4 bits. `vocab_multiple`: the
    vocabulary of a config is padded to a multiple of this.
    """

    model: str
    cluster: str | Mapping[str, Any] | Cluster = "2x8-h100"
    mesh: str | None = None
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    zero: int | None = None
    recompute: str = "none"
    accumulate: int | None = 1
    micro_batch: int | None = None
    precision: str = DEFAULT_PRECISION
    memory_gb: float | None = None
    layers: int | None = None
    method: str = "exact"
    objective: str = "time"
    layout: str | None = None
    tool: str | None = None
    expert_imbalance: float = 1.0
    chunks: int = 1
    offload: bool = False
    prove: bool = False
    lora: int | None = None
    nf4: bool = False
    vocab_multiple: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", find_method(self.method))  # tables say `TAP` where plan files say `tap`

    @property
    def bounding_tool(self) -> str | None:
        """The request's tool, if its settings bound the plans."""
        return bounding_tool(self.tool)

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """The ZeRO stages that a weight may have in the request's own plans; baselines have those of their tools."""
        return ZERO if self.zero is None else (0, self.zero)

    def with_tool_software(self) -> Request:
        """Return the request with the stack and the dtype of gradients of its tool, where it states none and the tool's are known.

        A tool runs its own kernels and keeps its own buffers. Example: Llama-3-8B under ZeRO-1 on 16 H100 takes 524 ms and 51 GiB on
        torch's kernels, and 441 ms and 74 GiB on Megatron-LM's, which do not fit. Kernels that the request states count as they do
        beside a tool's file."""
        stack = self.tool if self.stack is None and self.tool in stack_names() else self.stack
        tool = TOOLS.get(str(self.tool))
        gradients = tool.gradients if tool and self.gradients is None else self.gradients
        return replace(self, stack=stack, gradients=gradients)

    def check(self) -> None:
        """Raise InputError for the first option whose value is impossible."""
        check_options(self, (f.name for f in fields(self) if f.name in OPTIONS))
        if self.method not in METHODS:
            raise InputError(named("method", self.method), f" is not one of {', '.join(METHODS)}")
        if self.objective not in OBJECTIVES:
            raise InputError(named("objective", self.objective), f" is not one of {', '.join(OBJECTIVES)}")

    def workload(self) -> Workload:
        """Return the workload, as far as it is known without the model's graph: what is not asked for counts 1."""
        micro_batches = 1 if self.accumulate is None else self.accumulate
        stated = {f.name: getattr(self, f.name) for f in fields(Workload) if hasattr(self, f.name)}
        known = {
            "batch": micro_batches if self.batch is None else self.batch,
            "seq": 1 if self.seq is None else self.seq,
            "dtype": self.dtype or "",
            "zero": max(ZERO) if self.zero is None else self.zero,
            "accumulate": micro_batches,
        }
        return Workload(**stated | known)


def request_of(run: Software, model: str, cluster: Cluster, **others: Any) -> Request:
    """Return the request for a run of a model: a `Statement`, or the workload of a plan. `others`: options in place of the run's own.

    A layout states the ZeRO stage, and its degrees count the samples of a rank, so a request for a run asks for neither."""
    options = {n: getattr(run, n) for n in RUN_OPTIONS if hasattr(run, n)}
    return Request(model, cluster, **{**options, **others})


RUN_OPTIONS = frozenset(f.name for f in fields(Request) if f.name in OPTIONS) - {"layout", "micro_batch", "zero"}
"""What a run of a known layout asks for, by name."""


def with_default_batch(request: Request, cluster: Cluster) -> Request:
    """Return the request with the samples of a step, where it does not state them and no example inputs fix them.

    They are those of a step, whatever the number of micro-batches, as those of `price` are. Raises InputError if they cannot be dealt to
    the micro-batches.
    """
    if request.batch is not None or brings_inputs(request.model):
        return request
    batch, parts = default_sizes(request.model, cluster.num_gpus)[0], request.accumulate or 1
    if batch % parts:
        raise InputError(
            named("accumulate", parts),
            f" does not divide the {batch:,} samples that a step has by default; give a divisor of them, or ",
            named("batch"),
            " too",
        )
    return replace(request, batch=batch)


@dataclass(frozen=True, slots=True)
class Effort:
    """The work that proofs may take, in points (`search.algebra`): `request` is for all gaps within a budget of memory together,
    `network` to settle the units of one network. Points are counted and not timed, so every machine finds the same plan. `gap`: a plan at
    most this share above its bound is good enough, so that only what closes at once is closed. `of_sums`: bounds are nobody's proof, and
    may be those of sums of memory (`SearchLimits.of_sums`)."""

    request: int
    network: int
    gap: float = 0.0
    of_sums: bool = False


THOROUGH = Effort(10**9, MAX_UNIT_POINTS)
"""As far as a gap can be closed at all. Every single search has a limit of its own."""
MOMENT = Effort(200_000, 40_000, gap=0.002)
"""About a second of a core: the answer comes first, and says its gap."""


class Clock:
    """Measures the seconds of each part of planning, by name. Of parts inside each other, each second counts for the innermost."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(
            ("capture", "coarsen", "fold", "network", "search", "front", "baselines"), 0.0
        )
        self._inside: list[str] = []
        self._since = 0.0

    def copy(self) -> Clock:
        """Return a clock of its own with the seconds so far, outside of every part."""
        clock = Clock()
        clock.seconds.update(self.seconds)
        return clock

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        self._count_elapsed()
        self._inside.append(name)
        try:
            yield
        finally:
            self._count_elapsed()
            self._inside.pop()

    def _count_elapsed(self) -> None:
        """Add the seconds since the last call to the part that was running."""
        now = time.perf_counter()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now


def note_default_sizes(work: Workload, num_gpus: int, *, batch: bool, seq: bool) -> tuple[Note, ...]:
    """Note the samples of a step and the tokens of a sample, those of the two that are assumed."""
    seq = seq and work.seq > 1  # an image has no tokens
    if not (batch or seq):
        return ()
    size = f"{work.batch:,} samples a step" if batch else f"{work.seq:,} tokens a sample"
    tokens = f" of {work.seq:,} tokens" if batch and seq else ""
    default = f"{size}{tokens} are assumed, the default{f' on {num_gpus:,} GPUs' if batch else ''}; "
    names = [*([named("batch")] if batch else []), *([named("seq")] if seq else [])]
    others = " state other numbers" if batch and seq else " states another number"
    return (Note(Sentence(default, Sentence.from_list(" and ", names), others), NoteKind.DEFAULT_BATCH),)
