"""Experts' plans against ours: every model type of transformers with a tensor-parallel plan, on 8 GPUs of one node.

    python -m bench.experts            # what has no row yet, then docs/EXPERTS.md

Both under the same constraints: one tensor axis of 8, the residual stream whole, every weight that the plan names split,
all else replicated, least communication. Theirs splits as `base_model_tp_plan` says, ours along any dim. Rows are kept
in bench/results/experts.jsonl; a child per model, with the limits of `bench.coverage`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

from bench.coverage import BATCH, ROOT, _graph, in_child, warm
from bench.coverage_models import causal_models, default_config

ROWS = ROOT / "bench" / "results" / "experts.jsonl"
TABLE = ROOT / "docs" / "EXPERTS.md"


def main() -> None:
    from planner_core.expert import expert_plans

    warm()
    causal = dict(causal_models())
    ROWS.parent.mkdir(exist_ok=True)
    done = {r["type"] for r in read_rows()}
    for kind in expert_plans():
        if kind in done or (len(sys.argv) > 1 and kind not in sys.argv[1:]):
            continue
        cls = causal.get(kind)
        row = {"type": kind, **(in_child(partial(_measure, kind, cls)) if cls else {"outcome": "no causal class"})}
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(kind, row.get("outcome"), row.get("theirs_bytes"), row.get("ours_bytes"), str(row.get("reason", ""))[:120], flush=True)
    TABLE.write_text(table(read_rows()), encoding="utf-8")


def read_rows() -> list[dict[str, Any]]:
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    return list({r["type"]: r for r in map(json.loads, lines)}.values())


def _measure(kind: str, cls: str, tell: Any) -> None:
    from planner_core.errors import PlannerError

    try:
        graph, dtype = _graph(default_config(kind, cls), kind, cls)
        tell(**compare(graph, dtype))
    except PlannerError as error:
        tell(outcome="refused", reason=str(error))
    except Exception as error:
        tell(outcome="refused", reason=f"{type(error).__name__}: {str(error)[:150]}")


def compare(graph: Any, dtype: str = "bfloat16") -> dict[str, Any]:
    """The comparison on 8 GPUs, or on 4 or 2 where the heads allow the expert's plan no more."""
    row: dict[str, Any] = {}
    for gpus in (8, 4, 2):
        row = {"gpus": gpus, **_on(gpus, graph, dtype)}
        if row["outcome"] != "theirs: no plan":
            break
    return row


def _on(gpus: int, graph: Any, dtype: str) -> dict[str, Any]:
    """Bytes on the wire per GPU and step, theirs and ours, and the collectives of each."""
    from planner_core.expert import expert_rules
    from planner_core.planner import Request, meshes, prepare
    from planner_core.search import search

    request = Request(model=graph.name, cluster=node(gpus), mesh=str(gpus), dtype=dtype)
    planner = prepare(request, graph)
    mesh = meshes(request, planner.cluster)[0]
    found: dict[str, Any] = {}
    for who, free in (("theirs", False), ("ours", True)):
        rules = expert_rules(graph, mesh, free=free)
        if rules is None:
            return {"outcome": "names nothing"}
        problem = planner.problem(mesh, rules, zero=0)
        answer = search(problem, objective="communication")
        if answer.assignment is None:
            return {"outcome": f"{who}: no plan"}
        plan = planner.plan(problem, answer, who, who, "communication")
        found[f"{who}_bytes"] = sum(t.wire_bytes for t in plan.cost.traffic)
        found[f"{who}_s"] = answer.value
        found[who] = ", ".join(f"{t.count} {t.kind} {t.phase}" for t in plan.cost.traffic)
    ratio = found["ours_s"] / found["theirs_s"] if found["theirs_s"] else 1.0 + found["ours_s"]
    return {"outcome": "less" if ratio < 1 - 1e-6 else "same" if ratio <= 1 + 1e-6 else "MORE", **found}


def node(gpus: int) -> dict[str, Any]:
    """A node of H100s with fewer GPUs."""
    from planner_core.cluster import load_cluster

    data = load_cluster("1x8-h100").to_json()
    return {**data, "name": f"1x{gpus}-h100", "num_gpus": gpus, "levels": [{**data["levels"][0], "size": gpus}]}


def table(rows: list[dict[str, Any]]) -> str:
    judged = [r for r in rows if "ours_s" in r]
    worse = sum(r["outcome"] == "MORE" for r in judged)
    text = [
        "# Experts' plans", "",
        f"{len(judged)} of the {len(rows)} model types of transformers with a tensor-parallel plan, on one axis of 8 GPUs (4 or 2 where "
        f"the heads allow their plan no more), batch {BATCH}, at most four layers. Theirs: weights split as `base_model_tp_plan` says; "
        "ours: the same weights split along any dim; the residual stream whole, all else replicated, least communication time. "
        "Made by `python -m bench.experts`.", "",
        f"- ours needs more in {worse}, as much in {sum(r['outcome'] == 'same' for r in judged)}, less in "
        f"{sum(r['outcome'] == 'less' for r in judged)}", "",
        "| type | GPUs | theirs, MB on the wire | ours | outcome | theirs | ours |", "|---|---:|---:|---:|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        mb = [f"{r[k] / 1e6:,.0f}" if k in r else "" for k in ("theirs_bytes", "ours_bytes")]
        told = r["outcome"] + (f": {r['reason'][:120]}" if r.get("reason") else "")
        cells = (r["type"], r.get("gpus", ""), *mb, told.replace("|", "/"), r.get("theirs", ""), r.get("ours", ""))
        text.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*text, ""])


if __name__ == "__main__":
    main()
