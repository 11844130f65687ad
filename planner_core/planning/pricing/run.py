"""A stated run with the content of its report: the price, changes that would help, and the best plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner_core.core import (
    ITEM_BYTES,
    Cluster,
    Graph,
    NoPlanFits,
    Note,
    Plan,
    PlannerError,
    PlanRole,
    Sentence,
    Workload,
    named,
    nearest_multiple,
    slow_dtype_notes,
)
from planner_core.cost import MATH, attentions_by_kernel, why_math
from planner_core.planning.fitting.host_waits import note_unknown_host
from planner_core.planning.fitting.shortage import describe_memory
from planner_core.planning.methods import (
    Layout,
    note_recompute,
    note_schedule,
    operator_faults,
    undecided_fault,
)
from planner_core.planning.pricing.price import Pricer, check_statement
from planner_core.planning.pricing.speed import Speed, limiting_resource, split_step
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.pricing.suggest import Suggestion, find_suggestions, other_cp_types
from planner_core.planning.request import rare_collections

BEST = "best"
EXIT_NOT_LEGAL = 3
"""Exit status of a layout that the model cannot follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRun:
    """A stated run and its price.

    Attributes:
        reasons: Why the layout is not legal for the model; empty if it is.
        plan: The plan of the stated layout; None if that is not legal.
        parts: Seconds of a step by the resource that it waits for.
        limited_by: The resource that it waits for most.
        best: The best plan of the same workload; where no plan fits, the one that needs least memory.
        about: Sentences about settings that decide the answer and may not have been stated.
        fills: A sentence about the memory of a plan that does not fit.
        memory_gb: The memory per GPU that a plan may take, if it is stated, 10^9 bytes.
    """

    stated: Statement
    cluster: Cluster
    model: str
    seq: int
    reasons: tuple[str, ...] = ()
    plan: Plan | None = None
    speed: Speed | None = None
    parts: Mapping[str, float] | None = None
    limited_by: str | None = None
    suggestions: tuple[Suggestion, ...] = ()
    best: Plan | None = None
    best_speed: Speed | None = None
    notes: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    fills: str = ""
    memory_gb: float | None = None

    @property
    def legal(self) -> bool:
        """Whether the model can follow the layout."""
        return self.plan is not None


@rare_collections()
def price_statement(
    pricer: Pricer, stated: Statement, *, advise: bool = True, notes: tuple[str, ...] = ()
) -> PricedRun:
    """Price a stated run. With `advise`, also find helpful changes and the best plan. Raises InputError."""
    # Before the graph is built, which takes seconds: degrees that do not fill the cluster need none.
    check_statement(stated, pricer.cluster)
    planner = pricer.planner(stated)
    seq, name = planner.workload.seq, planner.graph.name
    plan = pricer.plan(stated)
    if plan is None:
        return PricedRun(
            stated=stated,
            cluster=pricer.cluster,
            model=name,
            seq=seq,
            reasons=explain_illegal(pricer, stated),
            notes=notes,
        )
    load = planner.workload
    suggestions = find_suggestions(pricer, stated, plan) if advise else []
    best, shortage = _find_best(pricer, stated, plan, suggestions) if advise else (None, ())
    notes = (
        *notes,
        *slow_dtype_notes(pricer.cluster.gpu, load.dtype),
        *load.assumptions,
        *planner.graph.assumptions,
        *_stack_note(stated, load),
        *(note.sentence for note in note_unknown_host(plan, planner.graph)),
        *note_schedule(stated.layout, load.stack),
        *note_recompute(load.recompute, load.stack),
        *shortage,
    )
    fills = "" if plan.fits else describe_memory(plan, planner.graph, planner.budget)
    return PricedRun(
        stated=stated,
        cluster=pricer.cluster,
        model=name,
        seq=seq,
        plan=plan,
        speed=pricer.speed(plan, stated),
        parts=split_step(plan, planner),
        limited_by=limiting_resource(plan, planner),
        suggestions=tuple(suggestions),
        best=best,
        best_speed=pricer.speed(best, stated) if best else None,
        notes=notes,
        about=describe_software(planner.graph, pricer.cluster, load, planner.budget),
        fills=fills,
        memory_gb=pricer.memory_gb,
    )


