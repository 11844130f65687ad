"""The plans that ship with transformers against ours: every model type of transformers with a tensor-parallel plan, on 8 GPUs of one node.

    python -m bench.hf_tp_plans                        # what has no row yet, then docs/HF_TP_PLANS.md
    python -m bench.hf_tp_plans --types llama cohere   # some of the model types
    python -m bench.hf_tp_plans --before 2026-11-23    # rows of earlier days anew

Both under the same constraints: one tensor axis of 8, the residual stream whole, every weight that the plan names split,
all else replicated, least communication. Theirs splits as `base_model_tp_plan` says, ours along any dim. Rows are kept
in bench/support/results/hf_tp_plans.jsonl; a child per model, with the limits of `bench.coverage`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from bench.coverage import BATCH, ROOT, graph_and_dtype
from bench.support.coverage.children import in_child, warm
from bench.support.coverage.tp_plan_models import MODEL_PARTS, part_graph
from bench.support.kept_rows import KeptRows, add_before, describe_dates

ROWS = KeptRows("hf_tp_plans", ("type",))
TABLE = ROOT / "docs" / "HF_TP_PLANS.md"


def main() -> None:
    from planner_core.planning.methods import load_vendor_plans

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*", default=list(load_vendor_plans()))
    add_before(parser)
    args = parser.parse_args()
    warm()
    for kind in args.types:
        ROWS.forget(args.before, type=kind)
        if (kind,) not in ROWS.read():
            cls = MODEL_PARTS[kind].cls if kind in MODEL_PARTS else model_class(kind)
            row = {"type": kind, **(in_child(partial(_measure, kind, cls)) if cls else {"outcome": "no class"})}
            ROWS.append(row)
            print(
                *(row.get(k) for k in ("type", "outcome", "theirs_bytes", "ours_bytes")),
                row.get("reason", "")[:120],
                flush=True,
            )
    TABLE.write_text(table([r for _, r in sorted(ROWS.read().items())]), encoding="utf-8")


def model_class(kind: str) -> str:
    """Return the causal class of a model type, else the first of another training kind, else its base model; empty if it has none."""
    from transformers.models.auto import modeling_auto as auto

    from planner_core.models.sources import _MAPPINGS

    for name in (*_MAPPINGS, ""):
        table = getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES" if name else "MODEL_MAPPING_NAMES", {})
        if found := table.get(kind):
            return str(found if isinstance(found, str) else found[0])
    return _beside(kind)


def _beside(kind: str) -> str:
    """Return a class of the model file beside the type's configuration that takes this configuration, the most whole one."""
    import importlib

    import transformers

    made = transformers.CONFIG_MAPPING[kind]
    try:
        file = importlib.import_module(made.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return ""
    fits = [
        n
        for n, c in vars(file).items()
        if getattr(c, "config_class", None) is made and hasattr(transformers, n) and "PreTrained" not in n
    ]
    return min(fits, key=lambda n: ("For" not in n, len(n)), default="")


def _measure(kind: str, cls: str, tell: Any) -> None:
    from planner_core.core import PlannerError

    try:
        graph, dtype = (part_graph(kind), "bfloat16") if kind in MODEL_PARTS else graph_and_dtype(kind, cls)
        tell(**compare(graph, dtype), **({"left_out": MODEL_PARTS[kind].left_out} if kind in MODEL_PARTS else {}))
    except PlannerError as error:
        tell(outcome="refused", reason=str(error))
    except Exception as error:
        tell(outcome="refused", reason=f"{type(error).__name__}: {str(error)[:150]}")


def compare(graph: Any, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the comparison on 8 GPUs, or on 4 or 2 where the heads allow that plan no more."""
    row: dict[str, Any] = {}
    for fine in (False, True):  # a plan that moves a tensor inside one of our groups is judged op by op
        for gpus in (8, 4, 2):
            row = {"gpus": gpus, "op_by_op": fine, **_on(gpus, graph, dtype, fine)}
            if row["outcome"] != "theirs: no plan":
                return row
    return row


def _on(gpus: int, graph: Any, dtype: str, fine: bool) -> dict[str, Any]:
    """Return the bytes on the wire per GPU and step, theirs and ours, the collectives of each, and what makes the difference."""
    from bench.support.plan_reasons import explain_difference, with_single_op_groups
    from planner_core.planning import Request, candidate_meshes, prepare_planner
    from planner_core.planning.methods import vendor_rules
    from planner_core.search import search_within_budget

    request = Request(model=graph.name, cluster=node(gpus), mesh=str(gpus), dtype=dtype)
    planner = prepare_planner(request, graph)
    planner = with_single_op_groups(planner) if fine else planner
    mesh = candidate_meshes(request, planner.cluster)[0]
    found: dict[str, Any] = {}
    plans: list[Any] = []
    for who, along_any_dim in (("theirs", False), ("ours", True)):
        rules = vendor_rules(graph, mesh, along_any_dim=along_any_dim)
        if rules is None:
            return {"outcome": "names nothing"}
        problem = planner.problem(planner.cost_model(mesh, zero=0), rules)
        answer = search_within_budget(problem, objective="communication")
        if answer.assignment is None:
            return {"outcome": f"{who}: no plan"}
        plan = planner.plan(problem, answer, who, who, "communication")
        plans.append(plan)
        found[f"{who}_bytes"] = sum(t.wire_bytes for t in plan.cost.traffic)
        found[f"{who}_s"] = answer.value
        found[who] = ", ".join(f"{t.count} {t.kind} {t.phase}" for t in plan.cost.traffic)
    ratio = found["ours_s"] / found["theirs_s"] if found["theirs_s"] else 1.0 + found["ours_s"]
    outcome = "less" if ratio < 1 - 1e-4 else "same" if ratio <= 1 + 1e-6 else "MORE"
    return {"outcome": outcome, **({} if outcome == "same" else {"why": explain_difference(*plans)}), **found}


def node(gpus: int) -> dict[str, Any]:
    """Return a node of H100s with fewer GPUs."""
    from planner_core.core import load_cluster

    data = load_cluster("1x8-h100").to_json()
    return {**data, "name": f"1x{gpus}-h100", "num_gpus": gpus, "levels": [{**data["levels"][0], "size": gpus}]}


def table(rows: list[dict[str, Any]]) -> str:
    judged = [r for r in rows if "ours_s" in r]
    worse = sum(r["outcome"] == "MORE" for r in judged)
    text = [
        "# The plans that ship with transformers",
        "",
        f"{len(judged)} of the {len(rows)} model types of transformers with a tensor-parallel plan (146 configs: two types of ERNIE-VL "
        "also have an older name), on one axis of 8 GPUs (4 or 2 where "
        f"the heads allow their plan no more), batch {BATCH}, at most four layers. Theirs: weights split as `base_model_tp_plan` says; "
        "ours: the same weights split along any dim; the residual stream whole, all else replicated, least communication time. "
        f"{sum(bool(r.get('op_by_op')) for r in judged)} plans that move a tensor inside what is one group to us are judged op by op. "
        "Why ours needs less is read off the two plans: weights that lie otherwise, and collectives of one step that only one of them "
        f"has. {len(MODEL_PARTS)} types are parts of larger models or leave sizes open: they are run on what the whole would hand them, sizes as "
        "published (`bench/support/coverage/tp_plan_models.py`). A plan of a config says nothing of the head, which the class would split and gather "
        "(`_tp_plan`): it stays whole in both. Made by `python -m bench.hf_tp_plans`.",
        "",
        describe_dates(rows),
        "",
        f"- ours needs more in {worse}, as much in {sum(r['outcome'] == 'same' for r in judged)}, less in "
        f"{sum(r['outcome'] == 'less' for r in judged)}",
        "",
        "| type | GPUs | theirs, MB on the wire | ours | outcome | theirs | ours |",
        "|---|---:|---:|---:|---|---|---|",
    ]
    for r in rows:
        mb = [f"{r[k] / 1e6:,.0f}" if k in r else "" for k in ("theirs_bytes", "ours_bytes")]
        told = ": ".join(filter(None, (r["outcome"], r.get("reason", "")[:240], r.get("why"), r.get("left_out"))))
        cells = (r["type"], r.get("gpus", ""), *mb, told.replace("|", "/"), r.get("theirs", ""), r.get("ours", ""))
        text.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*text, ""])


if __name__ == "__main__":
    main()
