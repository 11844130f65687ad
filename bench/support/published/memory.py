"""Peak memory of published runs against its prediction; `python -m bench.support.published.memory` writes docs/PUBLISHED_MEMORY.md and
assets/reserved.json.

A run is stated and priced as in `bench.published`; runs of grade B are taken too, since memory does not depend on links. nanotron
does not say whether its tensor parallelism splits the tokens between the products: it is stated so, because without it the
prediction for 8 and more ranks is 1.4 to 2.4 times what was measured. A row that has been priced is stored in `results/`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.gpu.cases import OURS
from bench.gpu.page import read_steps
from bench.support.published import reserved
from bench.support.published.runs import Run, plan_run, read_runs
from planner_core.core import InputError, load_cluster, load_timing
from planner_core.planning.pricing import GATHERED_WEIGHTS, PLANNED_PROGRAM, WHOLE_WEIGHTS

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "docs" / "PUBLISHED_MEMORY.md"
ROWS = ROOT / "bench" / "support" / "results" / "published_memory.jsonl"
CLOSE, HIGH = 0.10, 1.15
TELLING = ("InternEvo", "torchtitan", "ao", "modded-nanogpt")
"""The sources whose runs take about what is predicted."""
HEAD = """\
# Predicted against measured peak memory

Written by `python -m bench.support.published.memory`: every training run of grade A or B in
`assets/measurements/published/runs.csv` that `price` can state and whose source gives its peak memory. Shown is predicted
over measured. Predicted is what tensors take at the fullest moment of a step. nanotron's figure is read off its plot;
torchtitan and torchao report what the allocator had *reserved*, which holds fragments and blocks that it keeps for later.
nanotron's float32 buffer of all gradients stands through the whole step and is not divided by ZeRO-1, by its code
(`FP32GradientAccumulator`), and is stated so.
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """A run with its predicted and measured peak, in bytes."""

    run: Run
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def stated_runs() -> Iterator[Run]:
    """Return the runs of grade A or B, as they are stated here."""
    return map(as_it_ran, read_runs("AB"))


def as_it_ran(run: Run) -> Run:
    """With the tokens split between the products where nanotron runs tensor parallelism."""
    layout = run.stated.layout
    if layout.tp == 1 or "nanotron" not in run.source:
        return run
    return replace(run, stated=replace(run.stated, layout=replace(layout, sp=True)))


def predict_peak_bytes(run: Run) -> float | None:
    """Return the peak in bytes; None where the layout is not legal for the model."""
    try:
        plan = plan_run(run)[0]
    except InputError:
        return None
    return None if plan is None else plan.cost.memory_bytes["peak"]


def measured_peak_bytes(run: Run) -> float:
    """Return the published peak in bytes: the sources print GiB, most of them as GB."""
    return float(run.row["mem_gb"]) * 2**30


def _format_row(memories: Sequence[Memory]) -> str:
    """Return the columns of one row."""
    ratios = [m.ratio for m in memories]
    low, high = np.quantile(ratios, (0.05, 0.95))
    close = sum(abs(r - 1) <= CLOSE for r in ratios)
    return f"{len(memories)} | {statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} | {close}"


def _format_page(memories: Sequence[Memory]) -> str:
    """Return the page."""
    lines = [HEAD]
    keys = (
        ("source", publisher),
        ("layout", lambda r: f"tensor parallel {r.stated.layout.tp}" if r.stated.layout.tp > 1 else r.layout),
    )
    for title, key in keys:
        groups: dict[str, list[Memory]] = {}
        for m in memories:
            groups.setdefault(key(m.run), []).append(m)
        lines += [
            f"## By {title}\n",
            f"| {title} | runs | median | nine in ten | within 10 % |\n|---|--:|--:|---|--:|",
            *(f"| {name} | {_format_row(groups[name])} |" for name in sorted(groups, key=lambda n: (len(n), n))),
            f"| all | {_format_row(memories)} |\n",
        ]
    return "\n".join(
        [
            *lines,
            reserved.format_section(peaks_by_kind(memories)),
            _describe_scatter(memories),
            _describe_too_high(memories),
            "",
        ]
    )


def _group_equal_runs(memories: Sequence[Memory]) -> list[list[Memory]]:
    """Runs whose GPUs hold the same: they differ in data parallel ranks alone, and no state is sharded over those."""
    groups: dict[str, list[Memory]] = {}
    for m in memories:
        stated = m.run.stated
        if not stated.layout.zero and stated.layout.fsdp == 1:
            key = json.dumps([m.run.config, stated.layout.tp, stated.micro_batch, stated.accumulate > 1])
            groups.setdefault(key, []).append(m)
    return [group for group in groups.values() if len(group) > 1]


def _describe_scatter(memories: Sequence[Memory]) -> str:
    """Return how far measurements of the same lie apart."""
    groups = _group_equal_runs(memories)
    off = [abs(m.measured / statistics.median(n.measured for n in group) - 1) for group in groups for m in group]
    far = sum(x > CLOSE for x in off)
    return (
        "## The same, measured again\n\n"
        f"{len(off)} of these runs differ from another one in the number of data parallel ranks alone, over which nothing is "
        f"sharded: their GPUs hold the same. Yet {far} of them were measured more than 10 % away from the median of their group, "
        f"and one in ten more than {np.quantile(off, 0.9):.0%}. No prediction can come closer than that.\n"
    )