def _find_best(
    pricer: Pricer, stated: Statement, plan: Plan, suggestions: Sequence[Suggestion]
) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the best plan of the same samples and software, and a note if there is none within a stated memory.

    If no plan of the search fits, the fastest suggestion that fits is best: the search has at most two mesh axes, a suggestion may have
    more."""
    best, shortage = (replace(plan, name=BEST, role=PlanRole.BEST) if plan.fits else None), tuple[str, ...]()
    try:
        best = pricer.best(stated, plan)
    except NoPlanFits as error:  # --memory-gb states a budget, so a search without a plan raises
        shortage = (error.sentence,)
    if best is not None and best.fits:
        return best, ()

    def workload(run: Statement) -> Statement:
        # What is left says what a run computes, and not how: two runs that are equal in it train the same model on the same samples.
        return run.but(layout=Layout(), micro_batch=1, accumulate=run.batch, recompute="")

    # Suggestions are sorted by speed. One that computes something else (another loss or dtype) would not be the same run.
    fitting = next((s for s in suggestions if s.plan.fits and workload(s.stated) == workload(stated)), None)
    if fitting is None:
        return best, shortage
    note = Sentence("no plan on one or two axes fits; this is the stated run with ", fitting.change)
    return replace(fitting.plan, name=BEST, role=PlanRole.BEST, notes=(*fitting.plan.notes, Note(note))), ()


def _stack_note(stated: Statement, workload: Workload) -> tuple[str, ...]:
    """Return a sentence about the stack, if the model's architecture decided it."""
    if workload.stack is None or workload.stack == stated.stack:
        return ()
    note = Sentence(
        f"priced as {workload.stack} ran such models when their runs were published; ",
        named("stack", "torch"),
        " prices what PyTorch runs today",
    )
    return (note,)


# --- what sets an answer and was perhaps not asked for ----------------------------------------------------


def describe_software(graph: Graph, cluster: Cluster, workload: Workload, budget: float) -> tuple[str, ...]:
    """Sentences about the software of a workload on a cluster. `budget`: bytes per GPU that a plan may take."""
    software, ops_by_kernel = workload.resolved(), attentions_by_kernel(graph, cluster.gpu, workload)
    item, memory = ITEM_BYTES[workload.dtype], cluster.gpu.memory_bytes
    gradients = "float32" if workload.gradient_item(item) > item else workload.dtype
    share = f", {budget / memory:.0%} of the GPU's" if budget < memory else ""
    loss = _describe_loss(workload)
    attention = f"attention {' and '.join(ops_by_kernel)}, " if ops_by_kernel else ""
    mode = "compiled" if workload.compiled else "eager"
    lines = [
        f"{attention}optimizer {software.optimizer_kernels}, {mode}, {loss}, gradients in {gradients}; a plan may take "
        f"{budget / 2**30:.1f} GiB{share}"
    ]
    for block, op in ops_by_kernel.get(MATH, [])[:1]:
        where = block.name or "the model"
        lines.append(
            f"attention of {where} runs torch's math kernel in float32, which keeps its scores: {why_math(op, block)}"
        )
    return (*lines, *(_describe_own_attention(graph) if not ops_by_kernel else ()))


def _describe_own_attention(graph: Graph) -> tuple[str, ...]:
    """Return a sentence about attention that the model's code computes by products and a softmax, as GPT-OSS with its sinks: such operators
    keep the scores, and no kernel of attention takes their place."""
    seq = graph.workload["seq"]
    for name, block in graph.blocks.items():
        for op in block.ops:
            # Scores have the dims sample, head, query and key, with a key more where there are sinks; a router's softmax has fewer dims.
            scores = block.values[op.outputs[0]].meta if op.fn == "softmax" else None
            if scores is not None and len(scores.shape) == 4 and min(scores.shape[-2:]) >= seq:
                size = " x ".join(f"{n:,}" for n in scores.shape[1:])
                return (
                    f"attention of {name} is made of products and a softmax in the model's own code, which keep scores of {size} for each "
                    "sample and layer; no stated kernel takes their place, and a program that has one takes less time and memory",
                )
    return ()


