"""What all tokens of a training take at a plan's speed: days, and money where a price is known. Pure."""

from __future__ import annotations

from explorer.text import units
from planner_core.core import Plan
from planner_core.planning.pricing import Budget, Speed, name_throughput


def budget_columns(budget: Budget | None) -> list[str]:
    """Return the heads of the columns."""
    if budget is None:
        return []
    kinds = ("days", "cost") if budget.price_per_gpu_hour is not None else ("days",)
    return [f"{kind} for {units.count(budget.tokens)} tokens" for kind in kinds]


def describe_speed(plan: Plan, speed: Speed, budget: Budget | None, num_gpus: int) -> str:
    """Say how fast a plan trains, and what all tokens take: `7 336 tokens/s per GPU, utilisation 36 %`."""
    pace = f"{units.whole(speed.tokens_per_s_per_gpu)} {name_throughput(plan)} per GPU, utilisation {units.percent(speed.mfu)}"
    return "; ".join((pace, *budget_cells(budget, speed, num_gpus)))


def budget_cells(budget: Budget | None, speed: Speed, num_gpus: int) -> list[str]:
    """Return the cells of a plan, under `budget_columns`: `12.5 days`, `300 k`."""
    if budget is None:
        return []
    run = budget.to_json(speed, num_gpus)
    days, cost = run["days"], run["cost"]
    assert days is not None
    return [f"{units.significant(days)} days", *([] if cost is None else [units.count(cost)])]
