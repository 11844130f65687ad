"""Ways in which models of public repositories are written: each plan of them trains as one process does, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.runtime import PlanMismatch
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

WIDTH, KINDS, STEPS = 16, 12, 3
Batch = tuple[torch.Tensor, torch.Tensor]


def _batch(step: int) -> Batch:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, WIDTH, generator=drawn), torch.randint(0, KINDS, (8, 4), generator=drawn)


class LossBesideLogits(nn.Module):
    """As nanoGPT and minGPT: the loss is the second result."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, KINDS), y.view(-1), ignore_index=-1)

    def loss(self, out: Any, y: torch.Tensor) -> torch.Tensor:
        """What the loop trains on."""
        return out[1]  # type: ignore[no-any-return]


class ActorAndCritic(nn.Module):
    """Two results of two heads, and a number that is no loss. The loop makes its loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(WIDTH, 24), nn.Linear(24, KINDS), nn.Linear(24, 1)
        self.register_buffer("table", torch.linspace(-1, 1, 6 * KINDS).view(6, KINDS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.body(x).relu()
        logits = self.actor(h)
        return logits, self.critic(h), F.linear(logits, self.table).softmax(-1), h.detach().mean()

    def loss(self, out: Any, y: torch.Tensor) -> torch.Tensor:
        """What the loop trains on."""
        logits, value, shares, _ = out
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + value.square().mean() + shares.square().mean()


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
        self.a, self.b = nn.Linear(WIDTH, 24), nn.Linear(24, KINDS)
        self.penalties = [((self.a.weight, self.b.weight), 0.1), ([self.b.bias], 0.2)]
        self.named, self.setting, self.fixed = {"a": self.a.bias}, Setting(self.a.weight), Fixed(one=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.b(self.a(x).relu()).flatten(0, 1), y.flatten()) * self.fixed["one"]
        for weights, much in self.penalties:
            loss = loss + sum(much * w.square().sum() for w in weights)
        return loss + self.named["a"].square().sum() + self.setting.weight.square().mean()

    def loss(self, out: Any, y: torch.Tensor) -> torch.Tensor:
        """What the loop trains on."""
        return out  # type: ignore[no-any-return]


class Synced(nn.Module):
    """As xcit and Tacotron 2: SyncBatchNorm, which is BatchNorm in one process; a state that is made as before torch 0.4."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(WIDTH, 24), nn.SyncBatchNorm(24), nn.Linear(24, KINDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.body(x).flatten(0, 1))
        state = torch.autograd.Variable(h.data.new(len(h), 24).zero_())
        return F.cross_entropy(self.head(torch.tanh(h + state)), y.flatten())

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What the loop trains on."""
        return out


MODELS: tuple[Callable[[], Any], ...] = (LossBesideLogits, ActorAndCritic, WeightsInLists, Synced)


def _made(kind: int) -> Any:
    torch.manual_seed(0)
    return MODELS[kind]()


def _given(model: Any, step: int) -> tuple[torch.Tensor, ...]:
    x, y = _batch(step)
    return (x,) if isinstance(model, ActorAndCritic) else (x, y)


def _losses(model: Any, loss: Callable[..., torch.Tensor], kind: Any, **options: Any) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        value = loss(model(*_given(kind, step), **options), _batch(step)[1])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(value.detach()))
    return found


def _all(kind: int, files: list[str]) -> dict[str, list[float]]:
    plain, found = _made(kind), {}
    for file in files:
        model = shardscope.apply(_made(kind), shardscope.load_plan(file))
        found[Path(file).name] = _losses(model, plain.loss, plain, global_batch=True)
    return found


@pytest.mark.parametrize("kind", range(len(MODELS)), ids=[m.__name__ for m in MODELS])
def test_every_plan_trains_as_one_process_does(kind: int, tmp_path: Path) -> None:
    model = _made(kind)
    report, files = saved_plans(model, _given(model, 0), tmp_path)
    assert any(p.name == "Megatron-LM" for p in report.plans)
    wanted = _losses(model, model.loss, model)
    for name, losses in run_ranks(_all, 2, (kind, files))[0].items():
        assert losses == pytest.approx(wanted, rel=1e-5), name


class Closed(nn.Module):
    """A weight in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, KINDS)
        weight = self.a.weight
        self.penalty = lambda: weight.square().sum()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.a(x).flatten(0, 1), y.flatten()) + self.penalty()


class Averaged(nn.Module):
    """A loop sets `data` of a target, as BYOL's does."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(WIDTH, KINDS), nn.Linear(WIDTH, KINDS)
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.online(x), self.target(x).detach())


def _refused(file: str) -> str:
    torch.manual_seed(0)
    made: Any = shardscope.apply(Averaged(), shardscope.load_plan(file))
    try:
        made(*_batch(0), global_batch=True)
        for mine, theirs in zip(made.target.parameters(), made.online.parameters(), strict=True):
            mine.data = mine.data * 0.5 + theirs.data * 0.5
        made(*_batch(1), global_batch=True)
    except PlanMismatch as told:
        return str(told)
    return ""


def _closed(file: str) -> list[float]:
    torch.manual_seed(0)
    return _losses(shardscope.apply(Closed(), shardscope.load_plan(file)), lambda x, y: x, None, global_batch=True)


@pytest.mark.parametrize("name", ["best", "data parallel", "FSDP"])
def test_a_weight_in_a_closure_is_trained(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Closed()
    _, files = saved_plans(model, _batch(0), tmp_path)
    wanted = _losses(model, lambda x, y: x, None)
    for found in run_ranks(_closed, 2, (next(f for f in files if f.endswith(name)),)):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_weights_whose_data_a_loop_sets_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    named = saved_plans(Averaged(), _batch(0), tmp_path)[1]
    said = run_ranks(_refused, 2, (next(f for f in named if f.endswith("FSDP")),))[0]
    assert said.startswith("the data of target.weight was set")
