"""Published steps with pipeline stages, and sweeps of layouts with what ran out of memory, against their predictions.

`python -m bench.support.published.stages` prices what has no row yet (all take three minutes of processor time). No constant of the model is fitted to any of these sources: each is
stated by its shape, machine, layout and the stack that ran it, whose properties are read from its code (`assets/stacks.json`).
"""

from __future__ import annotations

import csv
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.published.runs import Row, Run, _parse_number, _read_config
from planner_core.core import ASSETS, InputError, load_cluster
from planner_core.planning.methods import Layout
from planner_core.planning.pricing import Pricer, Statement

CSV = ASSETS / "measurements" / "published" / "stages.csv"
ROWS = Path(__file__).resolve().parents[1] / "results" / "published_stages.jsonl"
KIND = "pipeline stages"
NODE, CLOSE = 8, 0.05
SOURCES = {
    "Aleph-Alpha": "Aleph Alpha",
    "SC21": "Megatron-LM, SC21",
    "Zero Bubble": "Zero Bubble",
    "CI golden": "Megatron-LM, CI",
    "dgxc": "dgxc (NeMo)",
}
HEAD = """\
## Pipeline stages, and sweeps of layouts

Runs of `assets/measurements/published/stages.csv`. Nothing of the model is fitted to any of these sources, so each one is a test. The band of plans
with stages is from those whose kernels are published, each source counted alike. *Fits* says of how many runs, those that ran out of memory among them, the verdict is right. The stack of a run is
that of its source, with properties that are read from its code; what a source does not state is taken as its stack's default.
"""
MISSING = """\
dgxc's NeMo hides tensor-parallel sums behind products (`ub_tp_comm_overlap: true` in its files; Transformer Engine exchanges them in as many parts as there are tensor
ranks, beside the products), which is not priced. Without the seconds of the tensor axis Llama-3.1-70B on 64 GPUs is 3.6 % above what was measured instead of 16.8 %, Llama-3-70B
fine-tuned on 32 GPUs 6 % instead of 20 %, GPT-3 175B on 128 GPUs with 6 stages a rank 0.3 % below instead of 10.6 % above, and with 12 stages a rank 9 % below: those
run 7 % slower than the same with 6 stages, where their shorter bubble makes them 2 % quicker by this count. Its gradients are kept and summed in bfloat16 (`grad_sync_dtype: bf16`), and stated so. The CI's runs are deterministic, which slows kernels. How
Aleph Alpha's mask and softmax without flash attention ran in 2023 is not published: these runs are in no band. Zero Bubble's runs with 45 GB and more are ZB-2p, which holds twice the micro-batches and is not an order that torch has.
Its first and last stages have a layer less than the others, and are stated so. The ratios that miss are of 14.6 B weights on 24 GPUs with two samples a micro-batch: ZB-1p came out 12 and
10 % quicker than 1F1B there and is predicted 17 and 14 % quicker. Its authors do not print the seconds of forward, backward and weight gradients; from their bubble rates
on 16 GPUs weight gradients are 29 % of a micro-batch, where the kernels counted here make them 32 %, so that less is left to wait for.

Whoever prices these layouts without `--stack` gets PyTorch's own operators, as plans and exported scripts run. Those are none of the source's three sets of kernels: norms run operator
by operator, as in two of them; recomputation ends at the last operator that saves something, and the source runs every layer and the head again to their ends; tensor ranks keep
their part of the logits, and the source gathers them on each rank (32 k tokens of 128 k words are 8.4 GB in bfloat16 and 16.8 GB in float32, several times). So runs with the norm kernel
come out too slow, those without it too fast, and full recomputation with 32 k tokens a micro-batch seems to fit. No choice of a default mends both: one number for each layout is the most that
can be said without the stack.

What decides whether a run fits is the flat 92 % of a GPU's memory. NCCL's communicators by its own source take, in each channel, 4 MiB (`NCCL_BUFFSIZE`), 4.7 MiB (LL128:
120 x 640 x 8 words of 8 bytes) and 0.5 MiB (LL) for each connection: with 24 channels inside a node, one connection of the ring and two of the tree, 0.69 GB for each
communicator. All memory that the driver shows (85.2 GB) less that for the world, for data and tensor ranks and for both neighbours in the pipeline judges 284 of the 304 runs right, the flat share 281.
It is not taken: how many channels a machine has is found by NCCL's search at run time (8 and 16 channels judge 280 to 284), it leaves nothing for fragmentation, and it does not explain what is judged
wrong. Five data-parallel runs that held 79 to 84 GB by this count ran, and 17 with tensor or pipeline ranks ran out of memory at 61 to 77 GB, with 8 to 32 k tokens a micro-batch:
communicators differ by 3 GB between these, at most.
"""


