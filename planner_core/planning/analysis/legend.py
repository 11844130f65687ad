"""Sentences beneath the table of plans: what its columns say, and what stands in no row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from planner_core.core import (
    Cluster,
    Note,
    NoteKind,
    Plan,
    PlanRole,
    Sentence,
    Shard,
    Term,
    list_names,
    named,
    params_by_pattern,
    time_amount,
)
from planner_core.cost import DATA, IDLE, SHARD, TENSOR, axis_roles
from planner_core.planning.fitting.for_tool import ToolPrice
from planner_core.planning.methods import EXACT, FREE, OF_MEGATRON, megatron_fault, tool_term
from planner_core.planning.pricing import BUBBLE, EXPOSED_COMM, Speed, predict_reserved, split_pipeline_step
from planner_core.planning.result import Result
from planner_core.planning.stages import STOCK_TOOL, may_use_stages

BAND_WORDS = "from ... to: nine in ten published runs of such a kind were measured between these (assets/bands.json)"
HOST_END = "the upper end is what a host may need to issue the kernels, whose pace was not measured on this stack"
TIGHT, SHORT, TENSORS = "tight", "short", "tensors"
_FREES_BLOCKS = "it then frees blocks and allocates anew, which takes time that is not in the step"
_ALLOCATOR = "the tensors fit, but PyTorch's allocator, which keeps freed blocks too,"
FITS_WORDS = {
    TIGHT: f"tight: {_ALLOCATOR} may need more than CUDA's context and NCCL's buffers leave of the GPU; {_FREES_BLOCKS}",
    SHORT: f"short: {_ALLOCATOR} is likely to need more than the whole GPU has; {_FREES_BLOCKS}",
    TENSORS: f"tensors: {_ALLOCATOR} knows of no stated memory and may reserve more than that",
}
BUT_FOR_WAITS = "but for waits"
WAITS_WORDS = "the work of its GPUs is proven the least; a plan with more of it might wait less for the host"
ALL_COMM = "all comm is each collective by itself, also where computation hides it"
SLOWED = "exposed comm is above it where collectives at one time slow each other and computation"
SHOWN_DIFFERENCE = 5e-4
"""Seconds that differ by a smaller share have the same three figures."""
SIMULATION_AGREES = 0.01
"""A simulation that is closer to a plan's time than this share agrees with it."""
WIDE_GAP = 0.01
"""A gap from which on a reader is told how to close it."""
MAX_LISTED_WEIGHTS = 3
"""Weights that a sentence lists."""


def step_proof(plan: Plan) -> str:
    """Return whether no plan of its own method's space is below it in what that minimises: `yes`, `no`, or `but for waits` of the GPU for
    its host, where only the work of its GPUs is proven. All reports and pages say this."""
    return "yes" if plan.is_step_proven else BUT_FOR_WAITS if plan.optimal else "no"


def proven_mark(plan: Plan) -> str:
    """Return what the column `proven` says of a plan."""
    return "a tie" if not plan.optimal and plan.role is PlanRole.SIMPLER else step_proof(plan)


def list_notes(result: Result) -> tuple[Note, ...]:
    """List what a reader has to know beside the numbers: what the request's tool costs, what the passes noted, and that a stock tool has
    kernels of its own."""
    price = describe_tool_price(result.tool_price) if result.tool_price else Sentence()
    return (
        *map(Note, filter(None, [price])),
        *result.notes,
        *(Note(s, NoteKind.KERNELS) for s in [describe_kernels(result)] if s),
    )


def word_notes(result: Result, word: Callable[[Term], str] = str) -> list[str]:
    """Return the sentences of `list_notes`, with options in the words of `word`."""
    return [Sentence(note.sentence).worded(word) for note in list_notes(result)]


def describe_kernels(result: Result) -> Sentence:
    """Say that rows of Megatron-LM are on PyTorch's kernels, and how to plan for its own; empty where no row is, or a search for the tool
    would be refused."""
    asked = result.asked
    is_searched = asked.bounding_tool is None and asked.stack is None and result.workload.resolved().runs_torch_kernels
    may_be_asked = asked.method == EXACT.name and asked.objective == "time" and not megatron_fault(result.graph)
    rows = [p for p in result.plans if p.method in OF_MEGATRON and p.fits]
    if not (rows and is_searched and may_be_asked):
        return Sentence()
    what = "Megatron-LM's rows are on PyTorch's kernels, as all others are; "
    return Sentence(what, "planned with ", named("tool", STOCK_TOOL), " it has its own, which may be quicker")


