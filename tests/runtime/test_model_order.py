"""A weight of several parts (q, k, v) whose rows each rank holds some of: what a loop sees and makes of it has the model's order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import planner_core as shardscope
from planner_core.runtime import PlanMismatch
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.plans_train_alike import whole
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

SEEN: dict[str, Callable[[nn.Parameter], Any]] = {
    "the weight": lambda p: p,
    "detached": lambda p: p.detach(),
    "its data": lambda p: p.data,
    "a copy": lambda p: p.detach().clone().double(),
    "the gradient": lambda p: p.grad,
    "made of both": lambda p: p.grad * 2 - p.detach() / 3,
    "redistributed": lambda p: p.redistribute(placements=[Replicate()]) if isinstance(p, DTensor) else p,
}


def _of(file: str, module: Callable[[], nn.Module]) -> Any:
    return shardscope.apply(module(), shardscope.load_plan(file))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((whole(a) - b).detach().abs().max())


def _pair(file: str) -> tuple[Any, Any]:
    alone, model = OwnGPT(), _of(file, OwnGPT)
    model.load_state_dict(alone.state_dict())
    for one, options in ((alone, {}), (model, {"global_batch": True})):
        one(*own_model.batch(0), **options).backward()
    return alone, model


def _seen(file: str) -> list[tuple[str, float]]:
    alone, model = _pair(file)
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    found = [(what, _distance(see(p), see(q))) for what, see in SEEN.items() for p, q in pairs]
    own = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, alone)]
    for optimizer in own:
        optimizer.step()
    states = [optimizer.state for optimizer in own]
    return found + [("state", _distance(states[0][p]["exp_avg"], states[1][q]["exp_avg"])) for p, q in pairs]


def _megatron(module: nn.Module, inputs: Any, folder: Path) -> str:
    report, files = saved_plans(module, inputs, folder)
    return files[[p.name for p in report.plans].index("Megatron-LM")]


def test_whole_tensors_have_the_models_own_order(tmp_path: Path) -> None:
    rows = run_ranks(_seen, 2, (_megatron(OwnGPT(), own_model.batch(0), tmp_path),))[0]
    assert [row for row in rows if row[1] > 1e-5] == []


def _stepped(model: Any) -> list[torch.Tensor]:
    """Two steps of an optimizer that makes each update from the whole gradient, as Muon's do; the loss has a term of whole weights.

    The update is continuous in the gradient: a sign would turn another CPU's rounding into another answer."""
    for k in range(2):
        options = {"global_batch": True} if any(isinstance(p, DTensor) for p in model.parameters()) else {}
        slopes = [torch.linspace(-1, 1, p.numel()).reshape(p.shape) for p in model.parameters()]
        term = sum((whole(p) * slope).sum() for p, slope in zip(model.parameters(), slopes, strict=True))
        (model(*own_model.batch(k), **options) + 0.01 * term).backward()
        with torch.no_grad():
            for p in model.parameters():
                direction = (gradient := whole(p.grad)) / gradient.norm()
                update = -0.1 * direction * torch.arange(p.shape[0]).reshape(-1, *[1] * (p.dim() - 1))
                p.add_(distribute_tensor(update, p.device_mesh, p.placements) if isinstance(p, DTensor) else update)
                p.grad = None
    return [whole(p.detach()) for p in model.parameters()]


def _updates(file: str) -> list[float]:
    alone, model = OwnGPT(), _of(file, OwnGPT)
    model.load_state_dict(alone.state_dict())
    return [_distance(a, b) for a, b in zip(_stepped(model), _stepped(alone), strict=True)]


def test_updates_that_are_made_of_whole_gradients_reach_their_rows(tmp_path: Path) -> None:
    assert max(run_ranks(_updates, 2, (_megatron(OwnGPT(), own_model.batch(0), tmp_path),))[0]) < 1e-5


