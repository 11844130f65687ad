"""Every plan of a model, in files that the processes of a test can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import planner_core as shardscope

TWO = "1x8-h100:gpus=2"


def saved_plans(model: nn.Module, inputs: Any, folder: Path, prefix: str = "") -> tuple[shardscope.Result, list[str]]:
    """Return what is planned for two GPUs, and the file of each of its plans."""
    report = shardscope.plan(model, inputs=inputs, cluster=TWO, accumulate=1)
    files = [str(folder / f"{prefix}{plan.name}") for plan in report.plans]
    for plan, file in zip(report.plans, files, strict=True):
        shardscope.save_plan(plan, file)
    return report, files
