"""What ranks must bring alike: weights, plan, seed, and the batch along other axes than those of data."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate

import planner_core as shardscope
from planner_core.runtime.library import applied
from tests.support.plans_train_alike import refusal_of
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

SAMPLES, TRUTH = torch.linspace(-1, 1, 8 * 16).view(8, 16), torch.arange(8) % 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.BatchNorm1d(16), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(self.up(self.norm(x)).relu()), y)


def _net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def _running(rank: int) -> Net:
    net = _net()
    net.norm.running_mean.fill_(rank)  # type: ignore[union-attr, operator]
    return net


def _gone(file: str) -> bool:
    model = shardscope.apply(_net(), shardscope.load_plan(file))
    model(SAMPLES, TRUTH, global_batch=True).backward()
    weight = weakref.ref(model.up.weight)
    del model
    gc.collect()
    return weight() is None


def test_a_model_that_is_not_used_any_more_is_freed(tmp_path: Path) -> None:
    assert all(run_ranks(_gone, 2, _files(tmp_path)[:1]))


def _scratched(rank: int) -> Net:
    net = _net()
    net.register_buffer("scratch", torch.full((4,), float(rank)), persistent=False)
    return net


class Untouched(Net):
    """A buffer of memory that was never written."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.register_buffer("form", torch.full((1,), float(dist.get_rank() if dist.is_initialized() else 0)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shift = x.new_zeros(x.shape) if self.reads != "value" else x.new_zeros(x.shape) + self.form
        if self.reads == "write":
            self.form.fill_(1)
        return super().forward(x + shift, y)


def _unread(file: str) -> dict[str, str]:
    found = {}
    for reads in ("", "value", "write"):
        torch.manual_seed(0)
        model = shardscope.apply(Untouched(reads), shardscope.load_plan(file))
        found[reads] = refusal_of(functools.partial(_called, model))
    return found


def test_a_buffer_that_is_not_read_may_differ(tmp_path: Path) -> None:
    _, files = saved_plans(Untouched(), (SAMPLES, TRUTH), tmp_path)
    for found in run_ranks(_unread, 2, (next(f for f in files if f.endswith("data parallel")),)):
        assert found.pop("") == ""
        for said in found.values():
            assert said.startswith("form is not the same on rank 0 and rank 1")


