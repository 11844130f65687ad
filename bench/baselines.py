"""Usual layouts against ours under their own constraints, every zoo model on every cluster.

    python -m bench.baselines                        # what has no row yet, then docs/BASELINES.md
    python -m bench.baselines --models gpt2-xl       # some of the models
    python -m bench.baselines --before 2026-11-23    # rows of earlier days anew

A baseline (data parallel, FSDP, Megatron-LM with and without sequence parallelism, the plan that ships with the model) lays a model
out on its best mesh. Ours has the same mesh, the same ZeRO stage and no more memory (both by the network's sum), and is
the plan of least communication time there. Ours needs more: a fault, and the script ends with status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.support.kept_rows import ROOT, KeptRows, add_before, describe_dates
from bench.support.plan_reasons import explain_difference
from planner_core.core import cluster_names
from planner_core.models import ZOO
from planner_core.planning import Planner, Request, candidate_meshes, prepare_planner
from planner_core.planning.methods import BASELINES, Method
from planner_core.search import memory_bytes, search_within_budget

ROWS = KeptRows("baselines", ("model", "cluster", "baseline"))
TABLE = ROOT / "docs" / "BASELINES.md"
SAME = 1e-5
"""Relative difference of communication times that counts as none."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(ZOO))
    add_before(parser)
    args = parser.parse_args()
    for model in args.models:
        for cluster in cluster_names():
            ROWS.forget(args.before, model=model, cluster=cluster)
            if not any(key[:2] == (model, cluster) for key in ROWS.read()):
                measure(model, cluster)
    order = [(m, c) for m in ZOO for c in cluster_names()]
    rows = sorted(ROWS.read().values(), key=lambda r: order.index((r["model"], r["cluster"])))
    TABLE.write_text(table(rows), encoding="utf-8")
    sys.exit(any(r["outcome"].startswith("MORE") for r in rows))


def measure(model: str, cluster: str) -> None:
    """Keep the rows of a model on a cluster, all at once: a part of them would count as done."""
    for row in list(compare(model, cluster)):
        ROWS.append(row)
        print(model, cluster, row["baseline"], row["mesh"], row["outcome"], flush=True)


def compare(model: str, cluster: str) -> Iterator[dict[str, Any]]:
    """One row for each baseline that has a plan of the model on the cluster."""
    dtype = "float16" if "v100" in cluster else "bfloat16"
    planner = prepare_planner(Request(model, cluster=cluster, batch=ZOO[model].batch, dtype=dtype))
    for usual in BASELINES.values():
        row = against(planner, usual)
        if row:
            yield {"model": model, "cluster": cluster, "baseline": usual.title, **row}


def against(planner: Planner, usual: Method) -> dict[str, Any] | None:
    """Return the seconds and bytes on the wire, theirs and ours, on the mesh on which the baseline's plan takes least time."""
    best = None
    for mesh in candidate_meshes(planner.request, planner.cluster):
        restrict = usual.restrict(planner.graph, mesh)
        if restrict is not None:
            problem = planner.problem(planner.cost_model(mesh, zero=usual.zero), restrict)
            answer = search_within_budget(problem)
            if answer.assignment is not None and (best is None or answer.value < best[1].value):
                best = problem, answer
    if best is None:
        return None
    problem, answer = best
    # of its plans as fast, the one that communicates least
    least = search_within_budget(problem, objective="communication")
    free = planner.problem(planner.cost_model(problem.model.mesh, zero=usual.zero))
    ours = search_within_budget(free, objective="communication", budget=memory_bytes(least.assignment))
    if least.value < ours.value:  # a baseline's plan is a plan of the free space too
        ours = replace(ours, assignment=least.assignment, value=least.value)
    plans = [planner.plan(p, a, "", "", "communication") for p, a in ((problem, least), (free, ours))]
    change = ours.value - least.value
    outcome = "MORE" if change > SAME * least.value else "less" if change < -SAME * least.value else "same"
    if not ours.optimal:
        outcome += f"; the optimum is at most {100 * ours.gap / (1 + ours.gap):.2g} % below ours"  # the gap is relative to the bound
    wire = [sum(t.wire_bytes for t in p.cost.traffic) for p in plans]
    return {
        "mesh": str(problem.model.mesh),
        "outcome": outcome,
        "seconds": (least.value, ours.value),
        "wire": wire,
        "why": explain_difference(*plans) if outcome.startswith("less") else "",
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    count = {o: sum(r["outcome"].startswith(o) for r in rows) for o in ("MORE", "same", "less")}
    text = [
        "# Usual layouts under their own constraints",
        "",
        "Each baseline on the mesh on which it takes least time (batch and length of the zoo, whatever the cluster; mixed precision, so gradients are reduced in float32), the plan of that layout that "
        "communicates least, beside ours: least communication time on the same mesh, with the same ZeRO stage and no more memory. "
        "Memory is here the sum that the search bounds: it counts the 16-bit copy that a split weight keeps, and not the weights that FSDP "
        "gathers for a moment. So beside FSDP ours has little room, even where its peak would be far lower. "
        "MB are what one GPU sends in a step. Why ours needs less is read off the two plans: weights that lie otherwise, and collectives of "
        "one step that only one of them has, the first three of each. Made by `python -m bench.baselines`.",
        "",
        describe_dates(rows),
        "",
        f"- {len(rows)} layouts: ours needs more in {count['MORE']}, as much in {count['same']}, less in {count['less']}",
        "",
        "| model | cluster | baseline | mesh | theirs, ms | ours, ms | theirs, MB | ours, MB | outcome |",
        "|---|---|---|---|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        figures = [f"{1e3 * s:,.3g}" for s in r["seconds"]] + [f"{b / 1e6:,.0f}" for b in r["wire"]]
        told = r["outcome"] + (f": {r['why']}" if r["why"] else "")
        text.append("| " + " | ".join((r["model"], r["cluster"], r["baseline"], r["mesh"], *figures, told)) + " |")
    return "\n".join([*text, ""])


if __name__ == "__main__":
    main()
