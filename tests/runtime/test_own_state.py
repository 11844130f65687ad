"""What people hold beside a model is right under a plan, or refused: optimizers of their own, state dicts, copies, a gradient scaler."""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import planner_core as shardscope
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.plans import own_planned
from tests.support.plans_train_alike import refusal_of, whole
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

NAMES = ("Megatron-LM", "data parallel")
STEPS = 3


class ByNorm(torch.optim.Optimizer):
    """Steps as long as a parameter is, as LAMB's and LARS's are: wrong if a norm were that of a part."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * (-group["lr"] * p.norm() / (p.grad.norm() + 1e-6)))


class ThroughData(ByNorm):
    """Writes through `.data`, with a state of its own, as older optimizers do: Lion's step, softened so that a gradient which is
    another CPU's rounding does not decide its direction."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p].setdefault("mean", torch.zeros_like(p.data))
                p.data.add_(torch.tanh(held * 90 + p.grad.data * 10), alpha=-group["lr"])
                held.mul_(0.99).add_(p.grad.data, alpha=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "by norm": lambda params: ByNorm(params, 1e-2),
    "through data": lambda params: ThroughData(params, 1e-3),
}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, **whole: bool) -> list[float]:
    found = []
    for step in range(STEPS):
        loss = model(*own_model.batch(step % 2), **whole)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def _halved(model: OwnGPT) -> dict[str, torch.Tensor]:
    return {k: v / 2 if v.is_floating_point() else v for k, v in model.state_dict().items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _scaled(plan: shardscope.Plan) -> list[bool]:
    """Whether a rank stepped after a gradient that was not finite on the first rank alone."""
    model = shardscope.apply(OwnGPT(), plan)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), lr=0.5)
    scaler.scale(model(*own_model.batch(0), global_batch=True)).backward()
    held, gradient = (local(t) for t in (model.head.weight.detach(), model.head.weight.grad))  # type: ignore[union-attr, arg-type]
    before = held.clone()
    if dist.get_rank() == 0:
        gradient[0, 0] = float("inf")
    scaler.step(optimizer)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, not torch.equal(held, before))
    return answers


def _refused(plan: shardscope.Plan) -> dict[str, str]:
    plain = OwnGPT()
    before = torch.optim.SGD(plain.parameters(), lr=0.5)
    model = shardscope.apply(plain, plan)
    return {
        "stale": refusal_of(lambda: trained(model, before, global_batch=True)),
        "copied": refusal_of(lambda: copy.deepcopy(model)),
        "averaged": refusal_of(lambda: torch.optim.swa_utils.AveragedModel(model)),
    }


def _in_order(plan: shardscope.Plan) -> dict[str, Any]:
    """The weights whose whole value is not the model's, and the losses after a state dict of whole weights and one of this rank's."""
    plain = OwnGPT()
    expected = {k: v.clone() for k, v in plain.state_dict().items()}
    model, other = shardscope.apply(plain, plan), shardscope.apply(OwnGPT(), plan)
    shown = {k: whole(v) for k, v in model.state_dict().items()}
    wrong = sorted(k for k, v in expected.items() if not torch.equal(v, shown[k]))
    model.load_state_dict(_halved(OwnGPT()))
    other.load_state_dict(model.state_dict())
    losses = [float(m(*own_model.batch(0), global_batch=True).detach()) for m in (model, other)]
    return {"shown": wrong, "losses": losses}


