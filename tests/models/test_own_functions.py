"""Autograd functions of a model's own: those that recompute are opened, others may use nothing but their arguments."""

import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from planner_core.core import CaptureError  # noqa: E402
from planner_core.models.capture.module import capture_module  # noqa: E402


class Listed(torch.autograd.Function):
    """As in guided-diffusion: gradients of the inputs and of the weights that are handed over."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], length: int, *args: Any) -> Any:
        ctx.run, ctx.inputs, ctx.weights = run, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run(*[x.view_as(x) for x in ctx.inputs])
        return None, None, *torch.autograd.grad(out, ctx.inputs + ctx.weights, grads, allow_unused=True)


class Reentrant(torch.autograd.Function):
    """As in Megatron-LM: weights get their gradients beside the function."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], keep: bool, *args: Any) -> Any:
        ctx.run = run
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return run(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.run(*args)
        torch.autograd.backward(out if isinstance(out, tuple) else (out,), grads)
        return None, None, *(x.grad for x in args)


class Halved(Reentrant):
    """Another gradient than that of what it runs."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Reentrant.backward(ctx, *(g / 2 for g in grads))


class Mended(Reentrant):
    """A gradient that is not a number becomes one."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Reentrant.backward(ctx, *(g.nan_to_num() for g in grads))


class Clipped(Reentrant):
    """Another gradient where that of what it runs is large."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Reentrant.backward(ctx, *(g.clamp(-1e9, 1e9) for g in grads))


class Deep(Reentrant):
    """No gradient for what has three dims."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Reentrant.backward(ctx, *(g * (g.dim() < 3) for g in grads))


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


class Scaled(torch.autograd.Function):
    """A function of a closure's tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: Callable[[], torch.Tensor]) -> torch.Tensor:
        return x * scale()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Straight(torch.autograd.Function):
    """Its backward alone uses what it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, after: Callable[[Any, torch.Tensor], Any]) -> torch.Tensor:
        ctx.after = after
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.after(ctx, grad), None


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


