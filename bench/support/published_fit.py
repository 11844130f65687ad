"""Fit the constants of the time model to published runs, and say what it errs by on groups that were left out of the fit.

The step's time is nearly linear in the logarithms of its constants, so one matrix of derivatives serves the fit on all runs
and on every fold: minimise the sum of soft-l1((f0 + J p - y) / 6 %) + (p / prior)^2 over p, the logarithms of the
constants' factors. A group is a source, model, GPU, layout and recomputation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.published_runs import Run

Floats = NDArray[np.floating[Any]]
PRIORS = {
    "contention": 0.2, "straggler": 0.5, "step_s": 0.5, "optimizer": 0.3, "sharded_copy": 0.5, "accumulate": 0.5,
    "fused_eager": 0.4, **{f"{gpu} {name}": width for gpu in ("A100", "H100") for name, width in
                           (("flops_efficiency", 0.1), ("memory_efficiency", 0.1), ("flash1", 0.2))},
}  # fmt: skip
"""How far each constant may lie from what it is, as the width of a prior in logarithms."""
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
BROADCASTS = "ZeRO-1 over all ranks sends tensor by tensor, rank by rank: its time grows with ranks times tensors"
MANY = 128


def odd(run: Run) -> str:
    """Why a run is not fitted; "" if it is."""
    if run.id in ODD:
        return ODD[run.id]
    loops = "nanotron" in run.source or run.row["notes"].startswith("zero1=-1")
    return BROADCASTS if run.stated.layout.zero == 1 and loops and run.stated.layout.dp >= MANY else ""


def fit(derivatives: Floats, start: Floats, measured: Floats, widths: Floats, rows: Floats) -> Floats:
    """[constant] logarithms of factors. `derivatives` [run, constant], `start` and `measured` [run] logarithms of seconds,
    `rows` [run] weights (0: left out)."""
    p: Floats = np.zeros(derivatives.shape[1])
    for _ in range(50):
        residual = (start + derivatives @ p - measured) / SCALE
        weight = rows / np.sqrt(1 + residual**2)  # soft-l1 as reweighted squares
        a = derivatives.T * weight
        p = np.linalg.solve(a @ derivatives / SCALE**2 + np.diag(widths**-2), a @ (measured - start) / SCALE**2)
    return p


def left_out(
    derivatives: Floats, start: Floats, measured: Floats, widths: Floats, rows: Floats, folds: Sequence[object]
) -> Floats:  # fmt: skip
    """[run] logarithms of predicted over measured, each run predicted by a fit that did not see its fold."""
    found = np.zeros(len(start))
    for fold in set(folds):
        here = np.array([f == fold for f in folds])
        p = fit(derivatives, start, measured, widths, np.where(here, 0.0, rows))
        found[here] = (start + derivatives @ p - measured)[here]
    return found


def fold_of(run: Run) -> int:
    """One of five folds, the same for all runs of a group."""
    group = "|".join((run.source, run.name, run.gpu, run.layout, run.stated.recompute))
    return int(hashlib.sha256(group.encode()).hexdigest(), 16) % FOLDS


def source_of(run: Run) -> str:
    """The source, for leaving whole sources out."""
    return run.source
