"""Ways in which models of public repositories are written: each plan of them trains as one process does, or is refused."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from tests.support.plans_train_alike import check_plans_train_alike, first_result, refusal_of
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

WIDTH, NUM_CLASSES = 16, 12
Batch = tuple[torch.Tensor, torch.Tensor]


def _batch(step: int) -> Batch:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, WIDTH, generator=drawn), torch.randint(0, NUM_CLASSES, (8, 4), generator=drawn)


class LossBesideLogits(nn.Module):
    """As nanoGPT and minGPT: the loss is the second result."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, NUM_CLASSES), y.view(-1), ignore_index=-1)


class ActorAndCritic(nn.Module):
    """Two results of two heads, and a number that is no loss. The loop makes its loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(WIDTH, 24), nn.Linear(24, NUM_CLASSES), nn.Linear(24, 1)
        self.register_buffer("table", torch.linspace(-1, 1, 6 * NUM_CLASSES).view(6, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.body(x).relu()
        logits = self.actor(h)
        return logits, self.critic(h), F.linear(logits, self.table).softmax(-1), h.detach().mean()


def actor_and_critic_loss(out: Any) -> torch.Tensor:
    """What the loop trains on."""
    logits, value, shares, _ = out
    y = torch.arange(logits[..., 0].numel()) % NUM_CLASSES
    return F.cross_entropy(logits.flatten(0, 1), y) + value.square().mean() + shares.square().mean()


class Setting:
    """Holds a weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight


class Fixed(dict[str, int]):
    """A dict that nobody can empty."""

    def clear(self) -> NoReturn:
        raise TypeError("it is fixed")


class WeightsInLists(nn.Module):
    """As DeepCTR-Torch: a penalty on weights that are kept in a list, beside what cannot be set again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 24), nn.Linear(24, NUM_CLASSES)
        self.penalties = [((self.a.weight, self.b.weight), 0.1), ([self.b.bias], 0.2)]
        self.named, self.setting, self.fixed = {"a": self.a.bias}, Setting(self.a.weight), Fixed(one=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.b(self.a(x).relu()).flatten(0, 1), y.flatten()) * self.fixed["one"]
        for weights, much in self.penalties:
            loss = loss + sum(much * w.square().sum() for w in weights)
        return loss + self.named["a"].square().sum() + self.setting.weight.square().mean()


class Synced(nn.Module):
    """As xcit and Tacotron 2: SyncBatchNorm, which is BatchNorm in one process; a state that is made as before torch 0.4."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(WIDTH, 24), nn.SyncBatchNorm(24), nn.Linear(24, NUM_CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.body(x).flatten(0, 1))
        state = torch.autograd.Variable(h.data.new(len(h), 24).zero_())
        return F.cross_entropy(self.head(torch.tanh(h + state)), y.flatten())


class Closed(nn.Module):
    """A weight in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, NUM_CLASSES)
        weight = self.a.weight
        self.penalty = lambda: weight.square().sum()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.a(x).flatten(0, 1), y.flatten()) + self.penalty()


class Averaged(nn.Module):
    """A loop sets `data` of a target, as BYOL's does."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(WIDTH, NUM_CLASSES), nn.Linear(WIDTH, NUM_CLASSES)
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.online(x), self.target(x).detach())


def _set_target(made: Any) -> None:
    made(*_batch(0), global_batch=True)
    for mine, theirs in zip(made.target.parameters(), made.online.parameters(), strict=True):
        mine.data = mine.data * 0.5 + theirs.data * 0.5
    made(*_batch(1), global_batch=True)


def _refused(file: str) -> str:
    return refusal_of(partial(_set_target, shardscope.apply(_made(Averaged), shardscope.load_plan(file))))


def _made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


LOSSES = {LossBesideLogits: itemgetter(1), ActorAndCritic: actor_and_critic_loss}
"""What the loop trains on, if it is not the model's first result."""


@pytest.mark.parametrize("kind", [LossBesideLogits, ActorAndCritic, WeightsInLists, Synced, Closed])
def test_every_plan_trains_as_one_process_does(kind: type[nn.Module]) -> None:
    batches = [_batch(step)[: 1 if kind is ActorAndCritic else 2] for step in range(3)]
    report = check_plans_train_alike(partial(_made, kind), batches, loss_of=LOSSES.get(kind, first_result))
    assert kind is Closed or any(p.name == "Megatron-LM" for p in report.plans)


def test_weights_whose_data_a_loop_sets_are_refused(tmp_path: Path) -> None:
    named = saved_plans(_made(Averaged), _batch(0), tmp_path)[1]
    said = run_ranks(_refused, 2, (next(f for f in named if f.endswith("FSDP")),))[0]
    assert said.startswith("the data of target.weight was set")
