"""Draw the simulated step of a plan with stages in the Trace Event Format: a row for each rank with its work and its bubbles.

Times are in microseconds. `cat` is forward, backward, input, weight, once (work of once a step, such as the optimizer) or bubble. The
events of each row add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner_core.core import InputError, Pipeline, Plan
from planner_core.cost import PipelineTime, simulated_pipeline

ROUNDING_S = 1e-9
"""Shorter pauses are rounding errors of sums."""


def stage_trace(plan: Plan) -> dict[str, Any]:
    """Return the trace of one step. Raises InputError for a plan of one stage."""
    cut, cost = plan.pipeline, plan.cost.pipeline
    if cut is None or cost is None:
        raise InputError("this plan has one stage, so it has no rows of stages")
    time = simulated_pipeline(cut, cost.stages, plan.accumulate)
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": plan.name}}]
    for rank in range(cut.ranks):
        stages = ", ".join(map(str, cut.stages_of(rank)))
        events.append(
            {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}: stage {stages}"}}
        )
        events += _rank_events(rank, time, cut)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank_events(rank: int, time: PipelineTime, cut: Pipeline) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank, in order."""
    now = 0.0
    for span in (s for s in time.spans if s.rank == rank):
        if span.start_s - now > ROUNDING_S:
            yield _event(rank, "bubble", "bubble", now, span.start_s)
        work = span.work
        name = f"{work.what.value}{work.micro_batch}" + (f" of stage {work.stage}" if cut.virtual > 1 else "")
        args = {"stage": work.stage, "micro-batch": work.micro_batch}
        yield _event(rank, name, work.what.name.lower(), span.start_s, span.end_s, args)
        now = span.end_s
    once_s = time.once_s[rank]
    yield _event(rank, "once a step", "once", now, now + once_s)
    if time.step_s - now - once_s > ROUNDING_S:
        yield _event(rank, "bubble", "bubble", now + once_s, time.step_s)


def _event(
    rank: int, name: str, kind: str, start_s: float, end_s: float, args: dict[str, int] | None = None
) -> dict[str, Any]:
    where = {"ph": "X", "pid": 0, "tid": rank, "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {**where, "name": name, "cat": kind, "args": args or {}}