def _on_ranks(files: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for file in files:
        plan, row = shardscope.load_plan(file), dict[str, Any]()
        for name, make in OPTIMIZERS.items():
            model = shardscope.apply(OwnGPT(), plan)
            row[name] = trained(model, make(model.parameters()), global_batch=True)
        found.append(
            {**row, **_refused(plan), **_in_order(plan), "stepped": _scaled(plan) if plan.name == NAMES[0] else []}
        )
    return found


@cache
def rows() -> tuple[dict[str, Any], ...]:
    """What both plans do on two ranks."""
    plans = {p.name: p for p in own_planned().plans}
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in NAMES]
        for name, file in zip(NAMES, files, strict=True):
            shardscope.save_plan(plans[name], file)
        return tuple(run_ranks(_on_ranks, 2, (files,))[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_steps_as_on_one_process(optimizer: str) -> None:
    model = OwnGPT()
    alone = trained(model, OPTIMIZERS[optimizer](model.parameters()))
    for row in rows():
        assert row[optimizer] == pytest.approx(alone, rel=1e-5)


def test_an_optimizer_of_replaced_parameters_is_refused() -> None:
    """It would train tensors that take no part in the model, and the loss would never fall."""
    split, whole = rows()
    assert "make it after apply" in split["stale"]
    assert whole["stale"] == ""  # nothing is sharded: the parameters are the same ones


def test_a_copy_of_a_model_under_a_plan_is_refused() -> None:
    assert all("copy the module before apply" in row[how] for row in rows() for how in ("copied", "averaged"))


def test_a_state_dict_has_the_models_own_order() -> None:
    """Fused weights lie in another order on the ranks; who saves `model.state_dict()` by torch's own means gets the model's."""
    halved, model = _halved(OwnGPT()), OwnGPT()
    model.load_state_dict(halved)
    alone = float(model(*own_model.batch(0)).detach())
    for row in rows():
        assert row["shown"] == []
        assert row["losses"] == pytest.approx([alone, alone], rel=1e-5)


def test_all_ranks_leave_a_step_out_that_one_found_not_finite() -> None:
    assert rows()[0]["stepped"] == [False, False]


def _normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))


def _statistics(files: list[str]) -> list[str]:
    wrong = []
    for file in files:
        alone, model = _normed(), shardscope.apply(_normed(), shardscope.load_plan(file))
        kept: dict[str, Any] = {}
        for step in range(4):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            alone(inputs), model(inputs, global_batch=True)
            if step == 1:
                kept = copy.deepcopy(model.state_dict())
                wanted = copy.deepcopy(alone.state_dict())
        model.load_state_dict(kept)
        state = model.state_dict()
        wrong += [f"{file}: {n}" for n, x in wanted.items() if not torch.allclose(x, whole(state[n]), atol=1e-5)]
    return wrong


def test_running_statistics_of_parts_are_saved_and_loaded_as_a_whole(tmp_path: Path) -> None:
    _, files = saved_plans(_normed(), (torch.randn(8, 16),), tmp_path)
    assert run_ranks(_statistics, 2, (files,))[0] == []


