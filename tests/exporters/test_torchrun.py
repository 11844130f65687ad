"""The exported script trains: under torchrun, on its own, step by step like a plain training loop, with the predicted traffic."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from planner_core.core.errors import InputError
from planner_core.core.plan import Plan
from planner_core.core.plan_json import plan_from_json
from planner_core.exporters.api import export, export_text
from planner_core.exporters.torchrun import model_spec
from planner_core.planning.pipeline import plan_model
from planner_core.planning.request import Request
from planner_core.runtime.initialize import initializer
from planner_core.runtime.training.train import _batches, build_model
from planner_core.verification.api import scaled, verify
from planner_core.verification.build_models import materialise
from planner_core.verification.numerics import same_traffic

STEPS = 3


@cache
def planned(name: str, which: str) -> Plan:
    result = plan_model(Request(name, cluster="2x8-h100", mesh="2x8"))
    return next(p for p in result.plans if p.name == which)


def run(script: Path, ranks: int, *options: str) -> tuple[list[float], dict[str, Any]]:
    """Losses by step and the collectives of the last one. Runs where no module of ours can be imported."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(script),
    ]
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
    model = build_model(spec["class"], plan.model["config"], spec["options"], "float32")
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
        ("gpt2-xl", "best", 2),
        ("llama-3-8b", "Megatron-LM + sequence parallel", 4),
        pytest.param("gpt2-xl", "best", 4, marks=pytest.mark.slow),
        pytest.param("llama-3-8b", "best", 2, marks=pytest.mark.slow),
    ],
)
def test_torchrun_script_trains_like_one_process(name: str, which: str, ranks: int, tmp_path: Path) -> None:
    plan = scaled(planned(name, which), ranks)
    script = tmp_path / "train.py"
    export(plan, "torchrun", script)
    losses, counted = run(script, ranks, "--steps", str(STEPS), "--lr", "1e-3")
    assert losses == pytest.approx(plain_losses(plan, STEPS), rel=2e-6)
    assert same_traffic(plan.cost.collectives(), counted), (plan.cost.collectives(), counted)


def weights(plan: Plan, folder: Path) -> None:
    """The plan's model with random weights, as safetensors."""
    spec = model_spec(plan.model["config"])
    model: Any = build_model(spec["class"], plan.model["config"], {"attn_implementation": "sdpa"}, "float32")
    materialise(model, initializer(model, 7))
    model.save_pretrained(folder)


def test_script_starts_from_a_checkpoint_and_resumes_on_the_same_data(tmp_path: Path) -> None:
    """safetensors to start from, a file of tokens to read, torch.distributed.checkpoint to save to and resume from."""
    plan = scaled(planned("llama-3-8b", "best"), 2)
    script = tmp_path / "train.py"
    export(plan, "torchrun", script)
    weights(plan, tmp_path / "weights")
    tokens = torch.randint(0, 256, (20_000,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    (tmp_path / "tokens.bin").write_bytes(tokens.numpy().tobytes())
    start = ("--checkpoint", "weights", "--data", "tokens.bin", "--lr", "1e-2")
    whole, _ = run(script, 2, *start, "--steps", "4")
    first, _ = run(script, 2, *start, "--steps", "2", "--save", "saved")
    rest, _ = run(script, 2, "--data", "tokens.bin", "--lr", "1e-2", "--steps", "2", "--resume", "saved")
    assert [*first, *rest] == whole
    assert list((tmp_path / "saved").glob("*.distcp")), "saved in shards"
    assert whole == pytest.approx(from_weights(plan, tmp_path / "weights", tokens), rel=2e-6)


def from_weights(plan: Plan, folder: Path, tokens: torch.Tensor) -> list[float]:
    """The same four steps in one process, by transformers alone."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch, seq = plan.workload["batch"], plan.workload["seq"]
    losses = []
    for step in range(4):
        ids = tokens[step * batch * seq : (step + 1) * batch * seq].long().view(batch, seq)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(64, 32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.scale = nn.Parameter(torch.full((32,), 0.5))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x + self.down(nn.functional.gelu(self.up(x))) * self.scale
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def make():
    ids = torch.randint(0, 64, (8, 16))
    return Net(), EXAMPLE
"""


@pytest.mark.slow
@pytest.mark.parametrize("example", ['{"ids": ids, "labels": ids}', "(ids, ids.flip(0))"])
def test_script_and_verification_of_a_users_own_model(example: str, tmp_path: Path) -> None:
    """The script imports the user's file; its values are those that the file gives for this seed."""
    file = tmp_path / "mine.py"
    file.write_text(OWN.replace("EXAMPLE", example))
    whole = plan_model(Request(f"{file}:make", cluster="1x8-h100", mesh="8")).best
    report = verify(whole, ranks=2)
    assert report["order"]["ok"]
    assert report["ok"] and report["grad"]["max_rel_error"] < 1e-5, report
    assert verify(whole)["collectives_ok"]
    plan = scaled(whole, 2)
    export(plan, "torchrun", tmp_path / "train.py")
    losses, counted = run(tmp_path / "train.py", 2, "--steps", "3", "--lr", "1e-2")
    assert same_traffic(plan.cost.collectives(), counted)
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    model, inputs = scope["make"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for loss in losses:
        here = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        assert loss == pytest.approx(float(here.detach()), rel=2e-6)
        here.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    file.unlink()
    with pytest.raises(AssertionError, match="give its place with --model"):
        run(tmp_path / "train.py", 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_script_of_a_model_with_scans_trains_like_one_process(kind: str, tmp_path: Path) -> None:
    own = {"mamba": {"state_size": 8, "intermediate_size": 128, "time_step_rank": 4},
           "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 8, "chunk_size": 8}}[kind]  # fmt: skip
    config = {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "expand": 2, **own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = plan_model(Request(str(tmp_path / "config.json"), cluster="1x8-h100", mesh="8", batch=16, seq=32))
    plan = scaled(result.best, 2)
    script = tmp_path / "train.py"
    export(plan, "torchrun", script)
    assert "planner_core" not in script.read_text()
    losses, counted = run(script, 2, "--steps", str(STEPS), "--lr", "1e-3")
    assert losses == pytest.approx(plain_losses(plan, STEPS), rel=5e-6)
    assert same_traffic(plan.cost.collectives(), counted), (plan.cost.collectives(), counted)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fp32"])
def test_full_size_script_runs_tiny_and_resumes(optimizer: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    plan = planned("gpt2-xl", "best")
    export(replace(plan, workload={**plan.workload, "optimizer": optimizer}), "torchrun", script)
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
    export(planned("gpt2-xl", "best"), "torchrun", script)
    with pytest.raises(AssertionError, match="the plan is for 16 processes"):
        run(script, 2)


def test_script_stands_alone() -> None:
    text = export_text(planned("llama-3-8b", "best"), "torchrun").text
    assert "planner_core" not in text
    compile(text, "train.py", "exec")


def test_json_export_is_the_plan() -> None:
    plan = planned("llama-3-8b", "Megatron-LM")
    assert plan_from_json(json.loads(export_text(plan, "json").text)) == plan


def test_bad_target_and_folder(tmp_path: Path) -> None:
    plan = planned("gpt2-xl", "best")
    with pytest.raises(InputError, match="not one of"):
        export(plan, "tensorflow", tmp_path / "x")
    with pytest.raises(InputError, match="cannot write"):
        export(plan, "json", tmp_path / "missing" / "x")
    assert list(tmp_path.iterdir()) == []
