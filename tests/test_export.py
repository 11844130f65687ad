"""The exported script trains: under torchrun, on its own, step by step like a plain training loop, with the predicted traffic."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from planner_core.errors import InputError
from planner_core.export import export_plan, export_text
from planner_core.export.torchrun import model_spec
from planner_core.pipeline import plan_model
from planner_core.plan import Plan, from_json
from planner_core.planner import Request
from planner_core.runtime.initial import initializer
from planner_core.runtime.train import _batches, build_model
from planner_core.verify import scaled
from planner_core.verify.models import materialise
from planner_core.verify.numbers import same_traffic

STEPS = 3


@cache
def planned(name: str, which: str) -> Plan:
    result = plan_model(Request(name, cluster="2x8-h100", mesh="2x8"))
    return next(p for p in result.plans if p.name == which)


def run(script: Path, ranks: int, *options: str) -> tuple[list[float], dict[str, Any]]:
    """Losses by step and the collectives of the last one. Runs where no module of ours can be imported."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--count", *options], cwd=script.parent, env=environment, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step ")]
    counted = next(json.loads(line.removeprefix("collectives ")) for line in lines if line.startswith("collectives "))
    return losses, counted


def plain_losses(plan: Plan, steps: int) -> list[float]:
    """The same training without any plan."""
    spec = model_spec(plan.model["config"])
    model = build_model(spec["class"], plan.model["config"], {"attn_implementation": "sdpa"}, "float32")
    materialise(model, initializer(model, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    load = plan.workload
    args = argparse.Namespace(data=None, seed=0, dtype="float32", batch=load["batch"], seq=load["seq"])
    data = _batches(spec["full"]["inputs"], args, 0)
    losses = []
    for _ in range(steps):
        loss = model(**next(data)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("name", "which", "ranks"),
    [
        ("gpt2-xl", "best", 2), ("llama-3-8b", "best", 2), ("llama-3-8b", "Megatron-LM + sequence parallel", 4),
        pytest.param("gpt2-xl", "best", 4, marks=pytest.mark.slow),
    ],
)
def test_torchrun_script_trains_like_one_process(name: str, which: str, ranks: int, tmp_path: Path) -> None:
    plan = scaled(planned(name, which), ranks)
    script = tmp_path / "train.py"
    export_plan(plan, "torchrun", script)
    losses, counted = run(script, ranks, "--steps", str(STEPS), "--lr", "1e-3")
    assert losses == pytest.approx(plain_losses(plan, STEPS), rel=2e-6)
    assert same_traffic(plan.cost.collectives(), counted), (plan.cost.collectives(), counted)


@pytest.mark.slow
def test_full_size_script_runs_tiny_and_resumes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    export_plan(planned("gpt2-xl", "best"), "torchrun", script)
    tiny = ("--scale", "tiny", "--batch", "8", "--seq", "16", "--dtype", "float32", "--lr", "1e-2")
    whole, _ = run(script, 2, *tiny, "--steps", "4")
    first, _ = run(script, 2, *tiny, "--steps", "2", "--save", "saved")
    rest, _ = run(script, 2, *tiny, "--steps", "2", "--resume", "saved")
    assert [*first, *rest] == pytest.approx(whole, rel=1e-6)
    assert whole[0] != whole[1]
    parts, _ = run(script, 2, *tiny, "--steps", "2", "--micro-batches", "2")
    assert parts == pytest.approx(whole[:2], rel=1e-5)


@pytest.mark.slow
def test_script_refuses_another_number_of_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    export_plan(planned("gpt2-xl", "best"), "torchrun", script)
    with pytest.raises(AssertionError, match="the plan is for 16 processes"):
        run(script, 2)


def test_script_stands_alone() -> None:
    text = export_text(planned("llama-3-8b", "best"), "torchrun").text
    assert "planner_core" not in text
    compile(text, "train.py", "exec")


def test_json_export_is_the_plan() -> None:
    plan = planned("llama-3-8b", "Megatron-LM")
    assert from_json(json.loads(export_text(plan, "json").text)) == plan


def test_bad_target_and_folder(tmp_path: Path) -> None:
    plan = planned("gpt2-xl", "best")
    with pytest.raises(InputError, match="not one of"):
        export_plan(plan, "tensorflow", tmp_path / "x")
    with pytest.raises(InputError, match="cannot write"):
        export_plan(plan, "json", tmp_path / "missing" / "x")
    assert list(tmp_path.iterdir()) == []