def _loaded(net: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    net.load_state_dict(state, strict=False)
    return net


def _called(net: nn.Module) -> None:
    net(SAMPLES, TRUTH, global_batch=True)


def _starts(split: str, whole: str) -> dict[str, str]:
    rank, plan = dist.get_rank(), shardscope.load_plan(split)
    with torch.device("meta"):
        bare = Net()
    bare.norm.running_mean, bare.norm.running_var = torch.zeros(16), torch.ones(16)
    return {
        "seeds of weights": refusal_of(lambda: _called(shardscope.apply(_net(rank), plan))),
        "buffers": refusal_of(lambda: _called(shardscope.apply(_running(rank), plan))),
        "first values": refusal_of(
            lambda: _called(shardscope.apply(bare, plan, init=lambda _, p: torch.full(p.shape, float(rank))))
        ),
        "loaded": refusal_of(lambda: _called(_loaded(shardscope.apply(_net(rank), plan), _net().state_dict()))),
        "loaded in part": refusal_of(
            lambda: _called(_loaded(shardscope.apply(_net(rank), plan), {"up.weight": _net().up.weight}))
        ),
        "scratch": refusal_of(lambda: _called(shardscope.apply(_scratched(rank), plan))),
        "twice": refusal_of(lambda: shardscope.apply(shardscope.apply(_net(), plan), plan)),
        "plans": refusal_of(lambda: shardscope.apply(_net(), shardscope.load_plan((split, whole)[rank]))),
        "seeds of dropout": refusal_of(lambda: shardscope.apply(_net(), plan, seed=rank)),
        "alike": refusal_of(lambda: shardscope.apply(_net(), plan)),
    }


def _files(folder: Path) -> tuple[str, str]:
    _, files = saved_plans(_net(), (SAMPLES, TRUTH), folder)
    return next(f for f in files if f.endswith("Megatron-LM")), next(f for f in files if f.endswith("data parallel"))


def test_ranks_that_start_from_something_else_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(_starts, 2, _files(tmp_path)):
        assert said["seeds of weights"].startswith("up.weight is not the same on rank 0 and rank 1")
        assert "norm.running_mean" in said["buffers"] and "up.weight" in said["first values"]
        assert (
            said["plans"].startswith("the plan is not the same") and "the seed of dropout" in said["seeds of dropout"]
        )
        assert said["alike"] == said["loaded"] == said["scratch"] == ""
        assert said["loaded in part"].startswith("up.bias is not the same")
        assert said["twice"].startswith("up.weight is under a plan already")


def _calls(split: str, whole: str) -> dict[str, str]:
    rank, said = dist.get_rank(), {}
    other, mine = SAMPLES + rank, (SAMPLES.chunk(2)[rank], TRUTH.chunk(2)[rank])
    for name, file in (("Megatron-LM", split), ("data parallel", whole)):
        model = shardscope.apply(_net(), shardscope.load_plan(file))
        said[f"{name}, own"] = refusal_of(lambda model=model: model(*mine))
        model = shardscope.apply(_net(), shardscope.load_plan(file))
        said[f"{name}, all"] = refusal_of(lambda model=model: model(SAMPLES, TRUTH, global_batch=True))
        with torch.no_grad():
            said[f"{name}, other"] = refusal_of(lambda model=model: model(other, y=TRUTH, global_batch=True))
        model.eval()
        said[f"{name}, by name"] = refusal_of(lambda model=model: model(SAMPLES, y=TRUTH + rank, global_batch=True))
    return said


def test_a_batch_that_must_be_the_same_on_all_ranks_is_refused_where_it_is_not(tmp_path: Path) -> None:
    for said in run_ranks(_calls, 2, _files(tmp_path)):
        assert {name for name, words in said.items() if not words} == {
            "Megatron-LM, all",
            "data parallel, own",
            "data parallel, all",
        }
        assert said["Megatron-LM, own"].startswith("x has other values on rank 1 than on rank 0")
        assert "with global_batch=True every rank gives the whole batch" in said["data parallel, other"]
        assert said["data parallel, by name"].startswith("y has other values")


class Banked(nn.Module):
    """A forward beside whose samples there is a table, of as many rows as a rank has samples, and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, bank: torch.Tensor, scale: float | int) -> torch.Tensor:
        scores = self.l(x) @ bank.T
        return scores.logsumexp(1).mean() / len(bank) * (3 if isinstance(scale, bool) else scale)


BANK = torch.linspace(0, 1, 4 * 16).view(4, 16)


def _banked(files: list[str]) -> list[tuple[str, float]]:
    rank, found = dist.get_rank(), []
    for file in files:
        model, alone = shardscope.apply(Banked(), shardscope.load_plan(file)), Banked()
        own = SAMPLES.chunk(2)[rank] if file.endswith(("data parallel", "FSDP")) else SAMPLES
        for scale in (1, True, 1.0):
            wanted = alone(SAMPLES, BANK, scale).item()
            found.append((f"{file} {scale!r}", abs(model(SAMPLES, BANK, scale, global_batch=True).item() - wanted)))
            found.append((f"{file} {scale!r} own", abs(model(own, BANK, scale).item() - wanted)))
    return found


def test_a_table_among_the_inputs_is_not_taken_for_samples(tmp_path: Path) -> None:
    _, files = saved_plans(Banked(), (SAMPLES, BANK, 1), tmp_path)
    assert any(file.endswith("data parallel") for file in files)
    rows = run_ranks(_banked, 2, (files,))[0]
    assert [row for row in rows if row[1] > 1e-5] == []


def _fed(file: str) -> tuple[list[str], str, str]:
    rank = dist.get_rank()
    model = shardscope.apply(Banked(), shardscope.load_plan(file))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(SAMPLES.chunk(2)[rank], BANK + rank, 1 + rank)
    shared = DTensor.from_local(BANK, applied(model).mesh, [Replicate()])
    refused = refusal_of(lambda: model(SAMPLES, shared, 1, global_batch=True))
    return [str(w.message) for w in seen], refused, refusal_of(lambda: model(SAMPLES.chunk(2)[rank], 1, scale=SAMPLES))


def test_other_tables_on_other_ranks_are_warned_of_and_parts_refused(tmp_path: Path) -> None:
    _, files = saved_plans(Banked(), (SAMPLES, BANK, 1), tmp_path)
    warned, refused, new = run_ranks(_fed, 2, (next(f for f in files if f.endswith("data parallel")),))[0]
    assert [
        words.partition(" has other values on rank 1 than on rank 0, and holds no samples")[0] for words in warned
    ] == ["bank", "scale"]
    assert refused.startswith("an input is a DTensor")
    assert new.startswith("scale is not among the inputs that were planned, some of which have no samples")


def _whole(file: str) -> list[str]:
    model = shardscope.apply(_net(), shardscope.load_plan(file))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(SAMPLES, TRUTH, global_batch=True)
        model(SAMPLES.chunk(2)[dist.get_rank()], TRUTH.chunk(2)[dist.get_rank()])
        model(SAMPLES, TRUTH)
    return [str(w.message) for w in seen]


def test_a_rank_that_is_given_the_whole_batch_as_its_own_is_told(tmp_path: Path) -> None:
    (told,) = run_ranks(_whole, 2, _files(tmp_path)[1:])[0]
    assert told.startswith(
        "dim 0 of this rank's inputs has 8 samples, as many as the plan has for all ranks: 2 parts make 16"
    )


def _alone(file: str) -> list[float]:
    """The losses with an optimizer that gives each rank weights of its own to step."""
    model, rank = shardscope.apply(_net(), shardscope.load_plan(file)), dist.get_rank()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(SAMPLES.chunk(2)[rank], TRUTH.chunk(2)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_an_optimizer_of_a_ranks_own_weights_steps(tmp_path: Path) -> None:
    alone, losses = _net(), []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        loss = alone(SAMPLES, TRUTH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert run_ranks(_alone, 2, _files(tmp_path)[1:])[0] == pytest.approx(losses, rel=1e-5)
