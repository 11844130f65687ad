"""Predicted against measured: every zoo model under the chosen plan, the baselines and the papers' methods.

    python -m bench.accuracy                        # what has no row yet, then docs/ACCURACY.md
    python -m bench.accuracy --only numbers 8       # some of the checks: numbers, traffic on meshes 8, 2x8, 8x8, 64x8, or layouts
    python -m bench.accuracy --models gpt2-xl       # some of the models
    python -m bench.accuracy --redo                 # rows that failed or differed, again
    python -m bench.accuracy --before 2026-11-23    # rows of earlier days anew
    python -m bench.accuracy --sample 12 7          # 12 rows drawn by the seed 7, again
    python -m bench.accuracy --table                # docs/ACCURACY.md alone

`numbers`: a small model of the same architecture and plan on gloo processes in meshes (2), (4) and (2,2), against one
process, float32. Traffic and memory: one training step at full size on a fake process group of the mesh's world size.
`layouts`: both for layouts as teams state them (`bench.support.accuracy.layouts`), on two nodes of eight GPUs and on four or eight processes.
Rows are kept in bench/support/results/accuracy.jsonl, so a sweep can be stopped and taken up again.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from bench.support.accuracy.layouts import small_ranks, stated_plans
from bench.support.accuracy.table import format_page
from bench.support.kept_rows import ROOT, KeptRows, add_before
from planner_core.core import DeviceMesh, Graph, Plan
from planner_core.models import ZOO
from planner_core.planning.methods import Method

ROWS = KeptRows("accuracy", ("check", "model", "mesh", "plan"))
TABLE = ROOT / "docs" / "ACCURACY.md"
MESHES = {"8": "1x8-h100", "2x8": "2x8-h100", "8x8": "8x8-h100", "64x8": "64x8-h100"}
NUMBERS = (("2", "8", 2), ("4", "8", 4), ("2x2", "2x8", 4))
"""A small mesh, the mesh of the plan that is scaled down to it, and how many ranks it has."""
CHECKS = ("numbers", *MESHES, "layouts")
FEW = ("best", "least memory", "Megatron-LM")
"""Plans run on the meshes of 64 and 512 GPUs unless `--all` is given, or a row is there to be made anew."""
OTHERS = {"llama-2-7b": ROOT / "bench" / "support" / "accuracy" / "llama-2-7b.json"}
"""Models that are not in the zoo: a Llama with as many key heads as query heads."""
MODELS = (*ZOO, *OTHERS)
LIMIT_S = 900.0
Key = tuple[str, ...]
"""(check, model, mesh, plan); the check `plan` holds why a plan is left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(CHECKS), choices=CHECKS)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--redo", action="store_true")
    add_before(parser)
    parser.add_argument("--all", action="store_true", help="every plan on the big meshes too")
    parser.add_argument("--sample", nargs=2, type=int, metavar=("COUNT", "SEED"))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.sample:
        drawn = Random(args.sample[1]).sample(sorted(k for k in ROWS.read() if k[0] != "plan"), args.sample[0])
        for check, model in sorted({k[:2] for k in drawn}):
            _sweep(check, model, redo=False, every=True, wanted=set(drawn))
    elif not args.table:
        for check in args.only:
            for model in args.models:
                _sweep(check, model, args.redo, args.all, before=args.before)
                # Each row made anew counts instead of its old one; what is still old is of plans that are not found any more.
                ROWS.forget(args.before, check=check, model=model)
                ROWS.forget(args.before, check="plan", model=model, mesh=check)
    TABLE.write_text(format_page(list(ROWS.read().values()), MODELS), encoding="utf-8")