class Watched(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


HAS_RULES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
"""Whether DTensor knows `std`, and the `masked_fill_` of a norm's backward: 2.6 and 2.8 say that they have no rule for them, 2.11 has."""


def _penalized(model: Any, **options: bool) -> list[float]:
    """Losses with a penalty on the weights, of two micro-batches a step. The first of them need not be summed over ranks."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + part))
            waits = options and part == 0 and step < 2
            with model.no_sync() if waits else contextlib.nullcontext():
                groups = sum(p.norm(dim=0).sum() if HAS_RULES else p.square().sum().sqrt() for p in model.parameters())
                loss = (
                    model(inputs, **options) + 0.1 * sum(p.square().sum() for p in model.parameters()) + 0.01 * groups
                )
                loss.backward()
            losses.append(float(whole(loss.detach())))
        optimizer.step()
    return losses


def _penalties(files: list[str]) -> list[tuple[str, list[float], list[float]]]:
    found = []
    for file in files:
        alone, model = Watched(), shardscope.apply(Watched(), shardscope.load_plan(file))
        found.append((file, _penalized(alone), _penalized(model, global_batch=True)))
    return found


def test_a_penalty_on_the_weights_counts_once_under_every_plan(tmp_path: Path) -> None:
    _, files = saved_plans(Watched(), (torch.randn(8, 16),), tmp_path)
    for file, wanted, got in run_ranks(_penalties, 2, (files,))[0]:
        assert got == pytest.approx(wanted, rel=1e-5), file


def _asked(file: str) -> list[str]:
    model = shardscope.apply(Watched(), shardscope.load_plan(file))
    model(torch.randn(8, 16), global_batch=True).backward()
    gradient, said = model.up.weight.grad, []
    for ask in (lambda: gradient.norm().item(), lambda: float(gradient.sum()), lambda: bool((gradient > 0).any())):
        said.append(refusal_of(ask))
    spread = gradient.std() if HAS_RULES else gradient.full_tensor().std()
    return [*said, str(gradient.norm().full_tensor().item() > 0), str(spread.item() > 0)]


def test_a_number_of_which_each_rank_has_a_term_is_refused(tmp_path: Path) -> None:
    report, files = saved_plans(Watched(), (torch.randn(8, 16),), tmp_path)
    file = files[[p.name for p in report.plans].index("Megatron-LM")]
    *said, norm, deviation = run_ranks(_asked, 2, (file,))[0]
    assert norm == deviation == "True"
    for one in said:
        assert re.search(r"each rank has its own term of it; let all ranks call .full_tensor\(\) first", one)


class Both(Watched):
    """Returns its scores beside the loss."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        scores = self.down(torch.relu(self.up(x)))
        return scores.square().mean(), scores


def _refusals(file: str) -> dict[str, str]:
    def steps(model: Any, loss: Any, scores: Any) -> None:
        with model.no_sync():
            loss.backward()
        torch.optim.SGD(model.parameters()).step()

    def clips(model: Any, loss: Any, scores: Any) -> None:
        with model.no_sync():
            loss.backward()
        shardscope.clip_grad_norm_(model.parameters(), 1.0)

    def listens(model: Any, loss: Any, scores: Any) -> None:
        model.up.register_full_backward_hook(lambda module, into, out: None)
        model(torch.randn(8, 16), global_batch=True)

    doings: dict[str, Callable[[Any, Any, Any], Any]] = {
        "ran inside no_sync(), so it is not summed": steps,
        "cannot be clipped": clips,
        "hook for backward": listens,
        "of some tensors alone": lambda model, loss, scores: loss.backward(inputs=[model.down.weight]),
        "or backward with inputs=": lambda model, loss, scores: torch.autograd.grad(loss, list(model.parameters())),
        "a gradient came to result 2": lambda model, loss, scores: (loss + whole(scores).mean()).backward(),
    }
    said = {}
    for expected, do in doings.items():
        model = shardscope.apply(Both(), shardscope.load_plan(file))
        said[expected] = refusal_of(partial(do, model, *model(torch.randn(8, 16), global_batch=True)))
    hooked = Both()
    hooked.up.weight.register_hook(lambda gradient: gradient * 2)
    said["register it after apply"] = refusal_of(partial(shardscope.apply, hooked, shardscope.load_plan(file)))
    return said


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    report, files = saved_plans(Both(), (torch.randn(8, 16),), tmp_path)
    said = run_ranks(_refusals, 2, (files[[p.name for p in report.plans].index("data parallel")],))[0]
    assert len(said) == 7
    for expected, error in said.items():
        assert expected in error


class TwoLosses(Watched):
    """Returns a number beside the loss, which does not depend on it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        scores = self.down(torch.relu(self.up(x)))
        return scores.square().mean(), scores.abs().mean()


def _train_on_both(files: list[str]) -> list[str]:
    messages = []
    for file in files:
        loss, penalty = shardscope.apply(TwoLosses(), shardscope.load_plan(file))(torch.randn(8, 16), global_batch=True)
        messages.append(refusal_of((loss + penalty).backward))
    return messages


def test_a_result_of_which_the_planned_loss_is_not_made_takes_no_gradient(tmp_path: Path) -> None:
    """Under every plan, also one whose moves would happen to reduce it."""
    _, files = saved_plans(TwoLosses(), (torch.randn(8, 16),), tmp_path)
    for message in run_ranks(_train_on_both, 2, (files,))[0]:
        assert "a gradient came to result 2" in message


def _drawn(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            nn.init.normal_(p)
            p.add_(torch.rand_like(p))
    return [whole(p.detach()) for p in model.parameters()]


def _apart(files: list[str]) -> list[float]:
    alone = _drawn(Watched())
    under = [_drawn(shardscope.apply(Watched(), shardscope.load_plan(file))) for file in files]
    return [float((a - b).abs().max()) for drawn in under for a, b in zip(alone, drawn, strict=True)]


def test_parts_that_are_drawn_anew_are_parts_of_what_one_process_draws(tmp_path: Path) -> None:
    _, files = saved_plans(Watched(), (torch.randn(8, 16),), tmp_path)
    assert max(run_ranks(_apart, 2, (files,))[0]) == 0.0