def _describe_loss(workload: Workload) -> str:
    """Return how the loss of logits runs."""
    loss = workload.resolved().loss
    if loss != "eager":
        return f"loss {loss}"
    if workload.compiled:
        return "loss compiled" if workload.loss is None else "loss not compiled"
    return "loss as the model's code has it"


# --- why a run is not legal ----------------------------------------------------------------------------------


def explain_illegal(pricer: Pricer, stated: Statement) -> tuple[str, ...]:
    """Sentences that say why a run is not legal, each with the value and what would do.

    If sizes alone give no reason, the sentence names the deciding operator and the nearest legal run."""
    planner = pricer.planner(stated)
    # Sizes first: they say the value and what would do, where the network knows only that no state is left.
    if faults := operator_faults(planner.graph, stated.layout):
        return tuple(map(str, faults))
    why = undecided_fault(planner.of_space(stated.layout.space()), stated.layout)
    change = next((words for words, other in _nearby_statements(stated) if _is_legal(pricer, other)), None)
    if change is None:
        return (Sentence(why, ", and no run near it is legal either; give other degrees"),)
    return (Sentence(why, "; ", change, " is legal"),)


def _is_legal(pricer: Pricer, stated: Statement) -> bool:
    """Return whether the model's operators can follow a statement."""
    try:
        planner = pricer.planner(stated)
        return (
            not operator_faults(planner.graph, stated.layout)
            and not planner.of_space(stated.layout.space()).is_infeasible
        )
    # Degrees that do not suit the cluster or the samples are not legal either.
    except PlannerError:
        return False


def _nearby_statements(stated: Statement) -> Iterator[tuple[str, Statement]]:
    """Runs that differ in one thing, the smallest change first, each with its description. They have about the same samples a step."""
    layout, micro = stated.layout, stated.micro_batch
    if micro > 1:
        accumulate = micro * stated.accumulate
        yield f"micro-batch 1, {accumulate} of them", stated.but(micro_batch=1, accumulate=accumulate)
    yield from other_cp_types(stated)
    if layout.sp:
        yield "the same without sp", stated.but(layout=replace(layout, sp=False))
    for other in _smaller_layouts(layout):
        yield _deal_out(stated, other)


def _deal_out(stated: Statement, layout: Layout) -> tuple[Sentence, Statement]:
    """Return the run with another layout, of the same samples a step or the nearest number that its ranks share, with the options that
    state it beside the given ones."""
    each = layout.data * stated.accumulate
    batch = nearest_multiple(stated.batch, each)
    other = stated.but(layout=layout, micro_batch=batch // each)
    options = [
        *([named("batch", batch)] if batch != stated.batch else []),
        *([named("micro_batch", other.micro_batch)] if other.micro_batch != stated.micro_batch else []),
    ]
    return Sentence(str(layout), " with " if options else "", Sentence.from_list(" and ", options)), other


def _smaller_layouts(layout: Layout) -> Iterator[Layout]:
    """Layouts with fewer tensor or context ranks, which become data-parallel ones."""
    wide = "fsdp" if layout.fsdp > 1 or layout.zero == 3 else "dp"
    tp = layout.tp
    while tp % 2 == 0:
        tp //= 2
        yield replace(layout, tp=tp, sp=layout.sp and tp > 1, **{wide: getattr(layout, wide) * layout.tp // tp})
    if layout.cp > 1:
        zero = 0 if layout.zero == 3 else layout.zero
        yield replace(layout, cp=1, cp_type="ring", zero=zero, **{wide: getattr(layout, wide) * layout.cp})