FULL = StateDictOptions(full_state_dict=True)
FROM_ONE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _through_torch(file: str, module: Callable[[], nn.Module], batch: Any) -> list[tuple[str, float]]:
    """Distances from one process after weights and states went through torch's functions of checkpoints, each followed by a step."""
    alone, model, found = module(), _of(file, module), []

    def adam(one: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-2)

    def note(what: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for one, own, options in ((alone, first, {}), (model, optimizer, {"global_batch": True})):
            one(*batch, **options).backward()
            own.step()
            own.zero_grad()
        state = get_model_state_dict(model, options=FULL)
        found.append((what, max(_distance(state[k], v) for k, v in alone.state_dict().items() if k in state)))
        return optimizer

    first, optimizer = adam(alone), adam(model)
    for options in (FULL, FROM_ONE):
        given = {k: v * 0.5 if v.is_floating_point() else v for k, v in alone.state_dict().items()}
        alone.load_state_dict(given)
        set_model_state_dict(model, copy.deepcopy(given), options=options)
        note("whole weights", optimizer)
    for options in (FULL, FROM_ONE):
        optimizer = adam(model)
        set_optimizer_state_dict(
            model, optimizer, copy.deepcopy(get_optimizer_state_dict(alone, first)), options=options
        )
        note("whole states", optimizer)
    held = copy.deepcopy(optimizer.state_dict())
    optimizer = adam(model)
    optimizer.load_state_dict(held)
    note("own states", optimizer)
    sharded = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    optimizer = adam(model)
    set_optimizer_state_dict(model, optimizer, sharded)
    note("sharded states", optimizer)
    shown = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    for name, param in alone.named_parameters():
        found.append((name, _distance(shown[name]["exp_avg"], first.state[param]["exp_avg"])))
    return found


@pytest.mark.parametrize("module", ["OwnGPT", "Twins"])
def test_states_go_through_torchs_functions_of_checkpoints(module: str, tmp_path: Path) -> None:
    made, batch = (OwnGPT, own_model.batch(0)) if module == "OwnGPT" else (Twins, (_batch(),))
    rows = run_ranks(_through_torch, 2, (_megatron(made(), batch, tmp_path), made, batch))[0]
    assert [row for row in rows if row[1] > 1e-5] == []


class Twins(nn.Module):
    """Two weights of one shape, whose gradients come in one bucket; only one of them is three in one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused, self.plain, self.back = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.fused(x).chunk(3, -1)
        return (self.back(self.plain(x).relu()).square().mean() + (q * k).sigmoid().mul(v)).square().mean()


def _gradients(files: list[str]) -> list[tuple[str, str, float]]:
    alone, found = Twins(), []
    alone(_batch()).backward()
    for file in files:
        model = _of(file, Twins)
        model(_batch(), global_batch=True).backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert q.grad is not None, name
            found.append((file, name, float((whole(p.grad) - q.grad).abs().max() / q.grad.abs().max())))
    return found


def _batch() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def test_the_order_of_a_gradient_is_that_of_its_own_weight(tmp_path: Path) -> None:
    _, files = saved_plans(Twins(), (_batch(),), tmp_path)
    wrong = [row for row in run_ranks(_gradients, 2, (files,))[0] if row[2] > 1e-4]
    assert not wrong


REFUSED: dict[str, Callable[[Any], Any]] = {
    "slice": lambda model: model.fused.weight[:, :8],
    "split": lambda model: model.fused.weight.detach().chunk(3),
    "view": lambda model: model.fused.weight.detach().view(3, 16, 16),
    "unbind": lambda model: list(model.fused.weight.grad),
    "select": lambda model: model.fused.weight.grad[0],
    "to_local()": lambda model: model.fused.weight.to_local() * 2,
    "a whole tensor of shape": lambda model: model.fused.weight + torch.zeros(48, 16),
}
"""Views, through which a loop may write other rows than it means, with a part of the sentence."""
RIGHT: dict[str, Callable[[Any], Any]] = {
    "flip": lambda model: model.fused.weight.flip(0),
    "cumsum": lambda model: model.fused.weight.grad.cumsum(0),
    "roll": lambda model: model.fused.bias.roll(1),
    "a copy": lambda model: model.fused.weight.detach().clone(),
    "norms of rows": lambda model: model.fused.weight.grad.pow(2).mean(-1, keepdim=True).sqrt(),
    "a norm along rows": lambda model: model.fused.weight.detach().norm(dim=1),
    "the place of the largest": lambda model: model.fused.weight.detach().argmax(0),
    "the largest of each column": lambda model: model.fused.weight.detach().amax(0),
    "turned": lambda model: model.fused.weight.detach().t(),
    "a product with itself": lambda model: model.fused.weight.detach() @ model.fused.weight.detach().t(),
    "by column norms": lambda model: model.fused.weight.detach() / model.fused.weight.detach().norm(dim=0),
    "by row norms": lambda model: model.fused.weight.detach() / model.fused.weight.detach().norm(dim=1, keepdim=True),
    "with an update that was cut": lambda model: (
        model.fused.weight.detach() + _dealt(model, torch.arange(768.0).reshape(48, 16))
    ),
    "with a mask of rows": lambda model: (
        model.fused.weight.detach() * _dealt(model, torch.arange(48.0).reshape(48, 1), Replicate())
    ),
    "all shown at once": lambda model: model.state_dict()["fused.weight"][:16],
    "another weight": lambda model: model.plain.weight.detach()[:16],
}


def _dealt(model: Any, whole: torch.Tensor, *placements: Any) -> torch.Tensor:
    weight = model.fused.weight
    return (
        distribute_tensor(whole, weight.device_mesh, placements or weight.placements)
        if isinstance(weight, DTensor)
        else whole
    )


def _pieces(file: str) -> tuple[dict[str, str], list[tuple[str, float]]]:
    alone, model, said = Twins(), _of(file, Twins), {}
    alone(_batch()).backward()
    model(_batch(), global_batch=True).backward()
    for what, take in REFUSED.items():
        with pytest.raises(PlanMismatch) as refused:
            take(model)
        said[what] = str(refused.value)
    return said, [(what, _distance(take(model), take(alone))) for what, take in RIGHT.items()]


def test_pieces_of_such_a_weight_are_refused_and_others_right(tmp_path: Path) -> None:
    said, distances = run_ranks(_pieces, 2, (_megatron(Twins(), (_batch(),), tmp_path),))[0]
    for what, sentence in said.items():
        assert what in sentence
    assert [row for row in distances if row[1] > 1e-5] == []


def _terms(model: Any) -> torch.Tensor:
    """Terms of a loop that torch makes of a weight along a dim: one that is sharded, and that of a weight of several parts that is not."""
    weights = model.back.weight, model.fused.weight
    return sum((w * w.flip(1)).sum() + w.cumsum(1).square().mean() for w in weights)  # type: ignore[return-value]


def _gradients_of_terms(file: str) -> list[float]:
    alone, model = Twins(), _of(file, Twins)
    (alone(_batch()) + _terms(alone)).backward()
    (model(_batch(), global_batch=True) + _terms(model)).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return [float(abs(whole(p.grad) - q.grad).max()) for p, q in pairs]  # type: ignore[operator]


def test_terms_of_a_loop_that_take_a_dim_whole_have_right_gradients(tmp_path: Path) -> None:
    for found in run_ranks(_gradients_of_terms, 2, (_megatron(Twins(), (_batch(),), tmp_path),)):
        assert max(found) < 1e-4
