"""What modules hold beside weights: set between two steps, or by forward itself, it counts, and nothing is frozen or stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.core import CaptureError
from planner_core.runtime import PlanMismatch
from planner_core.runtime.library import applied
from planner_core.runtime.record.attributes import MOST_STATES
from planner_core.verification.processes import run_ranks
from tests.corpus import chance
from tests.corpus.chance import KINDS, WIDTH
from tests.support.saved_plans import TWO, saved_plans


class Trainer:
    """Known to a module, as by a `LightningModule`, and other in each step. It is no config."""

    def __init__(self) -> None:
        self.steps, self.hook = 0, lambda: None


NUMBER = {"of": {"all": 1.0}}
"""A setting of the file, as scripts have them."""


def _setting() -> float:
    return NUMBER["of"]["all"]


def _whole(h: torch.Tensor) -> torch.Tensor:
    return h * 1.0


def _half(h: torch.Tensor) -> torch.Tensor:
    return h * 0.5


class Scaled(nn.Module):
    """`where` is the scale kept."""

    of_class = 1.0

    def __init__(self, where: str = "number") -> None:
        super().__init__()
        self.where, self.number, self.tensor, self.written = where, 1.0, torch.ones(1), torch.ones(1)
        self.config, self.listed, self.named = SimpleNamespace(number=1.0, more={"a": [1.0]}), [1.0], {"number": 1.0}
        self.act: Callable[[torch.Tensor], torch.Tensor] = _whole
        self.trainer = Trainer()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, KINDS)

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return self.act(h) if self.where == "function" else h * self.scale()

    def scale(self) -> Any:
        return {
            "number": self.number, "config": self.config.number, "deep": self.config.more["a"][0], "list": self.listed[0],
            "dict": self.named["number"], "tensor": self.tensor, "in place": self.written * 1.0, "class": Scaled.of_class,
            "file": _setting(),
        }[self.where]  # fmt: skip

    def set(self, scale: float) -> None:
        self.trainer.steps += 1
        if self.where == "tensor":
            self.tensor = torch.full((1,), scale)
        elif self.where == "in place":
            self.written.fill_(scale)
        elif self.where == "function":
            self.act = _whole if scale == 1.0 else _half
        elif self.where == "number":
            self.number = scale
        elif self.where == "class":
            Scaled.of_class = scale
        elif self.where == "file":
            NUMBER["of"]["all"] = scale
        else:
            self.config.number = self.config.more["a"][0] = self.listed[0] = self.named["number"] = scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(self.scaled(self.first(x))), y)


WHERE = ("number", "config", "deep", "list", "dict", "tensor", "in place", "function", "class", "file")


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, WIDTH), torch.randint(0, KINDS, (8,))


def _saved(path: Path, model: nn.Module) -> str:
    shardscope.save_plan(shardscope.plan(model, inputs=_inputs(), cluster=TWO, accumulate=1).best, path)
    return str(path)


def _losses(model: Any, inputs: Any, **options: Any) -> list[float]:
    found = []
    for scale in (1.0, 0.5, 0.5, 1.0):
        model.set(scale)
        found.append(float(model(*inputs, **options).detach()))
    return found


def _set_between_steps(files: list[str]) -> list[tuple[list[float], list[float]]]:
    found = []
    for where, file in zip(WHERE, files, strict=True):
        torch.manual_seed(0)
        own, inputs = Scaled(where), _inputs()
        wanted = _losses(copy.deepcopy(own), inputs)
        found.append((wanted, _losses(shardscope.apply(own, shardscope.load_plan(file)), inputs, global_batch=True)))
    return found


def test_what_is_set_between_steps_counts_wherever_it_is_kept(tmp_path: Path) -> None:
    files = [_saved(tmp_path / where, Scaled(where)) for where in WHERE]
    for found in run_ranks(_set_between_steps, 2, (files,), timeout_s=200):
        for where, (wanted, got) in zip(WHERE, found, strict=True):
            assert got == pytest.approx(wanted, rel=1e-6) and len(set(wanted)) == 2, where


def _in_many_states(file: str) -> tuple[int, str]:
    inputs = _inputs()
    model: Any = shardscope.apply(Scaled(), shardscope.load_plan(file))
    _losses(model, inputs, global_batch=True)
    written = len(applied(model).programs)
    try:
        for i in range(MOST_STATES + 1):
            model.number = 2.0 + i
            with torch.no_grad():
                model(*inputs, global_batch=True)
    except PlanMismatch as error:
        return written, str(error)
    return written, ""


def test_code_is_written_once_for_each_value_and_not_for_ever(tmp_path: Path) -> None:
    for written, refused in run_ranks(_in_many_states, 2, (_saved(tmp_path / "scaled", Scaled()),), timeout_s=200):
        assert written == 2
        assert refused.startswith("number of the model has had more than") and "buffer" in refused


# --- what forward itself sets ----------------------------------------------------------------------------


class Keeping(nn.Module):
    """Keeps a computed tensor for code outside: under an attribute that is None at first, in a list, or in a dict."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body = how, nn.Linear(WIDTH, KINDS)
        self.extra: Any = {"attribute": None, "new list": [], "list": [], "dict": {}}[how]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        extra = h.square().mean()
        if self.how == "attribute":
            self.extra = extra
        elif self.how == "new list":
            self.extra = [extra]
        elif self.how == "list":
            self.extra.clear()
            self.extra.append(extra)
        else:
            self.extra["first"] = extra
        return F.cross_entropy(h, y)


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda model: torch.zeros(()) + model.extra,
    "new list": lambda model: sum(model.extra),
    "list": lambda model: model.extra[0],
    "dict": lambda model: torch.relu(model.extra["first"]),
}


