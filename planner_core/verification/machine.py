"""Measure this machine in processes of its own; `measure` also runs under torchrun."""

from __future__ import annotations

from typing import Any

import torch

from planner_core.core import InputError, named_check
from planner_core.verification.measure import measure
from planner_core.verification.processes import run_ranks

MAX_RANKS = 64


def measure_machine(ranks: int | None) -> dict[str, Any]:
    """Run `measure` with one rank per GPU and nccl; without GPUs, with `ranks` processes (2) and gloo."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = ranks if ranks is not None else gpus or 2
    if not 1 <= number <= (gpus or MAX_RANKS):
        raise InputError(
            named_check("ranks", number),
            f" is not a number from 1 to {gpus or MAX_RANKS}; give e.g. ",
            named_check("ranks", gpus or 2),
        )
    measured: dict[str, Any] = run_ranks(_measure_on_rank, number, (gpus > 0,), backend="nccl" if gpus else "gloo")[0]
    return measured


def _measure_on_rank(on_gpu: bool) -> dict[str, Any]:
    if on_gpu:
        torch.cuda.set_device(torch.distributed.get_rank())
    return measure()
