"""Fit the constants of the time model to published runs, and say what it errs by on groups that were left out of the fit.

The step's time is nearly linear in the logarithms of its constants, so one matrix of derivatives serves the fit on all runs
and on every fold: minimise the sum of soft-l1((f0 + J p - y) / 6 %) + ((p - belief) / width)^2 over p, the logarithms of the
constants' factors. A group is a source, model, GPU, layout and recomputation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.published.runs import Run
from planner_core.core import load_gpu, load_stack, load_timing

Floats = NDArray[np.floating[Any]]
PRIORS = {
    "contention": (0.12, 0.5),
    "straggler": (0.004, 1.0),
    "outside_s": (0.02, 0.3),
    "sharded_copy": (1.75, 0.5),
    "accumulate": (2.5, 0.5),
    "fused": (0.43, 0.4),
    "rank_call_s": (6e-6, 0.5),
    "A100 flops_efficiency": (0.77, 0.5),
    "A100 memory_efficiency": (0.8, 0.1),
    "A100 flash1": (0.34, 0.2),
    "H100 flops_efficiency": (0.608, 0.5),
    "H100 memory_efficiency": (0.8, 0.1),
    "H100 flash1": (0.2, 0.2),
}
"""Of each constant that is fitted to runs, what it was thought to be before any run was seen (kernel tables, papers, counts),
and the width of that belief in logarithms. No fit starts from another's result, so what is left out is unseen."""
OF_STACKS = ("outside_s", "fused")
"""Constants of the stacks of published runs, which share one value (`assets/stacks.json`)."""
SCALE = 0.06
"""Residuals above this count by their size and no longer by their square."""
FOLDS = 5
ODD = {
    "r0422": "half the speed of the same run with ZeRO-1, in the source's own table",
    "r0179": "18 % slower than 16 and 64 GPUs of the same table",
    "r0120": "12 % slower than its neighbours in sequence length",
    "r0068": "9 % slower on 8 GPUs than the same run on 16",
    "r0349": "its H100 is probably the 500 W part of the same publisher's tables",
    "r0021": "the states fill the memory: the allocator stalls",
    "r0080": "the states fill the memory: the allocator stalls",
}
"""Runs that their own tables contradict, or whose cause no layout tells: not fitted, and counted in every error."""


def why_odd(run: Run) -> str:
    """Return why a run is not fitted; "" if it is."""
    return ODD.get(run.id, "")


def _current_constant(name: str) -> float:
    """Return a constant as it is in the product."""
    gpu, _, constant = name.partition(" ")
    if name in OF_STACKS:
        return float(getattr(load_stack("llm-foundry"), name))
    if not constant:
        return float(getattr(load_timing(), name))
    one = load_gpu({"A100": "a100-80gb-sxm", "H100": "h100-sxm"}[gpu])
    if constant == "flash1":
        return next(rate.forward for rate in one.attention.rates if rate.kernel == constant)
    return float(getattr(one, constant))


def _prior_factors() -> Floats:
    """[constant] logarithms of what each was thought to be over what it is."""
    return np.log([centre / _current_constant(name) for name, (centre, _) in PRIORS.items()])


def _fit_constants(derivatives: Floats, start: Floats, measured: Floats, rows: Floats) -> Floats:
    """[constant] logarithms of factors on the constants as they are. `derivatives` [run, constant], `start` and `measured`
    [run] logarithms of seconds, `rows` [run] weights (0: left out)."""
    belief, precision = _prior_factors(), np.diag([width**-2 for _, width in PRIORS.values()])
    p: Floats = np.zeros(derivatives.shape[1])
    for _ in range(50):
        residual = (start + derivatives @ p - measured) / SCALE
        weight = rows / np.sqrt(1 + residual**2)  # soft-l1 as reweighted squares
        a = derivatives.T * weight
        gap = a @ (measured - start) / SCALE**2 + precision @ belief
        p = np.linalg.solve(a @ derivatives / SCALE**2 + precision, gap)
    return p


def errors_left_out(
    derivatives: Floats, start: Floats, measured: Floats, rows: Floats, folds: Sequence[object]
) -> Floats:
    """[run] logarithms of predicted over measured, each run predicted by a fit that did not see its fold."""
    errors = np.zeros(len(start))
    for fold in set(folds):
        here = np.array([f == fold for f in folds])
        p = _fit_constants(derivatives, start, measured, np.where(here, 0.0, rows))
        errors[here] = (start + derivatives @ p - measured)[here]
    return errors


def fold_of(run: Run) -> int:
    """One of five folds, the same for all runs of a group."""
    group = "|".join((run.source, run.name, run.gpu, run.layout, run.stated.recompute))
    return int(hashlib.sha256(group.encode()).hexdigest(), 16) % FOLDS


def source_of(run: Run) -> str:
    """Return the source, for leaving whole sources out."""
    return run.source
