"""What the allocator reserves beside the tensors, fitted to published peaks: assets/reserved.json and its part of docs/PUBLISHED_MEMORY.md.

`reserved = scale · peak + add_bytes`, one pair of numbers for each kind of run. The fit takes the least sum of |ln(fitted / measured)|,
where no run counts for more than `FAR`, over a grid: the figures are read off plots, and a finer fit would say nothing more. Runs that
their own source contradicts (`memory.contradicted`) are not fitted, and are counted in every error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from planner_core.core import ASSETS

TABLE = ASSETS / "reserved.json"
MEASURED = Path("docs/HARDWARE.md")
"""The page of the measured peaks."""
SCALES = np.arange(1.0, 1.36, 0.01)
ADDS = np.arange(0.0, 2.6, 0.1) * 2**30
FAR, CLOSE = 0.3, 0.10
OUTSIDE = {
    "value": 2 * 2**30,
    "what": "bytes of a GPU that the allocator of one of several ranks cannot have: what the driver keeps back of the size in "
    "nvidia-smi, CUDA's context, and NCCL's buffers",
    "source": "out-of-memory messages of runs of several ranks, as nvidia-smi's size less torch's capacity, plus what the process uses "
    "less what PyTorch has: 0.75 + 1.43 GiB on A100 80 GB (github.com/wbfwonderful/Vad-R1/issues/11), 0.32 + 0.36 on RTX 3080 "
    "(github.com/huggingface/trl/issues/3436); the former, rounded, since it is a data centre's GPU",
}
HEAD = f"""\
## What the allocator reserves

A tool that asks PyTorch's allocator or the driver shows more than tensors: blocks that were freed and are kept, and pieces between
those in use. `reserved = scale x peak + bytes` is fitted to these runs, one pair of numbers for weights that are gathered and freed
(FSDP), one for weights that stay whole, and one for plans as they run, over the peaks that were measured of one rank ([{MEASURED.name}]({MEASURED.name});
`assets/reserved.json`). *Left out*: each part in turn, a source or a model, is predicted from
a fit to the others. Runs that their own table contradicts are not fitted, and are counted.

| kind | runs | scale | and GB | within 10 %: tensors alone | fitted | left out | left out by |
|---|--:|--:|--:|--:|--:|--:|---|"""


class Peak(NamedTuple):
    """A run's predicted peak of tensors and its measured peak, in bytes; the part that is left out with it; and whether it is fitted."""

    tensors: float
    measured: float
    part: str
    fitted: bool


class Fit(NamedTuple):
    """The two numbers of a kind."""

    scale: float
    add_bytes: float

    def ratios(self, peaks: Sequence[Peak]) -> np.ndarray:
        """Fitted over measured."""
        return np.array([(self.scale * p.tensors + self.add_bytes) / p.measured for p in peaks])

    def close(self, peaks: Sequence[Peak]) -> int:
        """Return how many of the runs are met within 10 %."""
        return int((abs(self.ratios(peaks) - 1) <= CLOSE).sum()) if peaks else 0


TENSORS_ALONE = Fit(1.0, 0.0)


def fit_peaks(peaks: Sequence[Peak]) -> Fit:
    """The fit of these runs."""
    fitted = [p for p in peaks if p.fitted]

    def miss(fit: Fit) -> float:
        return float(np.minimum(abs(np.log(fit.ratios(fitted))), FAR).sum())

    return min((Fit(float(a), float(b)) for a in SCALES for b in ADDS), key=miss)


def close_left_out(peaks: Sequence[Peak]) -> int:
    """Return how many runs a fit to the other parts meets within 10 %."""
    parts = {p.part for p in peaks}
    return sum(
        fit_peaks([p for p in peaks if p.part != part]).close([p for p in peaks if p.part == part]) for part in parts
    )


def format_section(kinds: Mapping[str, Sequence[Peak]]) -> str:
    """Return the part of the page."""
    lines = [HEAD]
    for kind, peaks in sorted(kinds.items()):
        fit, parts = fit_peaks(peaks), ", ".join(sorted({p.part for p in peaks}))
        close = f"{TENSORS_ALONE.close(peaks)} | {fit.close(peaks)} | {close_left_out(peaks)}"
        lines.append(f"| {kind} | {len(peaks)} | {fit.scale:.2f} | {fit.add_bytes / 2**30:.1f} | {close} | {parts} |")
    return "\n".join([*lines, ""])


def write_asset(kinds: Mapping[str, Sequence[Peak]]) -> None:
    """Write the asset."""
    rows = {}
    for kind, peaks in sorted(kinds.items()):
        fit, fitted = fit_peaks(peaks), [p for p in peaks if p.fitted]
        low, high = np.quantile(1 / fit.ratios(fitted), (0.05, 0.95))
        rows[kind] = {
            "n": len(fitted),
            "scale": round(fit.scale, 2),
            "add_bytes": round(fit.add_bytes),
            "low": round(float(low), 3),
            "high": round(float(high), 3),
        }
    source = (
        "Peaks of published runs (docs/PUBLISHED_MEMORY.md) over scale · predicted peak + add_bytes; plans as they run: of one rank on an "
        "H100 (docs/HARDWARE.md), over scale · measured peak + add_bytes. torchtitan and torchao print what the "
        "allocator had reserved; nanotron's figures are read off its plot. low, high: nine in ten of the fitted runs"
    )
    whole = {"schema": "shardscope.reserved/1", "source": source, "outside_bytes": OUTSIDE, "kinds": rows}
    TABLE.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