def _read_outside(files: list[str]) -> dict[str, tuple[int, str]]:
    found = {}
    for (how, read), file in zip(OUTSIDE.items(), files, strict=True):
        model: Any = shardscope.apply(Keeping(how), shardscope.load_plan(file))
        for _ in range(2):
            model(*_inputs(), global_batch=True)
        with torch.no_grad():
            model(*_inputs(), global_batch=True)
        try:
            found[how] = len(applied(model).programs), f"read {read(model)}"
        except PlanMismatch as error:
            found[how] = len(applied(model).programs), str(error)
    return found


def test_a_tensor_that_forward_keeps_is_never_stale(tmp_path: Path) -> None:
    files = [_saved(tmp_path / how, Keeping(how)) for how in OUTSIDE]
    for found in run_ranks(_read_outside, 2, (files,), timeout_s=200):
        for how, (programs, said) in found.items():
            name = "extra.first" if how == "dict" else "extra"
            assert programs == 2, how
            assert said.startswith(f"forward keeps a computed tensor in {name}, which a step under a plan does not"), (
                how
            )


class Carrying(nn.Module):
    """Reads in each step what the step before has left in an attribute."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.body, self.state = nn.Linear(WIDTH, KINDS), first

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        if self.state is not None:
            h = h * (1 + self.state)
        self.state = h.detach().mean()
        return F.cross_entropy(h, y)


class Caching(nn.Module):
    """Fills a cache with a table that does not depend on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tables = nn.Linear(WIDTH, KINDS), dict[int, torch.Tensor]()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.linspace(0.5, 1.5, x.shape[1])
        return F.cross_entropy(self.body(x * self.tables[x.shape[1]]), y)


SETTING: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "counted": lambda: chance._made("counted"),
    "cached": lambda: (Caching(), _inputs()),
}


def _three_steps(model: Any, inputs: Any, **options: Any) -> list[float]:
    return [float(model(*inputs, **options).detach()) for _ in range(3)]


def _set_by_forward(files: list[str]) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for (how, made), file in zip(SETTING.items(), files, strict=True):
        torch.manual_seed(0)
        module, inputs = made()
        wanted = _three_steps(copy.deepcopy(module), inputs)
        applied_to = shardscope.apply(module, shardscope.load_plan(file))
        found[how] = wanted, _three_steps(applied_to, inputs, global_batch=True)
    return found


def test_what_forward_sets_is_never_frozen(tmp_path: Path) -> None:
    files = []
    for how, made in SETTING.items():
        model, inputs = made()
        plans = shardscope.plan(model, inputs=inputs, cluster=TWO, accumulate=1).plans
        shardscope.save_plan(next((p for p in plans if p.name == "FSDP"), plans[0]), tmp_path / how)
        files.append(str(tmp_path / how))
    for found in run_ranks(_set_by_forward, 2, (files,), timeout_s=300):
        for how, (wanted, got) in found.items():
            assert got == pytest.approx(wanted, rel=1e-6), how
            assert len(set(wanted)) == (1 if how == "cached" else 3), how


def test_what_a_step_reads_of_the_step_before_is_refused_before_it_is_planned() -> None:
    for first in (None, torch.zeros(())):
        with pytest.raises(CaptureError, match=r"reads in each step what the step before has left in state, .* input"):
            shardscope.plan(Carrying(first), inputs=_inputs(), cluster=TWO)


