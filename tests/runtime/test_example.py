"""The example trains as one plain process does, on 2 and on 4 ranks, and goes on from a checkpoint of the other."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples import pretrain_llama as example
from tests.support.torchrun import run_script

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "pretrain_llama.py"
STEPS = 12


def run(folder: Path, ranks: int, plan: str, steps: int, checkpoints: str) -> dict[str, float]:
    """Losses by step, and that of the evaluation."""
    example.make_plan(ranks, str(folder / "plan.json"), plan)
    said = run_script(
        FILE,
        str(folder / "plan.json"),
        "--tokens",
        str(folder / "tokens.bin"),
        "--folder",
        str(folder / checkpoints),
        "--steps",
        str(steps),
        ranks=ranks,
    )
    found = re.findall(r"^(step \d+|evaluation)\s+loss ([\d.]+)", said, re.M)
    return {name: float(loss) for name, loss in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("example")
    np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint16).tofile(made / "tokens.bin")
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, float]:
    """The same loop in one process, with nothing of ours."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**example.CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    tokens = np.fromfile(folder / "tokens.bin", np.uint16)
    found = {}
    for step in range(STEPS):
        total = 0.0
        for ids in example.batches(tokens, step):
            loss = model(input_ids=ids, labels=ids).loss / example.MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found[f"step {step + 1}"] = total
    ids = example.batches(tokens, 1 << 20)[0]
    with torch.no_grad():
        found["evaluation"] = float(model(input_ids=ids, labels=ids).loss)
    return found


def test_the_example_is_short() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) < 90  # by the formatter, one item of a config in a line


def test_the_example_trains_as_one_process_does(folder: Path, alone: dict[str, float]) -> None:
    two = run(folder, 2, "FSDP", STEPS, "two")
    assert two == pytest.approx(alone, rel=1e-4)
    assert sorted(p.name for p in (folder / "two").iterdir()) == ["000010"]


@pytest.mark.slow
def test_the_example_resumes_on_another_number_of_ranks(folder: Path, alone: dict[str, float]) -> None:
    four = run(folder, 4, "Megatron-LM", 10, "four")
    resumed = run(folder, 2, "FSDP", STEPS, "four")
    assert next(iter(resumed)) == "step 11", "it goes on where the other run stopped"
    del four["evaluation"]
    assert {**four, **resumed} == pytest.approx(alone, rel=1e-4)