def read_again(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return Shifted.apply(h) + h


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.first, self.norm, self.lin, self.block = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3))
        self.register_buffer("scale", torch.ones(8))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(self.norm(x))

    def pair(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(x), self.lin(x)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def _in_turn(m: Any, x: torch.Tensor) -> torch.Tensor:
    for block in m.blocks:
        x = Listed.apply(lambda y, block=block: block(y), 1, x, *block.parameters())
    return x


INNER = ["layer_norm", "linear", "add"]
OPENED = [
    ("weights handed over", lambda m, x: Listed.apply(m.inner, 1, x, *m.parameters()).mean(), [*INNER, "mean"]),
    ("weights beside", lambda m, x: Reentrant.apply(m.inner, False, m.first(x)).mean(), ["linear", *INNER, "mean"]),
    ("module", lambda m, x: Reentrant.apply(m.lin, False, m.first(x)).mean(), ["linear", "linear", "mean"]),
    ("blocks alike", lambda m, x: _in_turn(m, x).mean(), [*["linear", "relu", "linear"] * 3, "mean"]),
    (
        "two results",
        lambda m, x: torch.cat(Reentrant.apply(m.pair, True, m.first(x))).mean(),
        ["linear", "layer_norm", "linear", "cat", "mean"],
    ),
]


@pytest.mark.parametrize(("name", "run", "fns"), OPENED, ids=[c[0] for c in OPENED])
def test_a_function_that_recomputes_is_recorded_op_by_op(name: str, run: Any, fns: list[str]) -> None:
    graph = capture_module(Model(run), {"x": torch.zeros(6, 8)}, flat=True)
    assert [op.fn for op in graph.top.ops] == fns
    assert "is run as a plain call: --recompute says what is computed again" in graph.assumptions[0]


def closes_over(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return Listed.apply(lambda y: m.lin(y) + h, 1, x, *m.lin.parameters())


def straight(after: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A model whose backward of an own function does `after(model, gradient)`."""
    return lambda m, x: Straight.apply(m.first(x), lambda ctx, grad: after(m, grad))


def keeps(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = Straight.apply(m.first(x), lambda ctx, grad: grad * m.mask)
    m.mask = (out > 0).float()  # after the call, and before its backward
    return out


def sets_gradient(m: Any, grad: torch.Tensor) -> torch.Tensor:
    m.lin.weight.grad = grad.t() @ grad
    return grad


def halves_until_small(m: Any, grad: torch.Tensor) -> torch.Tensor:
    while grad.norm() > 1:
        grad = grad / 2
    return grad


def scales_by_weight_if_large(m: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad * m.norm.weight if grad.abs().max().item() > 0.5 else grad


def raises_if_large(m: Any, grad: torch.Tensor) -> torch.Tensor:
    if grad.isnan().any():
        raise ValueError("not a number")
    return grad * TABLE


TABLE = torch.ones(8)
IN_BACKWARD = "the model uses a tensor in the backward of the autograd function Straight"
REFUSED = [
    ("some weights", lambda m, x: Listed.apply(m.inner, 1, x, *m.norm.parameters()), "uses a tensor of shape [8, 8]"),
    (
        "other gradient",
        lambda m, x: Halved.apply(m.inner, False, m.first(x)),
        "norm is run inside the autograd function",
    ),
    ("mended gradient", lambda m, x: Mended.apply(m.inner, False, m.first(x)), "norm is run inside the autograd"),
    ("clipped gradient", lambda m, x: Clipped.apply(m.inner, False, m.first(x)), "norm is run inside the autograd"),
    ("some dims", lambda m, x: Deep.apply(m.inner, False, m.first(x)[None]), "norm is run inside the autograd"),
    ("closed over", closes_over, "uses a tensor of shape [6, 8] inside the autograd function Listed"),
    # one process gives no gradient to a weight, since nothing that is handed over needs one
    ("no gradient", lambda m, x: Reentrant.apply(m.lin, False, x), "lin is run inside the autograd function Reentrant"),
    (
        "reversible",
        lambda m, x: Coupled.apply(m.first(x), m.block, m.block),
        "block is run inside the autograd function",
    ),
    ("weight", lambda m, x: Scaled.apply(m.first(x), lambda: m.norm.weight), "the model uses a tensor inside"),
    ("buffer", lambda m, x: Scaled.apply(m.first(x), lambda: m.scale), "that is not one of its arguments"),
    ("weight in backward", straight(lambda m, grad: grad * m.norm.weight), IN_BACKWARD),
    ("layer in backward", straight(lambda m, grad: m.lin(grad)), "lin is run inside the autograd function Straight"),
    ("buffer in backward", straight(lambda m, grad: grad * m.scale), IN_BACKWARD),
    ("if a value is large", straight(scales_by_weight_if_large), IN_BACKWARD),
    ("kept for backward", keeps, IN_BACKWARD),
    ("constants alone", lambda m, x: m.lin(Scaled.apply(x, lambda: m.norm.weight)), "the model uses a tensor inside"),
]


@pytest.mark.parametrize(("name", "run", "says"), REFUSED, ids=[c[0] for c in REFUSED])
def test_a_function_that_uses_more_than_its_arguments_is_refused(name: str, run: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(says)) as error:
        capture_module(Model(lambda m, x: run(m, x).mean()), {"x": torch.zeros(6, 8)})
    assert "use_reentrant=False" in str(error.value)
    assert re.search(r"test_own_functions\.py:\d+ \(", str(error.value))


HIDDEN = [
    ("a gradient", straight(sets_gradient), "sets the gradient of a tensor in the backward of the autograd function"),
    ("an argument read again", read_again, "of which a part, or a view, was written in place before"),
    ("a weight", lambda m, x: m.first(x) * Shifted.apply(m.norm.weight), "writes in place into an argument inside the"),
    ("an argument", lambda m, x: Doubled.apply(m.first(x)), "writes in place into an argument inside the autograd"),
    ("values", straight(lambda m, grad: grad / len(grad.tolist())), "whose backward cannot be run without values"),
]


@pytest.mark.parametrize(("name", "run", "says"), HIDDEN, ids=[c[0] for c in HIDDEN])
def test_a_function_that_changes_more_than_it_returns_is_refused(name: str, run: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(says)) as error:
        capture_module(Model(lambda m, x: run(m, x).mean()), {"x": torch.zeros(6, 8)})
    assert re.search(r"test_own_functions\.py:\d+ \(", str(error.value))


@pytest.mark.parametrize("after", [halves_until_small, raises_if_large])
def test_a_backward_may_ask_for_values_of_its_gradient(after: Any) -> None:
    graph = capture_module(Model(lambda m, x: straight(after)(m, x).mean()), {"x": torch.zeros(6, 8)}, flat=True)
    assert [op.fn for op in graph.top.ops] == ["linear", "Straight", "mean"]


def test_a_custom_operator_that_uses_a_weight_in_backward_is_refused() -> None:
    held: list[nn.Module] = []
    gate = torch.library.custom_op(
        "shardscope_test::gate", lambda x: x * 1.0, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    gate.register_fake(torch.empty_like)
    gate.register_autograd(lambda ctx, grad: held[0](grad))

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        held[:] = [m.lin]
        return gate(m.first(x)).mean()

    with pytest.raises(CaptureError, match="lin is run inside the autograd function gate"):
        capture_module(Model(run), {"x": torch.zeros(6, 8)})


def test_an_argument_may_be_scratch_memory() -> None:
    graph = capture_module(Model(lambda m, x: Shifted.apply(m.first(x)).mean()), {"x": torch.zeros(6, 8)}, flat=True)
    assert [op.fn for op in graph.top.ops] == ["linear", "Shifted", "mean"]


@pytest.mark.parametrize("function", [Scaled.apply, lambda *given: Scaled.apply(*given)], ids=["bound", "looked up"])
def test_a_function_of_its_arguments_stays_one_operator(function: Callable[..., torch.Tensor]) -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return function(m.first(x), lambda: 2.0).mean()

    graph = capture_module(Model(run), {"x": torch.zeros(6, 8)}, flat=True)
    assert [op.fn for op in graph.top.ops] == ["linear", "Scaled", "mean"]


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