@dataclass(frozen=True, slots=True)
class StagedRun:
    """A run, its predicted seconds and bytes, and whether it is predicted to fit."""

    run: Run
    seconds: float
    bytes: float
    fits: bool

    @property
    def ran(self) -> bool:
        """Whether it was measured, and did not run out of memory."""
        return self.run.row["outcome"] == "ok"

    @property
    def error(self) -> float:
        """ln(predicted / measured)."""
        return math.log(self.seconds / self.run.measured_s)

    @property
    def has_known_kernels(self) -> bool:
        """Whether it is published how the run computed attention. Of Aleph Alpha's runs without flash attention it is not."""
        return "Aleph" not in self.run.source or "flash" in self.run.row["attention"]

    @property
    def source(self) -> str:
        """The name of the source in tables. Runs whose kernels are not known are a line of their own."""
        name = next(shown for part, shown in SOURCES.items() if part in self.run.source)
        return name if self.has_known_kernels else f"{name}, without flash attention"


def stage_runs() -> Iterator[Run]:
    """Yield every row, as it is stated."""
    with CSV.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gpu = "h100" if "H100" in row["gpu"] else "a100"
            gpus = int(row["gpus"])
            cluster = f"4x8-{gpu}:nodes={max(1, gpus // NODE)},inter={400 if gpu == 'h100' else 200}"
            yield Run(
                row["id"],
                row["source"],
                row["model"],
                gpu,
                gpus,
                cluster,
                _read_config(row),
                _state_row(row),
                _parse_number(row["step_time_s"]),
                row,
            )


def _state_row(row: Row) -> Statement:
    """Return a row as `price` takes it."""
    dp, tp, pp, cp = (int(_parse_number(row[k], 1)) or 1 for k in ("dp", "tp", "pp", "cp"))
    vp = (int(_parse_number(row["vp"], 1)) or 1) if pp > 1 else 1
    order = {"zb": "zb" if vp == 1 else "zbv"}.get(row["schedule"], row["schedule"]) if pp > 1 else ""
    # Aleph Alpha does not state the stage; what fits and what does not is that of sharded optimizer states with whole bfloat16 gradients.
    usual = "1" if "Aleph" in row["source"] else "0"
    zero = int(row["zero_stage"][:1] or usual) if dp > 1 else 0
    layout = Layout(
        dp=dp,
        tp=tp,
        sp=tp > 1 and row["sp"] in ("1", "True"),
        cp=cp,
        cp_type="gather" if cp > 1 else "ring",
        pp=pp,
        vp=vp,
        schedule=order,
        zero=zero,
        copies=_published_copies(row, pp * vp),
    )
    return Statement(
        layout,
        int(row["micro_batch_seqs"]),
        int(_parse_number(row["grad_accum"], 1)),
        int(row["seq_len"]),
        recompute="full" if row["recompute"].startswith("full") else "none",
        **_state_software(row),
    )


def _published_copies(row: Row, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage where a source says them: Zero Bubble's first and last stages have one less than the others (section
    5.1)."""
    each, rest = divmod(int(row["layers"]) + 2, stages)
    is_dealt_out = "Zero Bubble" in row["source"] and stages > 2 and not rest and each > 1
    return (each - 1, *(each,) * (stages - 2), each - 1) if is_dealt_out else ()


def _state_software(row: Row) -> dict[str, Any]:
    """Return the stack of a row and its attention kernel, as its source says."""
    how = row["attention"]
    if "Aleph" in row["source"]:
        kernel = "flash1" if "v1" in how else "flash2" if "flash" in how else "softmax"
        return {"stack": "scaling-rms" if "RMS" in how else "scaling", "attention": kernel, "gradients": "bfloat16"}
    # cuDNN's attention on H100; neither SC21 nor Zero Bubble's fork of 2023 runs flash attention
    new = "dgxc" in row["source"] or "CI" in row["source"]
    kernel = "cudnn" if new and "H100" in row["gpu"] else "flash2" if new else "softmax"
    # dgxc's files say `grad_sync_dtype: bf16` (35a9aec), and its scripts `grad_reduce_in_fp32 = False` (741c886)
    gradients = "bfloat16" if "dgxc" in row["source"] else "float32"
    return {"stack": "megatron", "attention": kernel, "gradients": gradients}


def priced_stage_runs() -> list[StagedRun]:
    """Return all runs that are priced already. A layout that is not legal for the model is left out."""
    return _priced_already(stage_runs())


def runs_without_a_stack() -> Iterator[Run]:
    """Yield Aleph Alpha's runs with flash attention as whoever does not know their stack states them."""
    for run in stage_runs():
        if "Aleph" in run.source and "flash" in run.row["attention"]:
            yield replace(run, id=f"{run.id} without a stack", stated=run.stated.but(stack=None, attention=None))


