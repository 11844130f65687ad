"""Random numbers of a model's own code: ranks whose generators differ hold one model, and nothing is drawn once for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.runtime.library import applied
from planner_core.runtime.program.names import dropout
from tests.corpus import chance, speech
from tests.support.ranks import run_ranks

TWO = "1x8-h100:gpus=2"
HOW = ("noise_like", "random_slopes", "coins", "shuffled")


def _model(how: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if how == "blocks":
        return chance.noisy_blocks()
    return speech.lstm_with_dropout() if how == "lstm" else getattr(chance, how)()


def saved(folder: Path, how: str, recompute: str = "none") -> str:
    """The file of a plan that gathers weights, with every rank working on its own samples; of the best if there is none."""
    model, inputs = _model(how)
    plans = shardscope.plan(model, inputs=inputs, cluster=TWO, recompute=recompute, accumulate=1).plans
    shardscope.save_plan(next((p for p in plans if p.name == "FSDP"), plans[0]), folder / how)
    return str(folder / how)


def _trained(hows: tuple[str, ...], files: list[str]) -> list[tuple[list[float], list[Any]]]:
    """Losses of two steps and the whole weights after them. Each rank's generators are in states of its own."""
    torch.manual_seed(100 + dist.get_rank())
    found = []
    for how, file in zip(hows, files, strict=True):
        module, inputs = _model(how)
        model = shardscope.apply(module, shardscope.load_plan(file))
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(100 + dist.get_rank())
        for _ in range(2):
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
        assert len(set(losses)) == 2  # each step draws anew


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
    assert shardscope.load_plan(files[1]).workload.recompute == "full"
    for plain, again in run_ranks(_gradients, 2, (files,), timeout_s=200):
        assert all(torch.allclose(torch.tensor(plain[n]), torch.tensor(again[n]), rtol=1e-5, atol=1e-7) for n in plain)


CHANNEL_DROPOUTS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "dropout1d": (1, lambda x: F.dropout1d(x, 0.5)),
    "dropout2d": (2, lambda x: F.dropout2d(x, 0.5)),
    "dropout3d": (3, lambda x: F.dropout3d(x, 0.5)),
    "feature_dropout": (2, lambda x: torch.feature_dropout(x, 0.5, True)),
}


@pytest.mark.parametrize("kind", CHANNEL_DROPOUTS)
def test_whole_channels_are_dropped_where_torch_drops_them(kind: str) -> None:
    dims, of_torch = CHANNEL_DROPOUTS[kind]
    x = torch.ones(8, 16, *[3] * dims)
    for y in (of_torch(x), dropout(x, 0.5, 3, kind=kind)):
        channels = y.flatten(2)
        assert torch.equal(channels, channels[..., :1].expand_as(channels))
        assert {*channels.unique().tolist()} == {0.0, 2.0}
