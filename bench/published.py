"""Predict every published run that can be stated, and say by how much each prediction errs.

    python -m bench.published              # predict what has no row yet, then docs/PUBLISHED.md and two files of assets
    python -m bench.published --redo       # all runs anew (half a minute a hundred runs, once the models are read)
    python -m bench.published --table      # docs/PUBLISHED.md, assets/bands.json and the runs of the page “Measured” alone

A run is stated as `price` takes it and priced by it: shape, GPUs, links, layout, micro-batch, recomputation, compiled or
eager. What is measured never enters the prediction. Rows are kept in bench/support/results/published.jsonl with each one's
derivatives by the fitted constants, from which the errors on groups and sources left out of the fit follow
(`bench/support/published/fit.py`).
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.published import memory as published_memory
from bench.support.published import pairs as published_pairs
from bench.support.published.fit import OF_STACKS, PRIORS
from bench.support.published.runs import Run, plan_run, read_runs
from bench.support.published.table import format_document, list_predictions, make_bands
from planner_core.core import ASSETS, Gpu, InputError, Plan
from planner_core.cost import CostModel, cost_model, price_units, step_seconds
from planner_core.planning import Planner
from planner_core.planning.pricing import PREDICTIONS_FILE

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "bench" / "support" / "results" / "published.jsonl"
TABLE = ROOT / "docs" / "PUBLISHED.md"
STEP = 0.05
"""Relative change of a constant by which its derivative is taken."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    known = {} if args.redo else {row["id"]: row for row in _read_rows()}
    if not args.table:
        for run in sorted(read_runs(), key=lambda r: json.dumps(r.config)):
            if run.id not in known:
                known[run.id] = row = {"id": run.id, **_price_run(run)}
                print(run.id, run.name, row.get("predicted_s", row.get("refused")), flush=True)
        ROWS.write_text("".join(json.dumps(known[name]) + "\n" for name in sorted(known)))
    every = {run.id: run for run in read_runs()}
    found = [(every[name], row) for name, row in sorted(known.items()) if name in every]
    paired = published_pairs.price_runs(args.redo)
    TABLE.write_text(format_document(found, paired))
    with PREDICTIONS_FILE.open("w", encoding="utf-8", newline="") as file:
        rows = list_predictions(found)
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (ASSETS / "bands.json").write_text(json.dumps(make_bands(found, paired), indent=2) + "\n")
    if not args.table:
        published_memory.main(args.redo)


def _read_rows() -> Iterator[dict[str, Any]]:
    if ROWS.exists():
        yield from map(json.loads, ROWS.read_text().splitlines())


def _price_run(run: Run) -> dict[str, Any]:
    """Return the predicted seconds and their derivatives by each constant, or why the run is refused."""
    try:
        plan, planner = plan_run(run)
    except InputError as refused:
        return {"refused": str(refused)}
    if plan is None:
        return {"refused": "the layout is not legal for the model"}
    return _price_with_derivatives(plan, planner)


def _price_with_derivatives(plan: Plan, planner: Planner) -> dict[str, Any]:
    """Return the predicted seconds of a plan, and by how many percent they grow with a percent of each constant."""
    model = cost_model(planner.cluster, plan.mesh, planner.workload)
    seconds = _step_seconds(plan, planner, model)
    grown = {
        name: _step_seconds(plan, planner, _with_constant(model, name, 1 + STEP))
        for name in PRIORS
        if _matters_to(name, model)
    }
    by = {name: round(float(np.log(s / seconds) / np.log(1 + STEP)), 5) for name, s in grown.items()}
    return {"predicted_s": seconds, "by": by}


def _step_seconds(plan: Plan, planner: Planner, model: CostModel) -> float:
    return step_seconds(price_units(plan.blocks, planner.graph, model, planner.coarse), model)


def _matters_to(name: str, model: CostModel) -> bool:
    gpu, _, constant = name.partition(" ")
    return not constant or model.cluster.gpu.name.replace("A800", "A100").startswith(gpu)


def _with_constant(model: CostModel, name: str, factor: float) -> CostModel:
    """Return the model with one constant times a factor."""
    constant = name.partition(" ")[2]
    if constant:
        gpu = _changed_gpu(model.cluster.gpu, constant, factor)
        return replace(model, cluster=replace(model.cluster, gpu=gpu))
    if name in OF_STACKS:
        software = replace(model.software, **{name: getattr(model.software, name) * factor})
        return replace(model, software=software)
    timing = replace(model.timing, **{name: getattr(model.timing, name) * factor})
    return replace(model, timing=timing, contention=timing.contention)


def _changed_gpu(gpu: Gpu, constant: str, factor: float) -> Gpu:
    if constant == "flash1":
        rates = tuple(
            replace(r, forward=r.forward * factor, backward=r.backward * factor) if r.kernel == constant else r
            for r in gpu.attention.rates
        )
        return replace(gpu, attention=replace(gpu.attention, rates=rates))
    return replace(gpu, **{constant: getattr(gpu, constant) * factor})


if __name__ == "__main__":
    main()