def _priced_already(runs: Iterable[Run]) -> list[StagedRun]:
    known = _read_rows()
    return [StagedRun(run, *known[run.id]) for run in runs if known.get(run.id)]


def _read_rows() -> dict[str, Any]:
    return dict(map(json.loads, ROWS.read_text().splitlines())) if ROWS.exists() else {}


def main() -> None:
    """Price what has no row."""
    known = _read_rows()
    with ROWS.open("a", encoding="utf-8") as file:
        for run in (*stage_runs(), *runs_without_a_stack()):
            if run.id not in known:
                file.write(json.dumps([run.id, price_run(run)]) + "\n")


def price_run(run: Run) -> list[Any] | None:
    """Predicted seconds, bytes, and whether it fits, in the memory of the run's GPU; None for a layout that is not legal."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(run.config))
        try:
            plan = Pricer(str(config), load_cluster(run.cluster)).plan(run.stated)
        except InputError:
            return None
    return [plan.cost.step_time_s, plan.cost.memory_bytes["peak"], plan.fits] if plan else None


# --- the section ---------------------------------------------------------------------------------------


def format_section(staged_runs: Sequence[StagedRun]) -> str:
    """Return the section of docs/PUBLISHED.md."""
    lines = [
        HEAD,
        "| source | ran | time: median | nine in ten | bias | fits: right of | |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    groups: dict[str, list[StagedRun]] = defaultdict(list)
    for t in staged_runs:
        groups[t.source].append(t)
    lines += [_format_row(name, groups[name]) for name in sorted(groups)]
    keys: tuple[tuple[str, Callable[[StagedRun], object]], ...] = (
        ("tensor ranks", lambda t: t.run.stated.layout.tp),
        ("stages", lambda t: t.run.stated.layout.pp),
        ("micro-batch", lambda t: t.run.stated.micro_batch),
        ("recompute", lambda t: t.run.stated.recompute),
    )
    for title, key in keys:
        lines += [
            "",
            f"Aleph Alpha's runs with flash attention by {title}:",
            "",
            "| | ran | median | nine in ten | bias | right of | |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]
        parts: dict[Any, list[StagedRun]] = defaultdict(list)
        for t in groups["Aleph Alpha"]:
            parts[key(t)].append(t)
        lines += [_format_row(str(name), parts[name]) for name in sorted(parts)]
    lost = _list_regrets(groups["Aleph Alpha"])
    lines += [
        "",
        f"In {sum(x <= CLOSE for x in lost)} of {len(lost)} of Aleph Alpha's sweeps (GPUs, tokens, kernels) the layout that is predicted best costs at most 5 % over the one that was measured best; at worst {max(lost):.0%}.",
    ]
    spread = np.abs(_spread_over_kernels(groups["Aleph Alpha"]))
    lines += [
        f"They ran {len({_layout_key(t) for t in groups['Aleph Alpha']})} layouts with three sets of kernels. For whoever does not state the kernels, one number stands for all "
        f"runs of a layout: the best such number errs by {np.median(spread):.1%} in the median, and nine in ten times by at most {np.quantile(spread, 0.9):.0%}.",
    ]
    lines += _format_runs_without_a_stack()
    ratios = _list_schedule_ratios(groups["Zero Bubble"])
    lines += [
        f"Zero Bubble's orders over 1F1B at the same micro-batches: {sum(abs(x) <= CLOSE for x in ratios)} of {len(ratios)} ratios are predicted within 5 %.",
        "",
        MISSING,
    ]
    return "\n".join(lines)


def _format_runs_without_a_stack() -> list[str]:
    found = _priced_already(runs_without_a_stack())
    kinds: dict[str, list[StagedRun]] = defaultdict(list)
    for t in found:
        kinds[t.run.row["attention"].replace("_", " ")].append(t)
    lost = _list_regrets(found)
    return [
        "",
        "The same runs priced without a stated stack, by the source's kernels:",
        "",
        "| | ran | median | nine in ten | bias | right of | |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(_format_row(name, kinds[name]) for name in sorted(kinds)),
        _format_row("all", found),
        "",
        f"In {sum(x <= CLOSE for x in lost)} of {len(lost)} sweeps the layout that is predicted best so costs at most 5 % over the best one; at worst {max(lost):.0%}.",
    ]


def _format_row(name: str, staged_runs: Sequence[StagedRun]) -> str:
    errors = np.expm1([t.error for t in staged_runs if t.ran])
    right = sum(t.fits == t.ran for t in staged_runs)
    sizes = np.abs(errors)
    shown = (
        f"{np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {np.median(errors):+.1%}" if len(errors) else " | | "
    )
    return f"| {name} | {len(errors)} | {shown} | {right / len(staged_runs):.0%} | {len(staged_runs)} |"


def _list_regrets(staged_runs: Sequence[StagedRun]) -> list[float]:
    """By sweep: what the layout of least predicted seconds costs over the one of least measured seconds."""
    sweeps: dict[object, list[StagedRun]] = defaultdict(list)
    for t in staged_runs:
        if t.ran:
            sweeps[t.run.gpus, t.run.stated.seq, t.run.row["attention"]].append(t)
    return [
        min(s, key=lambda t: t.seconds).run.measured_s / min(t.run.measured_s for t in s) - 1
        for s in sweeps.values()
        if len(s) > 4
    ]


def _layout_key(of: StagedRun) -> object:
    """Return all that a run states but its kernels."""
    return of.run.gpus, of.run.stated.but(stack=None, attention=None)


def _spread_over_kernels(staged_runs: Sequence[StagedRun]) -> list[float]:
    """By run: the error of the best number for all measured runs of its layout, the middle of the fastest and the slowest."""
    groups: dict[object, list[float]] = defaultdict(list)
    for t in staged_runs:
        if t.ran:
            groups[_layout_key(t)].append(t.run.measured_s)
    return [math.sqrt(min(group) * max(group)) / s - 1 for group in groups.values() for s in group]


def _list_schedule_ratios(staged_runs: Sequence[StagedRun]) -> list[float]:
    """Errors of the ratios between an order and 1F1B with the same model, GPUs and micro-batches."""
    groups: dict[object, dict[str, list[StagedRun]]] = defaultdict(lambda: defaultdict(list))
    for t in staged_runs:
        stated, row = t.run.stated, t.run.row
        if stated.layout.schedule == "zb" and _parse_number(row["mem_gb"]) > 1.2 * _least_memory(staged_runs, t):
            continue  # ZB-2p
        groups[t.run.name, t.run.gpus, stated.micro_batch, stated.accumulate][stated.layout.schedule].append(t)
    return [
        t.error - group["1f1b"][0].error
        for group in groups.values()
        for order, these in group.items()
        if order != "1f1b" and "1f1b" in group
        for t in these
    ]


def _least_memory(staged_runs: Sequence[StagedRun], of: StagedRun) -> float:
    """Return the least memory that a run of the same model, GPUs and micro-batch was measured to take."""
    same = [
        _parse_number(t.run.row["mem_gb"])
        for t in staged_runs
        if (t.run.name, t.run.gpus, t.run.stated.micro_batch) == (of.run.name, of.run.gpus, of.run.stated.micro_batch)
    ]
    return min((m for m in same if m), default=math.inf)


def errors_of_sources_alike(staged_runs: Sequence[StagedRun]) -> Any:
    """The errors of runs with stages and known kernels: as many quantiles of each source, so that all count alike."""
    by: dict[str, list[float]] = defaultdict(list)
    for t in staged_runs:
        if t.ran and t.has_known_kernels and t.run.stated.layout.pp > 1:
            by[t.source].append(t.error)
    quantiles = np.linspace(0.02, 0.98, 25)
    return np.concatenate([np.quantile(errors, quantiles) for errors in by.values()])


if __name__ == "__main__":
    main()
