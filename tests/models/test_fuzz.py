"""Mutated configs, plans and clusters: a result or one sentence, in time, and nothing written, started or unpickled."""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner_core.core import cluster_names, load_cluster
from planner_core.core.errors import InputError
from planner_core.core.plan_json import load_plan, plan_to_json
from planner_core.models.loading import capture_graph
from planner_core.planning import choose_mesh
from planner_core.planning.planner import candidate_meshes, prepare_planner
from planner_core.planning.request import Request
from tests.support.fuzz import configs, mutated, torn, watched


def fuzz_configs(count: int, seed: int, folder: Path, plan: bool = False) -> tuple[int, int]:
    """Captured; with `plan`, what could be captured is planned too."""
    rng = random.Random(seed)
    made = [(base, mutated(base, rng)) for base, _ in zip(configs(rng), range(count), strict=False)]
    file = folder / "config.json"
    with watched() as watch:
        for k, (base, config) in enumerate(made):
            if k % 10 == 9:
                watch.on = False
                file.write_bytes(torn(json.dumps(base), rng))
                watch.on = True
                watch.case(f"file {k}", partial(read, str(file), plan))
            elif isinstance(config, dict):
                watch.case(f"{base['model_type']} {k} {differences(base, config)}", partial(read, config, plan))
    return watch.fine, watch.refused


def read(source: str | dict[str, Any], plan: bool) -> None:
    graph = capture_graph(source, batch=16, seq=8)
    if plan:
        request = Request(model=graph.name, mesh="2x8")
        planner = prepare_planner(request, graph)
        choose_mesh(planner, candidate_meshes(request, planner.cluster))


def differences(a: dict[str, object], b: dict[str, object]) -> str:
    return str({k: b.get(k, "gone") for k in {*a, *b} if a.get(k) != b.get(k)})[:200]


def fuzz_plans(count: int, seed: int, folder: Path) -> tuple[int, int]:
    rng = random.Random(seed)
    request = Request(model="llama-3-8b", mesh="2x8", layers=2)
    planner = prepare_planner(request)
    plan = plan_to_json(choose_mesh(planner, candidate_meshes(request, planner.cluster)))
    file = folder / "plan.json"
    with watched() as watch:
        for k in range(count):
            watch.on = False
            file.write_bytes(torn(json.dumps(plan), rng) if k % 10 == 9 else json.dumps(mutated(plan, rng)).encode())
            watch.on = True
            watch.case(f"plan {k}", lambda: plan_to_json(load_plan(file)))
    return watch.fine, watch.refused


def fuzz_clusters(count: int, seed: int, folder: Path) -> tuple[int, int]:
    rng = random.Random(seed)
    file = folder / "cluster.json"
    request = Request(model="bert-large", cluster=str(file), layers=1)

    def run() -> None:
        planner = prepare_planner(request)
        options = candidate_meshes(request, planner.cluster)
        if len(options) < 8 and planner.cluster.num_gpus <= 64:
            choose_mesh(planner, options[:1])

    with watched() as watch:
        for k in range(count):
            base = load_cluster(rng.choice(cluster_names())).to_json()
            watch.on = False
            file.write_bytes(torn(json.dumps(base), rng) if k % 10 == 9 else json.dumps(mutated(base, rng)).encode())
            watch.on = True
            watch.case(f"cluster {k}", run)
    return watch.fine, watch.refused


def test_a_sample_of_configs(tmp_path: Path) -> None:
    fine, refused = fuzz_configs(80, 1, tmp_path)
    assert fine > 10 and refused > 10


@pytest.mark.slow
def test_a_sample_of_plans_and_clusters(tmp_path: Path) -> None:
    assert min(fuzz_plans(60, 1, tmp_path)) > 0 and min(fuzz_clusters(40, 1, tmp_path)) > 0


def test_a_config_that_points_to_code_and_to_the_hub_runs_and_asks_nothing(tmp_path: Path) -> None:
    """`auto_map` names a class of a file beside the config, which `trust_remote_code` would import."""
    (tmp_path / "evil.py").write_text("raise SystemExit('run')\nclass Evil: pass\n", encoding="utf-8")
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    code = {
        "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil"),
        "_name_or_path": "someone/something",
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **code}), encoding="utf-8")
    read(str(tmp_path), False)  # imports
    with watched() as watch:
        watch.case("folder", lambda: read(str(tmp_path), False))
    assert watch.fine == 1 and "evil" not in sys.modules


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_two_thousand_configs(seed: int, tmp_path: Path) -> None:
    assert min(fuzz_configs(200, 100 + seed, tmp_path, plan=True)) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_plans_and_clusters(tmp_path: Path) -> None:
    assert min(fuzz_plans(250, 2, tmp_path)) > 0 and min(fuzz_clusters(250, 2, tmp_path)) > 0


def test_the_watch_sees_what_it_should(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="open"), watched() as watch:
        watch.case("writes", lambda: (tmp_path / "x").write_text("x"))
    with pytest.raises(AssertionError, match="ZeroDivisionError"), watched() as watch:
        watch.case("fails", lambda: 1 / 0)
    with pytest.raises(AssertionError, match="Popen"), watched() as watch:
        import subprocess

        watch.case("starts", lambda: subprocess.run(["true"], check=True))
    with pytest.raises(AssertionError, match="mkdir"), watched() as watch:
        watch.case("makes a folder", lambda: (tmp_path / "new").mkdir())


def test_the_watch_sees_memory_that_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes much more than the limit: where memory is short, the system takes pages of libraries away meanwhile."""
    monkeypatch.setattr("tests.support.fuzz.LIMIT_MB", 64)
    with pytest.raises(AssertionError, match="more than before"), watched() as watch:
        watch.case("eats memory", lambda: bytearray(b"x") * (512 << 20))


def test_the_watch_sees_a_hang_that_the_code_would_call_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.fuzz.LIMIT_S", 0.2)

    def hangs() -> None:
        try:
            while True:
                pass
        except Exception as error:
            raise InputError("no") from error

    with pytest.raises(AssertionError, match="Late"), watched() as watch:
        watch.case("hangs", hangs)
