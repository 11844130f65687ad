"""docs/HARDWARE.md from the rows of all runs, and the predictions beside them, which the page "Measured" shows."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planner_core as shardscope
from bench.gpu.cases import CASES, OURS, ROWS, Case
from planner_core.planning.pricing import ONE_RANK_FILE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "HARDWARE.md"
GIB = 2**30
MAX_SHOWN_KINDS = 8


def read_measured_rows() -> Iterator[dict[str, Any]]:
    """Yield every row that was measured, with the id of its line."""
    for file in sorted(ROWS.glob("*.jsonl")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            yield {"id": f"{file.stem}-{number}", **json.loads(line)}


def read_steps() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield the rows of steps, with their cases."""
    for row in read_measured_rows():
        case = CASES.get(Path(row["plan"]).stem)
        if case is not None and "step_s" in row:
            yield case, row


def predict(case: Case, compiled: bool) -> tuple[float, int]:
    """Return the seconds of compute and optimizer of one rank, and bytes at the peak."""
    return _predict(case.name, compiled)


@functools.cache
def _predict(name: str, compiled: bool) -> tuple[float, int]:
    case = CASES[name]
    priced = shardscope.price(
        case.model, cluster=case.cluster, layout=case.layout, advise=False, compiled=compiled, **case.options
    )
    assert priced.plan is not None, (name, priced.reasons)
    cost = priced.plan.cost
    return cost.compute_time_s + cost.optimizer_time_s, int(cost.memory_bytes["peak"])


def read_judged_steps() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield the rows that predictions are held to: our own program, where a fake group does what a real one does."""
    yield from ((case, row) for case, row in read_steps() if row["way"] == OURS and not row.get("note"))


def write_page() -> None:
    """Write the page, and the file of predictions."""
    predictions = [
        {
            "id": row["id"],
            "what": case.what,
            "gpu": row["gpu"],
            "ranks": row["ranks"],
            "layout": case.layout,
            "compiled": int(row["compiled"]),
            "date": row["date"],
            "torch": row["torch"],
            "measured_s": row["step_s"],
            "predicted_s": round(predict(case, row["compiled"])[0], 5),
            "measured_bytes": row["peak_allocated_bytes"],
            "predicted_bytes": predict(case, row["compiled"])[1],
        }
        for case, row in read_judged_steps()
    ]
    with ONE_RANK_FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(predictions[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(predictions)
    PAGE.write_text(make_page(), encoding="utf-8")


def make_page() -> str:
    """Return the page."""
    measured = list(read_steps())
    machines = sorted({(r["date"], r["gpu"], r["torch"], r["transformers"]) for _, r in measured})
    lines = [
        "# One rank on real GPUs",
        "",
        "Made by `python -m bench.gpu --table` from [assets/measurements/one_rank](../assets/measurements/one_rank); a machine with a GPU "
        "writes rows by `python -m bench.gpu`.",
        "",
        "A plan of n ranks runs as rank 0 of a fake process group of n ranks at full size: all compute, casts, copies, allocations and the "
        "optimizer are real, and collectives move nothing. So a row says what a rank computes and holds, and nothing of the network. "
        "Seconds are medians without the first step. *Host* is the time until the host had issued the step: where it is the step's, the "
        "GPU waits for the host. Predicted are compute with its waits for the host, and the optimizer; and the peak.",
        "",
        *(
            f"- {date}: {gpu}, torch {torch}, transformers {transformers}"
            for date, gpu, torch, transformers in machines
        ),
        "",
        "| run | date | way | step, ms | host, ms | predicted, ms | peak, GiB | reserved, GiB | predicted, GiB |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
        *(_line(case, row) for case, row in measured),
        "",
        *(f"\\* {note}" for note in dict.fromkeys(row["note"] for _, row in measured if row.get("note"))),
        "",
        "## Kernels of a step by kind",
        "",
        "Milliseconds (launches) of one profiled step, the longest kinds of each; rows that were not profiled are left out.",
        "",
        *_kinds(measured),
        *_scripts(),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _line(case: Case, row: dict[str, Any]) -> str:
    ms = peak = "–"
    if row["way"] == OURS and not row.get("note"):
        seconds, num_bytes = predict(case, row["compiled"])
        ms, peak = f"{1e3 * seconds:.0f}", f"{num_bytes / GIB:.1f}"
    star = r" \*" if row.get("note") else ""
    way = f"{row['way']}{', compiled' if row['compiled'] else ''}{star}"
    return (
        f"| {case.what} | {row['date']} | {way} | {1e3 * row['step_s']:.0f} | {1e3 * row['host_s']:.0f} | {ms} | "
        f"{row['peak_allocated_bytes'] / GIB:.1f} | {row['peak_reserved_bytes'] / GIB:.1f} | {peak} |"
    )


def _kinds(measured: list[tuple[Case, dict[str, Any]]]) -> Iterator[str]:
    for case, row in measured:
        if kinds := row.get("kinds_us"):
            kinds_text = ", ".join(
                f"{kind} {us / 1e3:.1f} ({count})" for kind, (us, count) in list(kinds.items())[:MAX_SHOWN_KINDS]
            )
            yield f"- {case.what}, {row['way']}{', compiled' if row['compiled'] else ''} ({row['date']}): {kinds_text}"


def _scripts() -> Iterator[str]:
    for row in read_measured_rows():
        if row["way"] == "script":
            yield ""
            yield (
                f"The exported script's ten losses ({row['date']}): {row['error']}"
                if "error" in row
                else f"The exported script's ten losses ({row['date']}) are at most {row['largest_difference']:.1e} from those on a CPU."
            )


if __name__ == "__main__":
    write_page()