def _sweep(check: str, model: str, redo: bool, every: bool, wanted: set[Key] | None = None, before: str = "") -> None:
    """All plans of one model under one check; those with a row since the day `before` are left out, or all but the `wanted` ones.

    On the big meshes without `every`: `FEW`, and what has a row already, so that no row is lost that was made with `every`.
    """
    rows = ROWS.read()
    done = {k for k, r in rows.items() if (r["ok"] or not redo) and r["date"] >= before}
    if wanted is not None:
        done -= wanted

    def is_wanted(key: Key) -> bool:
        return key not in done and (wanted is None or key in wanted)

    if check == "layouts":
        _check_layouts(model, is_wanted)
        return
    if check == "numbers":
        jobs = list(_list_small_plans(model, is_wanted))
        for ranks in (2, 4):
            _run_jobs([j for j in jobs if j[1].mesh.num_devices == ranks], _verify_numbers)
        return
    jobs_left = (
        (k, p) for name, p in _plans_of_model(model, check).items() if is_wanted(k := (check, model, check, name))
    )
    _run_jobs(
        [(k, p) for k, p in jobs_left if every or check in ("8", "2x8") or k[3] in FEW or k in rows], _verify_fake
    )


def _check_layouts(model: str, is_wanted: Callable[[Key], bool]) -> None:
    """The layouts that are stated for a model: whole on a fake process group, and small on processes."""
    from planner_core.core import PlannerError
    from planner_core.verification import scaled

    whole: list[tuple[Key, Plan]] = []
    small: list[tuple[Key, Plan]] = []
    for name, plan in stated_plans(model):
        if is_wanted(key := ("layouts", model, "whole", name)):
            whole.append((key, plan))
        if is_wanted(key := ("layouts", model, "small", name)):
            try:
                small.append((key, scaled(plan, small_ranks(plan))))
            except PlannerError as error:
                _write_row(key, ok=False, reason=str(error))
    _run_jobs(whole, _verify_fake)
    for ranks in (4, 8):
        _run_jobs([job for job in small if job[1].mesh.num_devices == ranks], _verify_numbers)


def _plans_of_model(model: str, mesh: str) -> dict[str, Plan]:
    """Return the chosen plan, the baselines and the plans of TAP and ATP, by name; a baseline that suits no mesh is left out."""
    from planner_core.core import NoPlanFits
    from planner_core.planning import (
        Request,
        candidate_meshes,
        choose_mesh,
        plan_baselines,
        prepare_planner,
        replace_request,
    )
    from planner_core.planning.methods import BASELINES

    planner = prepare_planner(
        Request(
            str(OTHERS.get(model, model)),
            cluster=MESHES[mesh],
            mesh=mesh,
            batch=64 if mesh == "64x8" else 16,
        )
    )
    options = candidate_meshes(planner.request, planner.cluster)
    chosen = choose_mesh(planner, options)
    by_name = {chosen.name: chosen, **{p.name: p for p in plan_baselines(planner, options)}}
    for baseline in BASELINES.values():
        if baseline.title not in by_name:
            _write_row(
                ("plan", model, mesh, baseline.title),
                ok=True,
                reason=f"no plan: {_why_none(baseline, planner.graph, options[0])}",
            )
    for method in ("tap", "atp"):
        try:
            by_name[method.upper()] = replace(
                choose_mesh(replace_request(planner, method=method), options), name=method.upper()
            )
        except NoPlanFits as error:
            _write_row(("plan", model, mesh, method.upper()), ok=True, reason=f"no plan: {error}")
    return by_name


def _why_none(baseline: Method, graph: Graph, mesh: DeviceMesh) -> str:
    """Return why a baseline has no plan on a mesh."""
    if baseline.restrict(graph, mesh) is not None:
        return "no plan of this kind splits every tensor evenly"
    if baseline.name == "hf-expert":
        return "transformers has no tensor-parallel plan for this model"
    return "it takes all GPUs as one axis"


