"""A priced layout as JSON (docs/CONTRACT.md, `price --json`) and as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner_core.core import Cluster, Plan
from planner_core.cost import zero_stage
from planner_core.models import brings_inputs
from planner_core.planning.analysis.legend import describe_bands, describe_fits, describe_fullest_ranks, fits_mark
from planner_core.planning.analysis.reporting import (
    describe_micro_batches,
    describe_recomputation,
    format_peak_gib,
    format_seconds,
    format_table,
    plan_summary,
    reserved_text,
)
from planner_core.planning.pricing import Budget, PricedRun, Speed, name_throughput, predict_reserved

SCHEMA = "shardscope.price/1"


def price_report(priced: PricedRun, budget: Budget | None = None) -> dict[str, Any]:
    """Return the object of `price --json`."""
    stated = priced.stated
    stated_run = {
        "model": priced.model,
        "cluster": priced.cluster.name,
        "num_gpus": priced.cluster.num_gpus,
        "micro_batch": stated.micro_batch,
        "accumulate": stated.accumulate,
        "batch": stated.batch,
        "seq": priced.seq,
        "recompute": stated.recompute,
        "compile": stated.compiled,
        "optimizer": stated.optimizer,
        "precision": stated.precision,
        "stack": stated.stack,
    }
    judged = {
        "schema": SCHEMA,
        "layout": stated.layout.to_json(),
        **stated_run,
        "legal": priced.legal,
        "reasons": list(priced.reasons),
        "fits": bool(priced.plan and priced.plan.fits),
        "notes": list(priced.notes),
    }
    if priced.plan is None or priced.speed is None:
        return judged
    reserved = predict_reserved(priced.plan, priced.cluster, priced.memory_gb)
    summary = plan_summary(priced.plan, priced.speed, reserved)
    # A stated run has no method and proves nothing, and its notes and `fits` stand above.
    for name in ("name", "method", "objective", "optimal", "notes", "fits"):
        summary.pop(name)
    best = None if priced.best is None else plan_summary(priced.best, priced.best_speed)
    changes = [
        {
            "change": s.change,
            "step_time_s": s.plan.cost.step_time_s,
            "fits": s.plan.fits,
            "memory_bytes": s.plan.cost.memory_bytes["peak"],
            "tokens_per_s_per_gpu": s.tokens_per_s_per_gpu,
            "layout": str(s.stated.layout),
        }
        for s in priced.suggestions
    ]
    data = {
        **judged,
        **summary,
        "step_parts_s": dict(priced.parts or {}),
        "limited_by": priced.limited_by,
        "about": list(priced.about),
        "fills": priced.fills,
        "suggestions": changes,
        "best": best,
    }
    if budget is not None:
        data["run"] = budget.to_json(priced.speed, priced.cluster.num_gpus)
    return data


def price_text(priced: PricedRun, budget: Budget | None = None) -> str:
    """Return the report as text."""
    stated = priced.stated
    assumed = " by default" if stated.seq is None and not brings_inputs(priced.model) else ""
    tokens = f" {priced.seq} tokens{assumed}," if priced.seq > 1 else ""  # a model without token ids has seq 1
    head = (
        f"{priced.model} on {priced.cluster.name} ({priced.cluster.num_gpus} x {priced.cluster.gpu.name}): {stated.layout}, "
        f"micro-batch {stated.micro_batch} x {stated.accumulate},{tokens} recompute {stated.recompute}"
    )
    if priced.plan is None or priced.speed is None:
        return "\n".join([head, "not legal for this model:", *priced.reasons])
    rows = [["", "step", "from", "to", f"{name_throughput(priced.plan)}/GPU", "MFU", "memory GiB", "fits"]]
    rows += [_plan_row("stated", priced.plan, priced.speed, priced)]
    if priced.best is not None and priced.best_speed is not None:
        rows.append(
            _plan_row(
                f"{_name_best(priced.best, priced.cluster)}: {priced.best.mesh}",
                priced.best,
                priced.best_speed,
                priced,
            )
        )
    parts = ", ".join(f"{what} {format_seconds(s)}" for what, s in (priced.parts or {}).items())
    helps = [
        f"{s.change}: {format_seconds(s.plan.cost.step_time_s)}, {s.tokens_per_s_per_gpu:,.0f} {name_throughput(s.plan)}/GPU, "
        f"{format_peak_gib(s.plan)} GiB"
        for s in priced.suggestions
    ]
    lines = [
        head,
        *priced.about,
        *priced.notes,
        "",
        format_table(rows, frozenset(range(1, 8))),
        *([f"from ... to is not known: {priced.speed.band.why}"] if priced.speed.band.why else []),
        *([describe_bands([("stated", priced.speed)])] if priced.speed.band.host_s else []),
        *describe_fullest_ranks([replace(priced.plan, name="stated")]),
        *describe_fits(filter(None, (priced.plan, priced.best)), priced.cluster, priced.memory_gb),
        "",
        f"a step is {parts}; limited by {priced.limited_by}",
        *([priced.fills] if priced.fills else []),
        *([] if priced.best is None else [_describe_choices(priced.best, priced.cluster)]),
        *([reserved_text(predict_reserved(priced.plan, priced.cluster))] if priced.plan.fits else []),
    ]
    if helps:
        lines += ["what helps most:", *helps]
    return "\n".join([*lines, *(_cost_lines(budget, priced.speed, priced.cluster) if budget else [])])


def _name_best(plan: Plan, cluster: Cluster) -> str:
    """Return what the plan beside a stated one is called: nothing that does not fit is best, and stages, which may win over several nodes,
    are searched by `plan` alone."""
    if not plan.fits:
        return "needs least"
    return "best of one stage" if plan.pipeline is None and not cluster.is_one_node else "best"


def _describe_choices(best: Plan, cluster: Cluster) -> str:
    """Return what the best plan chose beside its mesh."""
    choices = (
        f"micro-batch {describe_micro_batches(best)}, ZeRO-{zero_stage(best)}, recompute {describe_recomputation(best)}"
    )
    return f"{_name_best(best, cluster)}: {choices}"


def _plan_row(name: str, plan: Plan, speed: Speed, priced: PricedRun) -> list[str]:
    return [
        name,
        format_seconds(speed.step_time_s),
        *speed.between(format_seconds),
        f"{speed.tokens_per_s_per_gpu:,.0f}",
        f"{100 * speed.mfu:.1f} %",
        format_peak_gib(plan),
        fits_mark(plan, priced.cluster, priced.memory_gb),
    ]


def _cost_lines(budget: Budget, speed: Speed, cluster: Cluster) -> list[str]:
    run = budget.to_json(speed, cluster.num_gpus)
    money = f", {run['cost']:,.0f} at {budget.price_per_gpu_hour} a GPU hour" if run["cost"] is not None else ""
    return [f"{budget.tokens:.3g} tokens take {run['days']:.1f} days, {run['gpu_hours']:,.0f} GPU hours{money}"]