def test_a_report_says_what_a_run_will_not_hand_on() -> None:
    notes = shardscope.plan(Keeping("dict"), inputs=_inputs(), cluster=TWO).notes
    assert any(note.startswith("forward keeps a computed tensor in extra.first: under a plan") for note in notes)


class Along(nn.Module):
    """A softmax along a dim that is an attribute, and layers that are frozen while another attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.frozen = 1, True
        self.body, self.first, self.last = (nn.Linear(WIDTH, n) for n in (WIDTH, 2 * WIDTH, WIDTH))
        self.head = nn.Linear(2 * WIDTH, KINDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(not self.frozen and torch.is_grad_enabled()):
            x = torch.relu(self.body(x))
        h = self.first(x)
        return F.cross_entropy(self.head(h * (2 * h).softmax(self.dim)), y)


def _another_way(files: list[str]) -> list[list[Any]]:
    """For each plan: what a step gives with other attributes, or says, and what one process gives."""
    found = []
    for file in files:
        for name, value in (("dim", 1), ("dim", 0), ("frozen", False)):
            torch.manual_seed(0)
            own, inputs = Along(), _inputs()
            alone = copy.deepcopy(own)
            model: Any = shardscope.apply(own, shardscope.load_plan(file))
            model(*inputs, global_batch=True).backward()
            setattr(model, name, value)
            setattr(alone, name, value)
            try:
                said: Any = float(model(*inputs, global_batch=True).detach())
            except PlanMismatch as error:
                said = str(error)
            found.append([file, name, value, said, float(alone(*inputs).detach())])
    return found


def test_an_attribute_that_needs_another_plan_is_refused(tmp_path: Path) -> None:
    _, files = saved_plans(Along(), _inputs(), tmp_path)
    for found in run_ranks(_another_way, 2, (files,), timeout_s=200):
        for file, name, value, said, alone in found:
            if isinstance(said, str):
                wanted = "one of the ways in which softmax can run" if name == "dim" else "sends body.weight a gradient"
                assert wanted in said and (name, value) != ("dim", 1), (file, said)
            else:
                assert name == "dim" and said == pytest.approx(alone, rel=1e-5), (file, name)
        assert any(isinstance(said, str) for _, name, _, said, _ in found if name == "dim")


@dataclass
class Out:
    loss: torch.Tensor
    more: SimpleNamespace


class Named(nn.Module):
    """Returns objects of its own. `asks`: so that only its own code can run."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks, self.calls, self.head = asks, 0, nn.Linear(WIDTH, KINDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Out:
        self.calls += self.asks
        logits = self.head(x)
        return Out(F.cross_entropy(logits, y), SimpleNamespace(logits=logits, words=["a"]))


def _named(files: list[str]) -> list[float]:
    found = []
    for asks, file in zip((False, True), files, strict=True):
        torch.manual_seed(0)
        model: Any = shardscope.apply(Named(asks), shardscope.load_plan(file))
        out = model(*_inputs(), global_batch=True)
        assert isinstance(out, Out) and out.more.words == ["a"]
        out.loss.backward()
        assert model.head.weight.grad is not None
        found.append(float(out.loss.detach()))
    return found


def test_results_may_be_objects_of_the_models_own(tmp_path: Path) -> None:
    files = [_saved(tmp_path / str(asks), Named(asks)) for asks in (False, True)]
    for found in run_ranks(_named, 2, (files,), timeout_s=100):
        assert found[0] == pytest.approx(found[1])


class Marked(nn.Module):
    """Writes by its inputs into what it makes of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        masked = torch.zeros(len(x), KINDS, dtype=torch.bool)
        known = masked[:, 1:]
        masked.scatter_(1, (y[:, None] + 1) % KINDS, True)
        known.logical_not_()
        return F.cross_entropy(self.head(x).masked_fill(masked, -3.0), y)


def _marked(files: list[str]) -> list[tuple[list[float], list[float]]]:
    found = []
    for file in files:
        torch.manual_seed(0)
        own = Marked()
        batches = [_inputs() for _ in range(3)]
        alone = [float(own(*b)) for b in batches]
        model: Any = shardscope.apply(own, shardscope.load_plan(file))
        found.append((alone, [float(model(*b, global_batch=True)) for b in batches]))
    return found


def test_what_a_step_writes_into_is_made_anew(tmp_path: Path) -> None:
    _, files = saved_plans(Marked(), _inputs(), tmp_path)
    for found in run_ranks(_marked, 2, (files,), timeout_s=100):
        for alone, got in found:
            assert got == pytest.approx(alone, rel=1e-5)
