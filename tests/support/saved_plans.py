"""Every plan of a model, in files that the processes of a test can load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import planner_core as shardscope

TWO = "1x8-h100:gpus=2"


def saved_plans(model: nn.Module, inputs: Any, folder: Path) -> tuple[shardscope.Result, list[str]]:
    """Return what is planned for two GPUs, without plans that run as another one does, and the file of each plan."""
    report = plan_for_two(model, inputs)
    files = [str(folder / plan.name) for plan in report.plans]
    for plan, file in zip(report.plans, files, strict=True):
        shardscope.save_plan(plan, file)
    return report, files


def plan_for_two(model: nn.Module, inputs: Any) -> shardscope.Result:
    """Return what is planned for two GPUs, without plans that run as another one does."""
    report = shardscope.plan(model, inputs=inputs, cluster=TWO, accumulate=1)
    return replace(report, plans=_leave_out_equals(report.plans))


def _leave_out_equals(plans: Sequence[shardscope.Plan]) -> tuple[shardscope.Plan, ...]:
    """Return the first of the plans whose blocks are equal; a baseline stands for a trade-off that is equal to it.

    Of a model without a residual stream Megatron-LM's two plans are equal, and often a trade-off with them.
    """
    kept: list[shardscope.Plan] = []
    for plan in sorted(plans, key=lambda plan: plan.name.startswith("trade-off")):
        if all(plan.blocks != other.blocks for other in kept):
            kept.append(plan)
    names = {plan.name for plan in kept}
    return tuple(plan for plan in plans if plan.name in names)
