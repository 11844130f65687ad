"""docs/ACCURACY.md from the rows of `bench.accuracy`: a summary, every difference by name, and one table for each check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from bench.support.kept_rows import describe_dates

Row = dict[str, Any]
GIB = 2**30
BIG = ("8", "2x8", "8x8", "64x8")


def format_page(rows: list[Row], models: Iterable[str]) -> str:
    """Return the whole page."""
    order = {m: i for i, m in enumerate(models)}
    rows = sorted(
        rows, key=lambda r: (order.get(r["model"], 99), r["mesh"].count("x"), len(r["mesh"]), r["mesh"], r["plan"])
    )
    numbers = [r for r in rows if r["check"] == "numbers"]
    fake = [r for r in rows if r["check"] in BIG]
    stated = [r for r in rows if r["check"] == "layouts"]
    none = [r for r in rows if r["check"] == "plan"]
    missing = [
        f"{m} on {c}"
        for m in order
        for c in ("numbers", *BIG)
        if not any(r["model"] == m and r["check"] == c for r in rows)
    ]
    return "\n".join(
        [
            *_format_head(rows),
            *_summarise([*numbers, *_rows_of_size(stated, "small")], [*fake, *_rows_of_size(stated, "whole")]),
            *_left_out(none, missing),
            *_list_differences(rows),
            *_format_layouts(stated),
            *_format_numbers(numbers),
            *_format_traffic_table(fake),
            "",
        ]
    )


def _format_head(rows: list[Row]) -> list[str]:
    def of(key: str) -> str:
        return "; ".join(sorted({str(r[key]) for r in rows if key in r}))

    return [
        "# Predicted and measured",
        "",
        "Every zoo model, and Llama-2-7B, under the chosen plan, each baseline, and the plans of TAP and ATP. Made by `python -m bench.accuracy` "
        f"({of('machine')}; {of('versions')}).",
        "",
        "- Numbers: the plan of 8 GPUs scaled down to meshes (2) and (4), that of 2×8 to (2,2): a small model of the same "
        "architecture on gloo processes, float32 (float64 where rounding alone could be the difference), against one process. "
        "Equal means loss, every gradient and every parameter after a step of AdamW within 1e-5 relative.",
        "- Traffic and memory: one step at full size on a fake process group of the mesh's world size, batch 16 (64 on 64×8), mixed "
        "precision with bf16, H100. The rewritten program runs, and the model's own code where it cannot be rewritten. Collectives must agree in phase, kind, count and bytes; memory is the peak of all live allocations of one rank, "
        "within 2 %.",
        "- " + describe_dates([r for r in rows if r["check"] != "plan"]) + _last_day(rows),
        "",
    ]


MIXED_SINCE = "2026-11-23"
"""The first day on which rows were made in mixed precision."""


def _last_day(rows: list[Row]) -> str:
    """Return which parts are of the last day, and what the older ones are."""
    measured = [r for r in rows if r["check"] != "plan"]
    last = max((str(r["date"]) for r in measured), default="")
    new = dict.fromkeys(f"{r['model']} ({r['check']})" for r in measured if r["date"] == last)
    old = sum(r["date"] < MIXED_SINCE for r in measured)
    words = f" Of {last}: {', '.join(new)}."
    return words + f" {old} rows are of earlier code and of pure bf16; their order was not compared." if old else words


def _summarise(numbers: list[Row], fake: list[Row]) -> list[str]:
    lines = ["## Summary", ""]
    if numbers:
        worst = max((r["grad_error"] for r in numbers if r.get("numbers_ok")), default=0.0)
        lines += [
            f"- numbers equal in {sum(bool(r.get('numbers_ok')) for r in numbers)} of {len(numbers)} runs, their collectives as "
            f"predicted in {sum(bool(r.get('collectives_ok')) for r in numbers)}; worst gradient error among the equal {worst:.1e}"
        ]
    if fake:
        errors = sorted(r["memory_error"] for r in fake if "memory_error" in r)
        lines += [
            f"- collectives at full size as predicted in {sum(bool(r.get('collectives_ok')) for r in fake)} of {len(fake)} runs"
        ]
        if errors:
            lines += [
                f"- memory within 2 % in {sum(e <= 0.02 for e in errors)} of {len(errors)}: median error "
                f"{100 * errors[len(errors) // 2]:.2f} %, worst {100 * errors[-1]:.2f} %"
            ]
    return [*lines, *_as_scheduled([*numbers, *fake]), ""]


def _as_scheduled(rows: list[Row]) -> list[str]:
    """Of how many rewritten programs the collectives came in the order of the schedule, and which models ran their own code."""
    ordered = [r for r in rows if r.get("order")]
    dispatched: dict[str, set[str]] = {}
    for r in rows:
        if r.get("dispatched"):
            dispatched.setdefault(r["dispatched"], set()).add(r["model"])
    return [
        f"- order of the collectives as scheduled in {sum(r['order'] == 'as scheduled' for r in ordered)} of {len(ordered)} rewritten programs",
        *(
            f"- {', '.join(sorted(models))}: the model's own code ran, since {why}"
            for why, models in dispatched.items()
        ),
    ]


def _left_out(none: list[Row], missing: list[str]) -> list[str]:
    places: dict[tuple[str, str], dict[str, list[str]]] = {}
    for r in none:
        places.setdefault((r["plan"], r["reason"]), {}).setdefault(r["model"], []).append(r["mesh"])
    lines = []
    for (plan, reason), where in places.items():
        by_meshes: dict[str, list[str]] = {}
        for model, meshes in where.items():
            by_meshes.setdefault(", ".join(meshes), []).append(model)
        words = "; ".join(f"{', '.join(models)} on {meshes}" for meshes, models in by_meshes.items())
        lines.append(f"- {plan} ({reason.removeprefix('no plan: ')}): {words}")
    if missing:
        lines.append(f"- not run yet: {', '.join(missing)}")
    return ["## Left out", "", *lines, ""] if lines else []


def _list_differences(rows: list[Row]) -> list[str]:
    bad = [r for r in rows if not r["ok"]]
    if not bad:
        return ["## Differences", "", "None.", ""]
    return [
        "## Differences",
        "",
        *(f"- {r['model']}, {r['plan']}, {_describe_place(r)}: {_explain(r)}" for r in bad),
        "",
    ]


def _describe_place(row: Row) -> str:
    """Where a row was measured."""
    stated = row["check"] == "layouts"
    return f"the {row['mesh']} model" if stated else f"mesh {row['mesh']} ({row['check']})"


def _explain(row: Row) -> str:
    if "reason" in row:
        return str(row["reason"]).replace("\n", " ")
    parts = []
    if not row["collectives_ok"]:
        both = row["collectives"]
        parts += [
            f"{phase} {kind}: predicted {_format_traffic(both['predicted'], phase, kind)}, measured {_format_traffic(both['measured'], phase, kind)}"
            for phase, kind in _list_cells(both)
            if _format_traffic(both["predicted"], phase, kind) != _format_traffic(both["measured"], phase, kind)
        ]
    if row.get("numbers_ok") is False:
        parts.append(f"gradient error {row['grad_error']:.1e} ({row['worst']}), loss {row['loss_error']:.1e}")
    if row.get("memory_error", 0) > 0.02:
        parts.append(f"memory {100 * row['memory_error']:.1f} % apart")
    if row.get("order") not in (None, "as scheduled"):
        parts.append(f"order: {row['order']}")
    return "; ".join(parts)


def _list_cells(both: dict[str, Any]) -> list[tuple[str, str]]:
    cells = Counter((p, k) for side in both.values() for p, kinds in side.items() for k in kinds)
    return sorted(cells)


def _format_traffic(side: dict[str, Any], phase: str, kind: str) -> str:
    row = side.get(phase, {}).get(kind) or {"count": 0, "bytes": 0}
    return f"{row['count']} × {row['bytes']:,} B"


def _format_numbers(rows: list[Row]) -> list[str]:
    lines = [
        "## Numbers",
        "",
        "| model | mesh | plan | collectives as predicted | worst gradient error | loss error | in |",
        "|---|---|---|---|---:|---:|---|",
    ]
    for r in rows:
        if "grad_error" not in r:
            lines.append(f"| {r['model']} | {_format_mesh(r)} | {r['plan']} | not run | | | |")
            continue
        lines.append(
            f"| {r['model']} | {_format_mesh(r)} | {r['plan']} | {_say_yes(r)} | {r['grad_error']:.1e} | {r['loss_error']:.1e} | {r['dtype']} |"
        )
    return [*lines, ""]


def _format_traffic_table(rows: list[Row]) -> list[str]:
    lines = [
        "## Traffic and memory",
        "",
        "| model | mesh | plan | collectives as predicted | peak predicted, GiB | measured, GiB | error | seconds |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        if "memory_error" not in r:
            lines.append(f"| {r['model']} | {_format_mesh(r)} | {r['plan']} | not run | | | | |")
            continue
        lines.append(
            f"| {r['model']} | {_format_mesh(r)} | {_name_plan(r)} | {_say_yes(r)} | {r['predicted_bytes'] / GIB:.2f} | {r['measured_bytes'] / GIB:.2f} "
            f"| {100 * r['memory_error']:.2f} % | {r['seconds']:.0f} |"
        )
    return lines


def _rows_of_size(stated: list[Row], size: str) -> list[Row]:
    """Return the rows of stated layouts on the whole model, or on the small one."""
    return [r for r in stated if r["mesh"] == size]


def _format_layouts(stated: list[Row]) -> list[str]:
    """One line for each layout that is stated: the whole model, and beside it the numbers of the small one."""
    small = {(r["model"], r["plan"]): r for r in _rows_of_size(stated, "small")}
    lines = [
        "## Layouts as stated, on 2x8",
        "",
        "Traffic, order and memory of the whole model on a fake process group of 16 GPUs; numbers of the small model on four processes, or eight for three axes.",
        "",
        "| model | layout | collectives as predicted | order | peak predicted, GiB | measured, GiB | error | worst gradient error, small |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for r in _rows_of_size(stated, "whole"):
        numbers = small.get((r["model"], r["plan"]), {})
        gradient = f"{numbers['grad_error']:.1e}" if "grad_error" in numbers else "not run"
        if "memory_error" not in r:
            lines.append(f"| {r['model']} | {_name_plan(r)} | not run | | | | | {gradient} |")
            continue
        lines.append(
            f"| {r['model']} | {_name_plan(r)} | {_say_yes(r)} | {r['order'] or 'not compared'} | {r['predicted_bytes'] / GIB:.2f} "
            f"| {r['measured_bytes'] / GIB:.2f} | {100 * r['memory_error']:.2f} % | {gradient} |"
        )
    return [*lines, ""] if stated else []


def _name_plan(row: Row) -> str:
    """Return a plan's name, and whether it fits."""
    return str(row["plan"]) + ("" if row.get("fits", True) else " (does not fit)")


def _format_mesh(row: Row) -> str:
    return "(" + str(row["mesh"]).replace("x", ",") + ")"


def _say_yes(row: Row) -> str:
    return "yes" if row.get("collectives_ok") else "**no**"
