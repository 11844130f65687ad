"""Which dim holds the samples is told by operators, not by sizes, so usual layouts are found for any order and any statistics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner_core as shardscope
from planner_core.search.network import input_sample_dims


class TokensFirst(nn.Module):
    """Works on [tokens, samples, width], with as many tokens as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.layer = nn.Embedding(32, 16), nn.Embedding(8, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        h = (self.words(ids) + self.places(torch.arange(8))).transpose(0, 1)
        return F.cross_entropy(torch.tanh(self.layer(h)).mean(0), y)


class Sizes(nn.Module):
    """Weights, classes and features of the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.randn(8, 32))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x @ self.down @ self.up.T
        z = (h - h.mean(0)) / (h.std(0) + 1e-5)
        return F.cross_entropy(self.head(h), y) + (z.T @ z / 8).square().mean()


class Balance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        return (p.mean((0, 1)) * p.square().mean((0, 1))).sum()


CASES = {
    "tokens first": (TokensFirst, (torch.randint(0, 32, (8, 8)), torch.randint(0, 16, (8,)))),
    "sizes": (Sizes, (torch.randn(8, 8), torch.randint(0, 8, (8,)))),
    "balance": (Balance, (torch.randn(8, 4, 16),)),
}


@pytest.mark.parametrize("case", CASES)
def test_usual_layouts_are_found(case: str) -> None:
    made, inputs = CASES[case]
    report = shardscope.plan(made(), inputs=inputs, cluster="1x8-h100:gpus=2", accumulate=1)
    assert {"data parallel", "FSDP"} <= {plan.name for plan in report.plans}


def test_a_product_of_two_means_of_the_batch_takes_two_sums() -> None:
    made, inputs = CASES["balance"]
    report = shardscope.plan(made(), inputs=inputs, cluster="1x8-h100:gpus=2", accumulate=1)
    plain = next(plan for plan in report.plans if plan.name == "data parallel")
    assert {phase: set(kinds) for phase, kinds in plain.cost.collectives().items() if kinds} == {
        "forward": {"all_reduce"},
        "backward": {"all_reduce"},
    }


def test_samples_behind_the_tokens_are_followed() -> None:
    made, inputs = CASES["tokens first"]
    report = shardscope.plan(made(), inputs=inputs, cluster="1x8-h100:gpus=2", accumulate=1)
    found = input_sample_dims(report.graph)
    top = report.graph.top
    assert all(
        found[top.name][i] == 0 for i, v in enumerate(top.values) if v.kind == "constant" and v.meta.shape == (8, 8)
    )
