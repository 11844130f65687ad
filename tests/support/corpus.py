"""Judge the corpus: capture and plan every module, run each plan on real processes, and tell what came of it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from planner_core.core import Graph, Plan, PlannerError, plan_to_json
from planner_core.models.loading import capture_file
from planner_core.planning import Request, candidate_meshes, choose_mesh, plan_model, prepare_planner
from planner_core.planning.fitting.front import unseen_corners
from planner_core.verification.fake.group import _compare_with_plan as fake_report
from planner_core.verification.fake.group import run_fake_step
from planner_core.verification.numerics import compare_with_fallback, make_report
from tests.support.ranks import run_ranks

FOLDER = Path(__file__).resolve().parents[1] / "corpus"
FAMILIES = tuple(
    sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith(("_", "test_")) and p.stem != "base")
)
MESHES = {2: "2", 4: "2x2"}


@dataclass(frozen=True)
class Entry:
    """One module of the corpus; `refused`: words of the sentence that refuses it."""

    family: str
    name: str
    shows: str
    refused: str | None

    @property
    def source(self) -> str:
        """As the command line takes it."""
        return f"{FOLDER / self.family}.py:{self.name}"


def entries(families: Iterable[str] = FAMILIES) -> list[Entry]:
    """Return every module, in the order of the files."""
    collected = []
    for family in families:
        module = importlib.import_module(f"tests.corpus.{family}")
        refused: Mapping[str, str] = module.REFUSED
        for name, make in vars(module).items():
            public = inspect.isfunction(make) and make.__module__ == module.__name__ and not name.startswith("_")
            if public and make.__annotations__.get("return") == "Made":
                collected.append(Entry(family, name, str(make.__doc__).splitlines()[0], refused.get(name)))
    return collected


def cluster(ranks: int) -> dict[str, Any]:
    """GPUs whose links cost next to nothing, so that plans split whatever can be split."""
    level = {
        "name": "wire",
        "size": ranks,
        "unit_bytes_per_s": 1e14,
        "efficiency": 1.0,
        "latency_s": 1e-9,
        "sources": {},
    }
    return {
        "schema": "shardscope.cluster/1",
        "name": f"{ranks} close GPUs",
        "description": "GPUs whose links cost nothing",
        "gpu": "a100-80gb-pcie",
        "num_gpus": ranks,
        "levels": [level],
    }


def captured(entry: Entry) -> Graph:
    """Return the module's graph; raises PlannerError with the sentence that refuses it."""
    torch.manual_seed(0)
    return capture_file(entry.source)


def plans_of(entry: Entry, graph: Graph, ranks: int) -> tuple[Plan, ...]:
    """Return the best plan, the front and the baselines, each way of running a model once."""
    request = Request(entry.source, cluster=cluster(ranks), mesh=MESHES[ranks])
    plan_by_layout: dict[str, Plan] = {}
    for plan in plan_model(request, graph).plans:
        data = plan_to_json(plan)
        plan_by_layout.setdefault(repr((data["blocks"], data.get("top"))), plan)
    return tuple(plan_by_layout.values())


def corner(entry: Entry, graph: Graph, ranks: int, number: int) -> Plan:
    """Return a corner of the front, counted from 1, also where the best plan has no higher peak."""
    request = Request(entry.source, cluster=cluster(ranks), mesh=MESHES[ranks])
    planner = prepare_planner(request, graph)
    options = candidate_meshes(request, planner.cluster)
    return replace(
        unseen_corners(planner, options, [choose_mesh(planner, options)])[number - 1], name=f"corner {number}"
    )


def run(
    plans: Mapping[str, tuple[Plan, ...]], ranks: int, timeout_s: float, fakes: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Return the reports of every module's plans, all run by the same processes; `error` where a run failed. `fakes`: how many plans of
    each module also run on a fake process group (None: all)."""
    jobs = [p for group in plans.values() for p in group]
    walked = [p for group in plans.values() for p in group[:fakes]]
    numbers = zip(*run_ranks(_numbers, ranks, (jobs,), timeout_s=timeout_s), strict=True)
    fake = iter(run_ranks(_fakes, 1, (walked,), timeout_s=timeout_s, backend=None)[0])
    return {
        name: [
            {"plan": plan.name, **_told(plan, next(numbers), next(fake) if fakes is None or i < fakes else None)}
            for i, plan in enumerate(group)
        ]
        for name, group in plans.items()
    }


def _told(plan: Plan, rows: tuple[dict[str, Any], ...], fake: dict[str, Any] | None) -> dict[str, Any]:
    errors = [r["error"] for r in (*rows, *filter(None, [fake])) if "error" in r]
    if errors:
        return {"ok": False, "error": errors[0], "messages": 0}
    ran, walked = make_report(plan, rows[0]), fake_report(plan, fake) if fake else None
    wrong = {k: ran[k] for k in ("loss", "grad", "param") if not ran["numbers_ok"]}
    for one in filter(None, (ran, walked)):
        if not one["collectives_ok"]:
            wrong["collectives"] = one["collectives"]
    messages = sum(row["count"] for phase in ran["collectives"]["measured"].values() for row in phase.values())
    return {"ok": not wrong, "error": repr(wrong), "messages": messages}


def _numbers(plans: list[Plan]) -> list[dict[str, Any]]:
    return [_guarded(compare_with_fallback, plan) for plan in plans]


def _fakes(plans: list[Plan]) -> list[dict[str, Any]]:
    return [_guarded(run_fake_step, plan) for plan in plans]


def _guarded(step: Any, plan: Plan) -> dict[str, Any]:
    """Return what a step found; a failure as words, so that the modules after it are run too."""
    try:
        outcome: dict[str, Any] = step(plan)
    except (PlannerError, Exception) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return outcome
