"""A model without a loss of its own, whose plan gives an operator the samples of all ranks."""

from __future__ import annotations

import torch
from torch import nn

from planner_core.core import Shard
from tests.support.plans import plan_in_passes


class Tagger(nn.Module):
    """Words by a table that is worth a split, then layers that are worth a part of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(262_144, 1024)
        layers = [m for _ in range(2) for m in (nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU())]
        self.body = nn.Sequential(*layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """One vector for each word."""
        return self.body(self.words(ids))  # type: ignore[no-any-return]


class TaggerWithLoss(Tagger):
    """The same with a loss of its own."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean of the squared vectors."""
        return super().forward(ids).float().square().mean()


def notes_of(model: nn.Module) -> list[str]:
    ids = torch.zeros(64, 128, dtype=torch.int64)
    result = plan_in_passes(model, "notes", inputs={"ids": ids}, cluster="1x8-h100:gpus=2")
    split = result.best.blocks[""].sites["words/embedding"].inputs[0].dst.forward != (Shard(0),)
    assert split and result.best.data_axes == (0,)  # all words are looked up on each rank, in a part of the table
    return [str(note) for note in result.notes if "global_batch=True" in str(note)]


def test_a_plan_says_that_it_wants_the_whole_batch() -> None:
    (note,) = notes_of(Tagger())
    assert note.startswith("words/embedding takes the samples of all ranks, and the model returns no loss")


def test_a_model_with_a_loss_takes_each_ranks_own_samples() -> None:
    assert notes_of(TaggerWithLoss()) == []
