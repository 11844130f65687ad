"""A model that a person's file builds: what is planned is said, what is asked for is honoured or refused, code is not run unasked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner_core.cli.main import main

SILENCED = """
import os, logging
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
from planner_core.models.sources.huggingface import _silenced_transformers
with _silenced_transformers():
    import transformers
assert logging.getLogger("transformers").level == logging.ERROR
"""


@pytest.mark.slow
def test_the_verbosity_that_a_user_sets_outlives_the_first_model() -> None:
    """`export --to torchrun` and `plan config.json` printed transformers' advice, since its first import was inside of what is silenced."""
    subprocess.run([sys.executable, "-c", SILENCED], check=True, timeout=300)


FILE = """
import torch
from torch import nn
open({trace!r}, "a").write("run ")

class Net(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.a, self.b, self.result = nn.Linear(16, 32), nn.Linear(32, 4), result

    def forward(self, x):
        out = self.b(self.a(x).relu())
        return {{"loss": (out.mean(), out), "logits": out}}[self.result]

def own():
    return Net("loss"), (torch.randn(8, 16),)

def logits():
    return Net("logits"), (torch.randn(8, 16),)
"""
WHERE = ["--cluster", "1x4-a100-pcie", "--mesh", "4"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "mine.py"
    made.write_text(FILE.format(trace=str(tmp_path / "trace")), encoding="utf-8")
    return made


def runs(file: Path) -> int:
    """How often the file has been run."""
    trace = file.parent / "trace"
    return trace.read_text().count("run") if trace.exists() else 0


def test_shapes_types_and_the_loss_are_said_first(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{file}:own", *WHERE]) == 0
    said = capsys.readouterr()
    head = said.out.splitlines()
    assert head[0].startswith("first plan: ") and head[2] == "trained on the first of the model's results, a number"
    assert "; batch 8, float32" in head[3]
    assert "inputs float32 [8, 16]; parameters float32" in said.out


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--batch", "16"], "have batch 8, not 16"),
        pytest.param(["--seq", "4"], "have seq 1, not 4", marks=pytest.mark.slow),
        (["--dtype", "bfloat16"], "--dtype bfloat16 cannot be applied: most parameters of mine are float32"),
        (["--layers", "2"], "--layers 2 cannot be applied"),
    ],
)
def test_what_a_function_fixes_is_not_changed_in_silence(
    file: Path, option: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{file}:own", *WHERE, *option]) == 2
    said = capsys.readouterr()
    assert says in said.err and len(said.err.splitlines()) == 1 and not said.out


@pytest.mark.slow
def test_the_sizes_that_the_inputs_have_may_be_asked_for(file: Path) -> None:
    assert main(["plan", f"{file}:own", *WHERE, "--batch", "8", "--seq", "1", "--dtype", "float32"]) == 0


def test_a_stand_in_loss_reaches_no_export_in_silence(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, script = tmp_path / "plan.json", tmp_path / "train.py"
    assert main(["plan", f"{file}:logits", *WHERE, "-o", str(plan)]) == 0
    assert "trained on stand-in: mean of the output to the fourth power" in capsys.readouterr().out
    assert main(["export", str(plan), "--to", "torchrun", "-o", str(script)]) == 0
    assert "the model returns no loss, so the plan is for a stand-in" in capsys.readouterr().out


def test_code_that_a_plan_file_names_is_run_only_when_that_is_said(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", f"{file}:own", *WHERE, "-o", str(plan)]) == 0
    assert f"verify {plan} --ranks 4 --run-code, and --fake --run-code" in capsys.readouterr().err
    before = runs(file)
    for how in (["--rules"], ["--fake"], ["--ranks", "2"]):
        assert main(["verify", str(plan), *how]) == 2
        said = capsys.readouterr().err
        assert f"built by {file}:own, which would be run" in said and "--run-code" in said
    assert runs(file) == before > 0
    assert main(["verify", str(plan), "--rules", "--run-code"]) == 0
    assert runs(file) > before


def test_a_mesh_of_millions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", "bert-large", "--layers", "1", *WHERE, "-o", str(plan)]) == 0
    data = json.loads(plan.read_text())
    data["mesh"]["sizes"] = [1_000_000]
    plan.write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["verify", str(plan), "--fake"]) == 2
    assert "1,000,000 devices" in capsys.readouterr().err
