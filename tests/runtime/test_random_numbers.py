"""Random numbers and counters of a model's own code: ranks whose generators differ hold one model, and nothing is frozen."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.runtime import PlanMismatch
from planner_core.runtime.library import applied
from planner_core.runtime.record.attributes import MOST_STATES
from planner_core.verification.processes import run_ranks
from tests.corpus import chance, speech
from tests.corpus.chance import KINDS, WIDTH

TWO = "1x8-h100:gpus=2"
HOW = ("like", "slopes", "coins", "places", "by_numpy", "by_python")


def _model(how: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if how == "blocks":
        return chance.noisy_blocks()
    return speech.lstm_with_dropout() if how == "lstm" else chance._made(how)


def saved(folder: Path, how: str, recompute: str = "none") -> str:
    """The file of a plan that gathers weights, with every rank working on its own samples; of the best if there is none."""
    model, inputs = _model(how)
    plans = shardscope.plan(model, inputs=inputs, cluster=TWO, recompute=recompute, accumulate=1).plans
    shardscope.save_plan(next((p for p in plans if p.name == "FSDP"), plans[0]), folder / how)
    return str(folder / how)


def _trained(hows: tuple[str, ...], files: list[str]) -> list[tuple[list[float], list[Any]]]:
    """Losses of three steps and the whole weights after them. Each rank's generators are in states of its own."""
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(100 + dist.get_rank())
    found = []
    for how, file in zip(hows, files, strict=True):
        module, inputs = _model(how)
        model = shardscope.apply(module, shardscope.load_plan(file))
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(100 + dist.get_rank())
        for _ in range(3):
            losses.append(model(*inputs, global_batch=True))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        parallel = applied(model)
        whole = [parallel.full(w).tolist() for w in parallel.engine.weights.values()]
        found.append(([float(x.detach()) for x in losses], whole))
    return found


def test_ranks_whose_generators_differ_draw_the_same(tmp_path: Path) -> None:
    hows = (*HOW, "lstm")
    ranks = run_ranks(_trained, 2, (hows, [saved(tmp_path, how) for how in hows]), timeout_s=300)
    for how, (losses, weights), (others, same) in zip(hows, *ranks, strict=True):
        assert losses == others, how
        assert weights == same, how
        assert len(set(losses)) == 3  # each step draws anew


def _gradients(files: list[str]) -> list[dict[str, Any]]:
    found = []
    for file in files:
        module, inputs = _model("blocks")
        model = shardscope.apply(module, shardscope.load_plan(file))
        model(*inputs, global_batch=True).backward()
        parallel = applied(model)
        found.append({n: parallel.full(w, w.parameter.grad).tolist() for n, w in parallel.engine.weights.items()})
    return found


def test_what_is_computed_again_draws_the_same(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    files = [saved(tmp_path, "blocks"), saved(tmp_path / "again", "blocks", recompute="full")]
    assert shardscope.load_plan(files[1]).workload["recompute"] == "full"
    for plain, again in run_ranks(_gradients, 2, (files,), timeout_s=200):
        assert all(torch.allclose(torch.tensor(plain[n]), torch.tensor(again[n]), rtol=1e-5, atol=1e-7) for n in plain)


# --- numbers and flags of modules ---------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mode = 1.0, "plain"
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, KINDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x) * self.scale
        return F.cross_entropy(self.last(h if self.mode == "plain" else F.relu(h)), y)


def _losses(model: Any, x: torch.Tensor, y: torch.Tensor, **options: Any) -> list[float]:
    found = []
    for scale, mode in ((1.0, "plain"), (0.5, "plain"), (0.5, "plain"), (1.0, "plain")):
        model.scale, model.mode = scale, mode
        found.append(float(model(x, y, **options).detach()))
    return found


def _set_between_steps(file: str, counted: str) -> dict[str, Any]:
    torch.manual_seed(0)
    own, x, y = Scaled(), torch.randn(8, WIDTH), torch.randint(0, KINDS, (8,))
    wanted = _losses(copy.deepcopy(own), x, y)
    model: Any = shardscope.apply(own, shardscope.load_plan(file))
    found = _losses(model, x, y, global_batch=True)
    written = len(applied(model).programs)
    refused = ""
    try:
        for i in range(MOST_STATES + 1):
            model.scale = 2.0 + i
            with torch.no_grad():
                model(x, y, global_batch=True)
    except PlanMismatch as error:
        refused = str(error)
    module, inputs = _model("counted")
    alone = copy.deepcopy(module)
    one = [float(alone(*inputs).detach()) for _ in range(3)]
    counting: Any = shardscope.apply(module, shardscope.load_plan(counted))
    many = [float(counting(*inputs, global_batch=True).detach()) for _ in range(3)]
    return {
        "wanted": wanted,
        "found": found,
        "written": written,
        "refused": refused,
        "counted": (one, many, counting.count),
    }


def test_numbers_of_modules_are_never_frozen(tmp_path: Path) -> None:
    inputs = (torch.randn(8, WIDTH), torch.randint(0, KINDS, (8,)))
    plans = shardscope.plan(Scaled(), inputs=inputs, cluster=TWO, accumulate=1).plans
    shardscope.save_plan(next(p for p in plans if p.name == "FSDP"), tmp_path / "scaled")
    for found in run_ranks(
        _set_between_steps, 2, (str(tmp_path / "scaled"), saved(tmp_path, "counted")), timeout_s=300
    ):
        assert found["found"] == pytest.approx(found["wanted"], rel=1e-6)
        assert found["written"] == 2  # once for each value
        assert found["refused"].startswith("scale of the model has had more than") and "buffer" in found["refused"]
        one, many, count = found["counted"]
        assert many == pytest.approx(one, rel=1e-6) and len(set(one)) == 3 and count == 3


def test_a_model_whose_generators_matter_says_so() -> None:
    model, inputs = chance.masks_by_numpy()
    notes = shardscope.plan(model, inputs=inputs, cluster=TWO).notes
    assert any("random numbers of Python or numpy: all ranks draw the same" in note for note in notes)