def is_contradicted(m: Memory, memories: Sequence[Memory]) -> bool:
    """Return whether its source has a run with half the micro-batch or less, on as many GPUs or more, that took as much memory."""
    mine = m.run.stated
    return any(
        other.run.config == m.run.config
        and other.run.gpus >= m.run.gpus
        and other.measured >= 0.9 * m.measured
        and (stated := other.run.stated).micro_batch * 2 <= mine.micro_batch
        and (stated.layout.tp, stated.layout.zero) == (mine.layout.tp, mine.layout.zero)
        for other in memories
    )


def own_peaks() -> list[reserved.Peak]:
    """Return the steps of one rank that `bench.gpu` measured, left out by model: what the allocator held beside the peak that it
    counted."""
    return [
        reserved.Peak(row["peak_allocated_bytes"], row["peak_reserved_bytes"], case.name, fitted=True)
        for case, row in read_steps()
        if row["way"] == OURS
    ]


def peaks_by_kind(memories: Sequence[Memory]) -> dict[str, list[reserved.Peak]]:
    """The runs by what the allocator keeps of them; weights that are gathered are left out by source, others by model."""
    kinds: dict[str, list[reserved.Peak]] = {GATHERED_WEIGHTS: [], WHOLE_WEIGHTS: [], PLANNED_PROGRAM: own_peaks()}
    for m in memories:
        gathered = m.run.stated.layout.fsdp > 1
        part = publisher(m.run) if gathered else str(m.run.row["model"])
        odd = m.ratio > HIGH and is_contradicted(m, memories)
        kinds[GATHERED_WEIGHTS if gathered else WHOLE_WEIGHTS].append(
            reserved.Peak(m.predicted, m.measured, part, fitted=not odd)
        )
    return kinds


def _describe_too_high(memories: Sequence[Memory]) -> str:
    """Return what is wrong with predictions that are far too high, as far as the data say."""
    high = [m for m in memories if m.ratio > HIGH]
    odd = sum(is_contradicted(m, memories) for m in high)
    return (
        f"Of {len(high)} runs whose prediction is more than 15 % too high, {odd} took no more memory than a run of the same source "
        "with half the micro-batch or less, on as many GPUs or more: both figures cannot be right.\n"
    )


def _describe_filling(shares: Mapping[str, Sequence[float]], memories: Sequence[Memory]) -> str:
    """Return how much of its GPU each source filled by the prediction; `shares` are by source."""
    usable = load_timing().usable_memory
    tellable = [x for name in TELLING for x in shares[name]]
    most = max(m.measured / memory_of(m.run) for m in memories)
    return "\n".join(
        [
            "## How full the GPUs were\n",
            "The predicted peak over the GPU's memory, of all runs that `price` can state. All of them ran; no source publishes "
            "one that ran out of memory. So the table says what has worked, and not where the limit lies.\n",
            "| source | runs | median | nine in ten below | fullest |\n|---|--:|--:|--:|--:|",
            *(
                f"| {name} | {len(x)} | {np.median(x):.2f} | {np.quantile(x, 0.9):.2f} | {max(x):.2f} |"
                for name, x in sorted(shares.items())
            ),
            "",
            "llm-foundry's loss makes no float32 logits, and some of nanotron's rows contradict their own table (above). Of the "
            f"{len(tellable)} runs of the others, {sum(x <= usable for x in tellable)} lie below {usable:.0%}, which is what plans "
            f"may fill (`usable_memory`); the fullest of them has {max(tellable):.0%}. The fullest that was *measured* had "
            f"{most:.0%} of its GPU.\n",
        ]
    )


def publisher(run: Run) -> str:
    """Return the name of a run's source."""
    return run.source.split(" ")[0].split("/")[-1]


def memory_of(run: Run) -> int:
    """Return the bytes of a run's GPU."""
    return load_cluster(run.cluster).gpu.memory_bytes


def main(redo: bool = False) -> None:
    """Price what has no row, or all of it, and write the page."""
    if redo:
        ROWS.unlink(missing_ok=True)
    known_bytes = dict(map(json.loads, ROWS.read_text().splitlines())) if ROWS.exists() else {}
    every = {run.id: run for run in stated_runs()}
    with ROWS.open("a", encoding="utf-8") as file:
        for name in sorted(every.keys() - known_bytes.keys()):
            known_bytes[name] = predict_peak_bytes(every[name])
            file.write(json.dumps([name, known_bytes[name]]) + "\n")
    priced_runs = {name: run for name, run in every.items() if known_bytes[name]}
    memories = [
        Memory(run, known_bytes[name], measured_peak_bytes(run))
        for name, run in priced_runs.items()
        if run.row["mem_gb"]
    ]
    shares: dict[str, list[float]] = {}
    for name, run in priced_runs.items():
        shares.setdefault(publisher(run), []).append(known_bytes[name] / memory_of(run))
    reserved.write_asset(peaks_by_kind(memories))
    TABLE.write_text(_format_page(memories) + _describe_filling(shares, memories), encoding="utf-8")


if __name__ == "__main__":
    main()