def describe_tool_price(price: ToolPrice) -> Sentence:
    """Say how much slower or faster the best plan for a tool is than the best of all; empty where neither fits."""
    start = Sentence("for ", tool_term(price.tool), ": ")
    plans = "all plans on PyTorch's kernels" if price.own_kernels else "all plans"
    if price.step_without_tool_s is None:
        return Sentence(start, f"the plan fits, where none of {plans} was found to") if price.step_s else Sentence()
    gpu_s, script = (
        price.step_without_tool_s - price.wait_without_tool_s,
        f", which the {FREE} script runs" * price.is_script,
    )
    with_waits = (
        Sentence(", or ", time_amount(price.step_without_tool_s), " with its waits")
        if price.wait_without_tool_s
        else Sentence()
    )
    comparison = Sentence(time_amount(gpu_s), with_waits, script)
    if price.step_s is None:
        return Sentence(start, f"no plan fits, while the best found of {plans} does (", comparison, ")")
    more = price.step_s / gpu_s - 1
    difference = f"{100 * abs(more):.1f} % {'slower' if more > 0 else 'faster'} than"
    if more >= 1:
        difference = f"{1 + more:.1f} times as long as"
    elif abs(more) < SHOWN_DIFFERENCE:
        difference = "as fast as"
    return Sentence(
        start,
        f"a step{' without waits for the host' * bool(price.wait_without_tool_s)} takes ",
        time_amount(price.step_s),
        f" with gradients in {price.gradients}" if price.gradients else "",
        f"{' on its own kernels' * price.own_kernels}, {difference} the best found of {plans} (",
        comparison,
        ")",
    )


def describe_waits(plans: Iterable[Plan]) -> tuple[str, ...]:
    """Say what `but for waits` in the column `proven` means, if a row has it."""
    return (f"{BUT_FOR_WAITS}: {WAITS_WORDS}",) if any(proven_mark(p) == BUT_FOR_WAITS for p in plans) else ()


def describe_axes(plans: Sequence[Plan]) -> tuple[str, ...]:
    """Say what the names of axes leave open: what `idle` means, which weights they split, where samples are."""
    idle = [p.name for p in plans if IDLE in axis_roles(p)]
    rows: dict[str, list[str]] = {}
    for plan in plans:
        rows.setdefault(_describe_split_work(plan), []).append(plan.name)
    says = [(names, says) for says, names in rows.items() if says]
    if idle:
        says.append((idle, "along an idle axis all GPUs do the same work, since a search may repeat work to send less"))
    # Their micro-batch is of more ranks than the mesh says.
    if dealt := [p.name for p in plans if any(axis_roles(p)[axis] in (TENSOR, IDLE) for axis in p.data_axes)]:
        says.append(
            (
                dealt,
                "samples are dealt along the tensor or idle axis too, where a part of the model takes whole weights",
            )
        )
    return tuple(f"{', '.join(names)}: {sentence}" for names, sentence in says)


def _describe_split_work(plan: Plan) -> str:
    """Say which weights are used in parts along a `data` or `shard` axis, which is named for what most weights do; empty if none is."""
    parts = []
    for axis, role in enumerate(axis_roles(plan)):
        names = [
            name.removesuffix(".weight")
            for name, param in params_by_pattern(plan).items()
            if role in (DATA, SHARD) and isinstance(param.working[axis], Shard) and axis not in param.gathered
        ]
        if names:
            parts.append(f"{list_names(names, MAX_LISTED_WEIGHTS)} along {plan.mesh.axis_names[axis]}")
    return f"used in parts, as in tensor parallelism: {'; '.join(parts)}" if parts else ""


def describe_bands(rows: Iterable[tuple[str, Speed]]) -> str:
    """Say what both ends of a band are, and which rows end above the published runs, at the pace of a host."""
    hosted = [name for name, speed in rows if speed.band.host_s]
    return f"{BAND_WORDS}; of {', '.join(hosted)} {HOST_END}" if hosted else BAND_WORDS


def fits_mark(plan: Plan, cluster: Cluster, memory_gb: float | None = None) -> str:
    """Return what the column `fits` says of a plan. `memory_gb`: the memory that the request states, if it does.

    Example: tensors of 73.3 GiB fit in 79.6, of which the allocator may reserve 79.5."""
    if not plan.fits:
        return "no"
    reserved = predict_reserved(plan, cluster, memory_gb)
    if reserved.tight or reserved.short:
        return SHORT if reserved.short else TIGHT
    return TENSORS if reserved.above_stated else "yes"


def describe_fits(plans: Iterable[Plan], cluster: Cluster, memory_gb: float | None = None) -> tuple[str, ...]:
    """Say what `tight`, `short` and `tensors` in the column `fits` mean, if a row has them."""
    marks = {fits_mark(p, cluster, memory_gb) for p in plans}
    return tuple(words for mark, words in FITS_WORDS.items() if mark in marks)