def _list_small_plans(model: str, is_wanted: Callable[[Key], bool]) -> Iterator[tuple[Key, Plan]]:
    from planner_core.core import PlannerError
    from planner_core.verification import scaled

    by_mesh: dict[str, dict[str, Plan]] = {}
    for small, big, ranks in NUMBERS:
        if big not in by_mesh:
            by_mesh[big] = _plans_of_model(model, big)
        for name, plan in by_mesh[big].items():
            key = ("numbers", model, small, name)
            if not is_wanted(key):
                continue
            try:
                yield key, scaled(plan, ranks)
            except PlannerError as error:
                _write_row(key, ok=False, reason=str(error))


def _run_jobs(jobs: list[tuple[Key, Plan]], work: Callable[[list[Plan]], list[dict[str, Any]]]) -> None:
    """All jobs by the same processes; one by one where that fails, so that the row that failed is known."""
    from planner_core.core import PlannerError

    if not jobs:
        return
    try:
        rows = work([p for _, p in jobs])
    except PlannerError as error:
        if len(jobs) == 1:
            _write_row(jobs[0][0], ok=False, reason=str(error)[:300])
            return
        for job in jobs:
            _run_jobs([job], work)
        return
    for (key, plan), row in zip(jobs, rows, strict=True):
        _write_row(key, fits=plan.fits, **row)


def _verify_numbers(small_plans: list[Plan]) -> list[dict[str, Any]]:
    from planner_core.models import load_plan_graph
    from planner_core.verification import verify_all

    return [
        {
            "ok": r["ok"],
            "numbers_ok": r["numbers_ok"],
            "collectives_ok": r["collectives_ok"],
            "loss_error": r["loss"]["abs_error"],
            "grad_error": r["grad"]["max_rel_error"],
            "worst": r["grad"]["worst"],
            "param_error": r["param"]["max_rel_error"],
            "dtype": r["dtype"],
            **_run_as(r),
            **_show_difference(r),
        }
        for r in verify_all(small_plans, graphs=[load_plan_graph(p) for p in small_plans], timeout_s=LIMIT_S)
    ]


def _verify_fake(whole_plans: list[Plan]) -> list[dict[str, Any]]:
    from planner_core.models import load_plan_graph
    from planner_core.verification import verify_fake_all

    return [
        {
            "ok": r["ok"],
            "collectives_ok": r["collectives_ok"],
            "predicted_bytes": r["memory_bytes"]["predicted"],
            "measured_bytes": r["memory_bytes"]["measured"],
            "memory_error": r["memory_bytes"]["rel_error"],
            "measured_kinds": r["memory_bytes"]["by_kind"],
            "predicted_kinds": dict(p.cost.memory_bytes),
            "seconds": r["seconds"],
            **_run_as(r),
            **_show_difference(r),
        }
        for r, p in zip(
            verify_fake_all(whole_plans, graphs=[load_plan_graph(p) for p in whole_plans], timeout_s=LIMIT_S),
            whole_plans,
            strict=True,
        )
    ]


def _run_as(report: dict[str, Any]) -> dict[str, Any]:
    """Return why the model's own code ran instead of the rewritten program (empty if it did not), and what of the order was not as
    scheduled."""
    order = report["order"]
    return {"order": order and (order["difference"] or "as scheduled")}


def _show_difference(report: dict[str, Any]) -> dict[str, Any]:
    """Both tables where they differ."""
    return {} if report["collectives_ok"] else {"collectives": report["collectives"]}


def _write_row(key: Key, **results: Any) -> None:
    """Keep a row, with where it was measured."""
    check, model, mesh, plan = key
    row = {"check": check, "model": model, "mesh": mesh, "plan": plan, **results, **_describe_machine()}
    ROWS.append(row)
    words = " ".join(
        f"{k}={row[k]}" for k in ("ok", "collectives_ok", "grad_error", "memory_error", "reason") if k in row
    )
    print(f"{check:8} {model:14} {mesh:5} {plan:32} {words}", flush=True)


def _describe_machine() -> dict[str, str]:
    import torch
    import transformers

    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    versions = f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return {"machine": machine, "versions": versions}


if __name__ == "__main__":
    main()
