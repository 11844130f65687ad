"""Autograd functions of a model's own: each is one operator, which may do what it returns and no more."""

import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from planner_core.core import CaptureError  # noqa: E402
from planner_core.models.capture.module import capture_module  # noqa: E402


class Coupled(torch.autograd.Function):
    """As in a RevNet: backward rebuilds what forward had."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: nn.Module, g: nn.Module) -> torch.Tensor:
        a, b = x.chunk(2, dim=1)
        with torch.no_grad():
            a = a + f(b)
            return torch.cat([a, b + g(a)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


class Recomputed(torch.autograd.Function):
    """A checkpoint of one's own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], x: torch.Tensor) -> Any:
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError


class SetsGradient(torch.autograd.Function):
    """Hands a weight its gradient past autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: Any) -> torch.Tensor:
        ctx.held = held
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight = ctx.held["weight"]
        weight.grad = torch.zeros_like(weight)
        return grad, None


class Doubled(torch.autograd.Function):
    """Writes its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2


class Shifted(torch.autograd.Function):
    """As sparsemax of TabNet: its argument is its scratch memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x -= x.amax(-1, keepdim=True)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.first, self.norm, self.lin, self.block = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(8))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(self.norm(x))

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


GIVEN = "gives a function to run to the autograd function"
REFUSED = [
    ("a checkpoint of one's own", lambda m, x: Recomputed.apply(m.inner, m.first(x)), GIVEN),
    ("reversible", lambda m, x: Coupled.apply(m.first(x), m.block, m.block), GIVEN),
    ("scratch memory", lambda m, x: Shifted.apply(m.first(x)), "writes in place into an argument of the autograd"),
    ("a weight", lambda m, x: m.first(x) * Shifted.apply(m.norm.weight), "writes in place into an argument of the"),
    ("an argument", lambda m, x: Doubled.apply(m.first(x)), "writes in place into an argument of the autograd"),
    (
        "a gradient",
        lambda m, x: SetsGradient.apply(m.first(x), {"weight": m.lin.weight}),
        "sets the gradient of lin.weight in the backward of an autograd function",
    ),
]


@pytest.mark.parametrize(("name", "run", "says"), REFUSED, ids=[c[0] for c in REFUSED])
def test_a_function_that_does_more_than_it_returns_is_refused(name: str, run: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(says)):
        capture_module(Model(lambda m, x: run(m, x).mean()), {"x": torch.zeros(6, 8)})


class Stops(torch.autograd.Function):
    """As of a model that trains its second argument alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        ctx.shape = others[0].shape
        return x * others[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad.sum_to_size(ctx.shape), None


class StopsIfLarge(Stops):
    """By values, which a plan cannot tell."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (None if grad.abs().max() > 1 else grad), grad.sum_to_size(ctx.shape), None


class OfList(Stops):
    """torch sends a gradient to the tensors of no list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        return x * others[1][0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


STOPPED = [
    ("an activation that goes on", lambda m, x: Stops.apply(y := m.first(x), m.norm.weight, 2) + y, {"first", "norm"}),
    ("all before", lambda m, x: m.lin(Stops.apply(m.first(x), m.norm.weight, 2)), {"norm", "lin"}),
    ("data", lambda m, x: m.lin(Stops.apply(x, m.norm.weight, 2)), {"norm", "lin"}),
    ("a weight", lambda m, x: m.lin(Stops.apply(m.norm.weight, m.first(x), 2)), {"first", "lin"}),
    ("by values", lambda m, x: m.lin(StopsIfLarge.apply(m.first(x), m.norm.weight, 2)), {"first", "norm", "lin"}),
    ("in a list", lambda m, x: m.lin(OfList.apply(m.first(x), 2, [m.norm.weight])), {"first", "lin"}),
]


@pytest.mark.parametrize(("name", "run", "trained"), STOPPED, ids=[c[0] for c in STOPPED])
def test_what_gets_none_from_a_backward_is_not_trained(name: str, run: Any, trained: set[str]) -> None:
    """Judged by autograd itself."""
    x = torch.full((6, 8), 1e-3)
    (m := Model(run)).run(m, x).mean().backward()
    assert {n.partition(".")[0] for n, p in m.named_parameters() if p.grad is not None} == trained
    graph = capture_module(Model(lambda m, x: run(m, x).mean()), {"x": x}, flat=True)
    assert {v.name.partition(".")[0] for v in graph.top.values if v.kind == "parameter" and v.grad} == trained
