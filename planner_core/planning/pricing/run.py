"""A stated run with all that the report says about it: its price, what would help, and the best plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from planner_core.core import Cluster, Plan, PlannerError, Workload, slow_dtype_notes
from planner_core.planning.fitting.shortage import what_fills
from planner_core.planning.methods import CP_TYPES, Layout, faults, undecided, unseen
from planner_core.planning.pricing.price import Pricer, check_statement, limited_by, step_parts
from planner_core.planning.pricing.speed import Speed
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.pricing.suggest import Suggestion, suggestions
from planner_core.planning.pricing.told import software_text

NOT_LEGAL = 3
"""Exit status of a layout that the model cannot follow."""


@dataclass(frozen=True, slots=True)
class PricedRun:
    """A stated run and its price. `plan` is None if the layout is not legal for the model; `reasons` say why.

    `parts`: the seconds of a step by the resource for which it waits. `best`: the best plan of the same workload. `about`: what sets
    the answer and was perhaps not asked for. `fills`: what fills the memory of a plan that does not fit.
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

    @property
    def legal(self) -> bool:
        """Whether the model can follow the layout."""
        return self.plan is not None


def price_statement(
    pricer: Pricer, stated: Statement, *, advise: bool = True, notes: tuple[str, ...] = ()
) -> PricedRun:
    """Price a stated run. With `advise`, also find what would help, and the best plan. Raises InputError."""
    check_statement(stated, pricer.cluster)
    planner = pricer.planner(stated)
    seq, name = planner.workload.seq, planner.graph.name
    plan = pricer.plan(stated)
    if plan is None:
        return PricedRun(stated, pricer.cluster, name, seq, reasons_of(pricer, stated), notes=notes)
    load = planner.workload
    notes = (
        *notes,
        *slow_dtype_notes(pricer.cluster.gpu, load.dtype),
        *load.assumptions,
        *planner.graph.assumptions,
        *_usual_stack(stated, load),
    )
    best = pricer.best(stated, plan) if advise else None
    fills = "" if plan.fits else what_fills(plan, planner.graph, planner.budget)
    return PricedRun(
        stated,
        pricer.cluster,
        name,
        seq,
        (),
        plan,
        pricer.speed(plan, stated),
        step_parts(plan, planner),
        limited_by(plan, planner),
        tuple(suggestions(pricer, stated, plan)) if advise else (),
        best,
        pricer.speed(best, stated) if best else None,
        notes,
        software_text(planner.graph, pricer.cluster, load, planner.budget),
        fills,
    )


def _usual_stack(stated: Statement, workload: Workload) -> tuple[str, ...]:
    """A sentence about the stack, if it was taken from the model's architecture."""
    if workload.stack is None or workload.stack == stated.stack:
        return ()
    return (
        f"priced as {workload.stack} ran such models when their runs were published; --stack torch prices what PyTorch runs today",
    )


# --- why a run is not legal ----------------------------------------------------------------------------------


def reasons_of(pricer: Pricer, stated: Statement) -> tuple[str, ...]:
    """Each reason as a sentence with the value and what would do. Where sizes alone give none, the operator that decides, and the
    nearest run that is legal."""
    planner = pricer.planner(stated)
    if found := faults(planner.graph, stated.layout):
        return tuple(found)
    why = undecided(planner.of_space(stated.layout.space()), stated.layout)
    way = next((words for words, other in _near(stated) if _legal(pricer, other)), "")
    return (f"{why}; {way} is legal" if way else f"{why}, and no run near it is legal either; give other degrees",)


def _legal(pricer: Pricer, stated: Statement) -> bool:
    """Whether the model's operators can follow a statement."""
    try:
        planner = pricer.planner(stated)
        none = unseen(planner.graph, stated.layout) or faults(planner.graph, stated.layout)
        return not none and not planner.of_space(stated.layout.space()).is_infeasible
    except PlannerError:
        return False


def _near(stated: Statement) -> Iterator[tuple[str, Statement]]:
    """Runs of as many samples that differ in one thing, the smallest change first, with their words."""
    now, micro = stated.layout, stated.micro_batch
    if micro > 1:
        times = micro * stated.accumulate
        yield f"micro-batch 1, {times} of them", stated.but(micro_batch=1, accumulate=times)
    for kind in CP_TYPES if now.cp > 1 else ():
        if kind != now.cp_type:
            yield f"cp_type={kind}", stated.but(layout=replace(now, cp_type=kind))
    if now.sp:
        yield "the same without sp", stated.but(layout=replace(now, sp=False))
    for other in _fewer(now):
        yield str(other), stated.but(layout=other)


def _fewer(now: Layout) -> Iterator[Layout]:
    """Layouts with fewer tensor or context ranks, which become data-parallel ones."""
    wide = "fsdp" if now.fsdp > 1 or now.zero == 3 else "dp"
    tp = now.tp
    while tp % 2 == 0:
        tp //= 2
        yield replace(now, tp=tp, sp=now.sp and tp > 1, **{wide: getattr(now, wide) * now.tp // tp})
    if now.cp > 1:
        zero = 0 if now.zero == 3 else now.zero
        yield replace(now, cp=1, cp_type="ring", zero=zero, **{wide: getattr(now, wide) * now.cp})
