"""Moments in the host's memory: the update is the same, one weight's states are on the GPU at a time, and plans with them run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from planner_core.core import Plan
from planner_core.exporters import export, export_text
from planner_core.planning.request import Request
from planner_core.runtime.training import host_states
from planner_core.runtime.training.host_states import HostStates
from planner_core.runtime.training.optimizers import make_optimizer
from planner_core.verification.api import scaled
from planner_core.verification.fake.group import verify_fake_all
from planner_core.verification.numerics import verify_all
from tests.support.plans import plan_of_layout, planned
from tests.support.torchrun import run_script


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A host and a GPU that are told apart by counting: how many states were on the GPU after each that came."""
    here, seen = set[int](), list[int]()

    def comes(state: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = state.clone()
        here.add(copy.data_ptr())
        seen.append(len(here))
        return copy

    def goes(state: torch.Tensor) -> torch.Tensor:
        here.discard(state.data_ptr())
        return state.clone()

    monkeypatch.setattr(host_states, "to_device", comes)
    monkeypatch.setattr(host_states, "to_host", goes)
    yield seen


def trained(name: str, steps: int, offload: bool) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Parameters after some steps whose rate falls, and the optimizer."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(*shape)) for shape in ((4, 3), (5,), (2, 2, 2))]
    optimizer = make_optimizer(name, params, 1e-2, offload=offload)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        optimizer.zero_grad()
        sum((p * p.detach().roll(step)).sum() for p in params[: 2 + step % 2]).backward()
        optimizer.step()
        schedule.step()
    return [p.detach() for p in params], optimizer


@pytest.mark.parametrize(("name", "states"), [("adamw", 2), ("sgd-momentum", 1)])
def test_the_update_is_the_same_and_one_weight_is_on_the_gpu(on_the_gpu: list[int], name: str, states: int) -> None:
    """A weight without a gradient in some steps is left alone in these, and a schedule sets the rate, as with the optimizer itself."""
    plain, alone = trained(name, 5, False)
    there, optimizer = trained(name, 5, True)
    assert all(torch.equal(a, b) for a, b in zip(plain, there, strict=True))
    assert on_the_gpu and max(on_the_gpu) == states
    assert {k: v.keys() for k, v in optimizer.state_dict()["state"].items()} == {
        k: v.keys() for k, v in alone.state_dict()["state"].items()
    }


def test_an_optimizer_goes_on_from_saved_states() -> None:
    _, whole = trained("adamw", 6, True)
    _, first = trained("adamw", 3, True)
    params = [nn.Parameter(p.detach().clone()) for g in first.param_groups for p in g["params"]]
    second = make_optimizer("adamw", params, 1e-2, offload=True)
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        second.zero_grad()
        sum((p * p.detach().roll(step)).sum() for p in params[: 2 + step % 2]).backward()
        second.param_groups[0]["lr"] = 1e-2 * 0.9**step
        second.step()
    wanted = [p for g in whole.param_groups for p in g["params"]]
    assert all(torch.allclose(a, b) for a, b in zip(params, wanted, strict=True))


def test_a_closure_is_refused() -> None:
    optimizer = HostStates(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(AssertionError, match="closure"):
        optimizer.step(lambda: 0.0)


# --- plans --------------------------------------------------------------------------------------------


LAYOUTS = ("fsdp=8", "dp=8")


@cache
def plan_of(layout: str, accumulate: int = 1, offload: bool = True) -> Plan:
    run = {"micro_batch": 2, "accumulate": accumulate, "layers": 2, "offload": offload}
    return plan_of_layout("llama-3-8b", "1x8-h100", layout, **run)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.slow(but=("1",))
def test_memory_is_what_a_fake_step_holds(accumulate: int) -> None:
    """Moments do not count, and those of one weight count while the step updates it. Data parallelism's step is its fullest moment."""
    plans = [plan_of(layout, accumulate) for layout in LAYOUTS]
    for plan, report in zip(plans, verify_fake_all(plans), strict=True):
        found = report["memory_bytes"]
        assert report["ok"] and found["rel_error"] < 0.005, (plan.name, found)
        assert plan.cost is not None and plan.cost.memory_bytes["optimizer"] == 0


def test_it_computes_the_same_on_real_ranks() -> None:
    plans = [scaled(plan_of(layout), 2) for layout in LAYOUTS]
    assert all(found["ok"] for found in verify_all(plans))


@pytest.mark.slow
def test_the_script_saves_and_goes_on(tmp_path: Path) -> None:
    """Losses of four steps, of which the last two are resumed with moments in the host's memory, are those of one run on the GPU."""
    told: dict[bool, list[str]] = {}
    for offload in (False, True):
        script, folder = tmp_path / f"{offload}.py", str(tmp_path / f"kept{offload}")
        request = Request("llama-3-8b", cluster="1x8-h100:gpus=2", layers=2, offload=offload)
        export(next(p for p in planned(request).plans if p.name == "FSDP"), "torchrun", script)
        said = [
            run_script(
                script, "--tiny", "--steps", str(n), "--report-every", "1", "--save", folder, "--save-every", "2"
            )
            for n in ((2, 4) if offload else (4,))
        ]
        told[offload] = re.findall(r"loss (\S+)", "".join(said))
    assert len(told[True]) >= 4 and told[True] == told[False]


def test_other_tools_are_told_what_they_do_not_do() -> None:
    told = {form: " ".join(export_text(plan_of("fsdp=8"), form).remarks) for form in ("torchrun", "json", "fsdp2")}
    assert [form for form in told if "moments in the host's memory" in told[form]] == ["fsdp2"]
    there, here = (export_text(plan_of("dp=2,tp=4,zero=1", offload=offload), "deepspeed") for offload in (True, False))
    assert '"offload_optimizer"' in there.text and "updates there too" in " ".join(there.remarks)
    assert '"offload_optimizer"' not in here.text and "host" not in " ".join(here.remarks)
