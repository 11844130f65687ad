"""Published training runs and their predicted times: the evidence behind the bands of step times.

`python -m bench.published` writes the file; see docs/PUBLISHED.md.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass

from planner_core.core import ASSETS

PREDICTIONS_FILE = ASSETS / "measurements" / "published" / "predicted.csv"
ONE_RANK_FILE = ASSETS / "measurements" / "one_rank" / "predicted.csv"
FITTED, GROUP_OUT, SOURCE_OUT = FITS = ("fitted", "group out", "source out")
"""The runs that a fit leaves out to predict a run: none; those of its group (source, model, GPU, layout, recomputation); those of its
source."""

GPU_BY_DRIVER_NAME = {"NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H200": "h200-sxm"}
"""Files in `assets/hardware` by the driver's name of the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A published run. `kind`: the kind of its band. `seconds`: the predicted seconds by fit (`FITS`). `contradicted`: how the source's
    own tables disagree about it; empty if they agree."""

    id: str
    source: str
    reference: str
    model: str
    gpu: str
    gpus: int
    nodes: int
    layout: str
    kind: str
    workload: str
    measured_s: float
    seconds: dict[str, float]
    contradicted: str

    def error(self, left_out: str = FITTED) -> float:
        """Predicted over measured, less one."""
        return self.seconds[left_out] / self.measured_s - 1


@functools.cache
def load_published_runs() -> tuple[PublishedRun, ...]:
    """Return every published run that could be priced."""
    with PREDICTIONS_FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_read_run(row) for row in csv.DictReader(file))


def _read_run(row: dict[str, str]) -> PublishedRun:
    # In the order of FITS.
    predicted = (row["predicted_s"], row["group_out_s"], row["source_out_s"])
    return PublishedRun(
        id=row["id"],
        source=row["source"],
        reference=row["reference"],
        model=row["model"],
        gpu=row["gpu"],
        gpus=int(row["gpus"]),
        nodes=int(row["nodes"]),
        layout=row["layout"],
        kind=row["kind"],
        workload=_describe_workload(row),
        measured_s=float(row["measured_s"]),
        seconds=dict(zip(FITS, map(float, predicted), strict=True)),
        contradicted=row["contradicted"],
    )


@functools.cache
def load_own_runs() -> tuple[PublishedRun, ...]:
    """Steps of one rank of our own program on a GPU, without a network (docs/HARDWARE.md). No constant is fitted to them."""
    with ONE_RANK_FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_own_run(row) for row in csv.DictReader(file))


def _own_run(row: dict[str, str]) -> PublishedRun:
    model, _, workload = row["what"].partition(", ")
    compiled = "compiled" if row["compiled"] == "1" else "eager"
    return PublishedRun(
        id=row["id"],
        source="Shardscope, one rank",
        reference=f"{row['date']}, torch {row['torch']}",
        model=model,
        gpu=GPU_BY_DRIVER_NAME.get(row["gpu"], row["gpu"]),
        gpus=int(row["ranks"]),
        nodes=1,
        layout=row["layout"],
        kind="one rank, no network",
        workload=f"{workload}, {compiled}",
        measured_s=float(row["measured_s"]),
        seconds=dict.fromkeys(FITS, float(row["predicted_s"])),
        contradicted="",
    )


def _describe_workload(row: dict[str, str]) -> str:
    """`micro-batch 8 × 2, 2048 tokens, full recomputation, eager`."""
    parts = f" × {row['accumulate']}" if row["accumulate"] != "1" else ""
    recompute = f"{'no' if row['recompute'] == 'none' else row['recompute']} recomputation"
    compiled = "compiled" if row["compiled"] == "1" else "eager"
    return f"micro-batch {row['micro_batch']}{parts}, {row['seq']} tokens, {recompute}, {compiled}"