def exposed_and_bubble(plan: Plan) -> tuple[float, float]:
    """Return the seconds of a step in which a GPU waits for collectives, and in which it waits for other stages."""
    if plan.pipeline is None:
        return plan.cost.exposed_comm_time_s, 0.0
    parts = split_pipeline_step(plan)
    return parts[EXPOSED_COMM], parts[BUBBLE]


def is_slowed(plan: Plan) -> bool:
    """Return whether a plan has more exposed communication than all there is. Both are sums, which may differ by rounding alone."""
    return exposed_and_bubble(plan)[0] > plan.cost.comm_time_s * (1 + SHOWN_DIFFERENCE)


def step_parts(plan: Plan) -> dict[str, float]:
    """Return the seconds of a step by column of the table; they add up to it."""
    c, (exposed, bubble) = plan.cost, exposed_and_bubble(plan)
    return {
        # Without the wait: a plan of small kernels would seem to compute longer than one of large kernels.
        "compute": c.gpu_compute_s,
        "host wait": c.host_wait_s,
        "exposed comm": exposed,
        "bubble": bubble,
        "optimizer": c.optimizer_time_s,
        "outside": c.outside_time_s,
    }


def describe_parts(plans: Sequence[Plan]) -> str:
    """Say which columns a step is, and what `all comm` is beside them."""
    parts = [step_parts(p) for p in plans]
    *first, last = (name for name in parts[0] if any(row[name] for row in parts))
    slowed = f"; {SLOWED}" if any(map(is_slowed, plans)) else ""
    return f"a step is {', '.join(first)} and {last}; {ALL_COMM}{slowed}"


def describe_open_gap(result: Result) -> Sentence:
    """End a sentence with how a wide gap of the searched plan may be closed, or that a search for its proof has ended; empty where no gap
    is left."""
    plan = result.searched
    if plan.optimal or not plan.fits or not plan.bound or plan.objective != "time":
        return Sentence()
    if result.asked.prove:
        # A narrower space, or a plan chosen for its shorter waits, leaves a gap that no more work closes.
        by_work = not plan.cost.host_wait_s and all(note.kind is not NoteKind.SCOPE for note in plan.notes)
        limit = ": it took the work that a proof may take" if by_work else ""
        return Sentence(f"; the search for a proof ended with the gap that is left{limit}")
    # The search minimises the GPU's part of a step, so the bound is of this part.
    is_wide = plan.cost.gpu_time_s > plan.bound * (1 + WIDE_GAP)
    return (
        Sentence("; ", named("prove"), " may narrow the gap that is left, within the work that a proof may take")
        if is_wide
        else Sentence()
    )


def describe_fullest_ranks(plans: Iterable[Plan]) -> tuple[str, ...]:
    """Say of each plan with stages which pipeline rank takes the memory that is shown, and what the emptiest rank takes."""
    return tuple(
        f"{p.name}: its memory is that of rank {p.fullest_rank} of 0 to {p.pipeline.ranks - 1}, the fullest; "
        f"the emptiest takes {min(s.peak_bytes for s in p.cost.pipeline.stages) / 2**30:.1f} GiB"
        for p in plans
        if p.pipeline and p.cost.pipeline
    )


def describe_stages(result: Result) -> tuple[str, ...]:
    """Say of rows with pipeline stages which rank is the fullest, and why the search added none, as the first line announces."""
    fullest = describe_fullest_ranks(result.plans)
    if result.staged is not None or not may_use_stages(result.asked, result.cluster, result.source):
        return fullest
    return (f"stages: {result.reasons['stages']}", *fullest) if "stages" in result.reasons else fullest


def simulation_text(plans: Sequence[Plan], times: Sequence[float]) -> str:
    """Return how far the plans' times are from those of a simulation in the order in which a run issues its work."""
    differences = {p.name: time / p.cost.step_time_s - 1 for p, time in zip(plans, times, strict=True)}
    exceptions = ", ".join(
        f"{name} {100 * share:+.1f} %" for name, share in differences.items() if abs(share) > SIMULATION_AGREES
    )
    return f"simulated in the order in which a run issues its work: within 1 % of these times{exceptions and ', but for '}{exceptions}"


def row_title(plan: Plan, plans: Iterable[Plan]) -> str:
    """Name the row of a plan. The best plan and that of least communication are "of one stage" where a plan with stages is listed."""
    of_least_communication = plan.method == EXACT.name and plan.objective != "time"
    is_least = of_least_communication or plan.role in (PlanRole.BEST, PlanRole.SIMPLER, PlanRole.FASTEST)
    has_rival = is_least and plan.pipeline is None and any(p.role is PlanRole.STAGES for p in plans)
    return f"{plan.name}, of one stage" if has_rival else plan.name
