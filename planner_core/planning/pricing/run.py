"""A stated run with all that the report says about it: its price, what would help, and the best plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner_core.core import Cluster, Plan, slow_numbers
from planner_core.planning.methods import faults
from planner_core.planning.pricing.price import Pricer, check_statement, limited_by, step_parts
from planner_core.planning.pricing.speed import Speed
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.pricing.suggest import Suggestion, suggestions

NOT_LEGAL = 3
"""Exit status of a layout that the model cannot follow."""


@dataclass(frozen=True, slots=True)
class PricedRun:
    """A stated run and its price. `plan` is None if the layout is not legal for the model; `reasons` say why.

    `parts`: the seconds of a step by the resource for which it waits. `best`: the best plan of the same workload.
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
        return PricedRun(stated, pricer.cluster, name, seq, tuple(faults(planner.graph, stated.layout)), notes=notes)
    notes = (*notes, *slow_numbers(pricer.cluster.gpu, planner.workload.dtype), *planner.workload.assumptions)
    best = pricer.best(stated, plan) if advise else None
    return PricedRun(
        stated, pricer.cluster, name, seq, (), plan, pricer.speed(plan, stated), step_parts(plan, planner), limited_by(plan, planner),
        tuple(suggestions(pricer, stated, plan)) if advise else (), best, pricer.speed(best, stated) if best else None, notes,
    )  # fmt: skip
