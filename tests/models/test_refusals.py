"""What cannot be planned rightly is refused before it is planned: the module, the line, and what would help."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from planner_core.core import CaptureError  # noqa: E402
from planner_core.models.capture.module import capture_module  # noqa: E402


class Model(nn.Module):
    """A module whose forward is `run(self, x)`."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.table = nn.Embedding(16, 8)
        self.teacher = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(8))
        self.rows = torch.zeros(3, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def vmapped(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: m.lin.weight @ row)(x).mean()


def hidden(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.stale).mean()


PROMPT = torch.zeros(8, requires_grad=True)


def prompted(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.lin(x + PROMPT).mean()


def updates(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.teacher.weight.mul_(0.9).add_(m.lin.weight, alpha=0.1)
    return F.mse_loss(m.lin(x), m.teacher(x))


def keeps_graph(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen.add_(m.lin(x).mean(0))
    return (m.lin(x) - m.seen).pow(2).mean()


def keeps_in_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen[:].lerp_(m.lin(x).mean(0), 0.1)
    return (m.lin(x) - m.seen).pow(2).mean()


def old_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    view = h.view(-1)
    h.add_(1)
    return view.mean()


def decides(m: Any, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    total += m.lin(x).mean()
    return total * 2 if bool(total > 0) else total


def logs(m: Any, x: torch.Tensor) -> torch.Tensor:
    loss = m.lin(x).mean()
    m.logged = loss.item()
    return loss


def picks_by_number(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    best = h.mean(0).topk(2).indices
    return torch.stack([h[:, best[i]] for i in range(2)]).mean()


def keeps_in_a_cache(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.rows[:, :] = m.lin(x)[:3]
    return m.rows.mean()


def differentiates(m: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(m.lin(x).sum(), x, create_graph=True)
    return slope.pow(2).mean()


def casts(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        return m.lin(x).mean()


def hooks(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    h.register_hook(lambda g: g / g.norm())
    return h.mean()


def freezes(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    m.out.requires_grad_(False)
    fooled = m.out(h).mean()
    m.out.requires_grad_(True)
    return fooled - m.out(h.detach()).mean()


def freezes_one(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.out.weight.requires_grad = False
    return m.out(m.lin(x)).mean()


def swaps_a_weight(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.lin.weight.data = F.normalize(m.lin.weight.data, dim=1)
    return m.lin(x).square().mean()


def swaps_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen.data = 0.9 * m.seen + x.mean(0)
    return (m.lin(x) - m.seen).square().mean()


def averages_by_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    m.seen.data.lerp_(h.detach().mean(0), 0.1)
    return (h - m.seen).square().mean()


def names_a_type(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.lin(x).type("torch.cuda.FloatTensor").mean()


def counts_ids(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.embedding(torch.arange(4), m.table.weight, scale_grad_by_freq=True).mean()


def shifts(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.alpha_dropout(m.lin(x), 0.1, True).mean()


def beyond(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.table(torch.arange(17)).mean()


def token_by_token(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    for _ in range(6000):
        h = torch.tanh(h * 0.5)
    return h.mean()


def large_masks(m: Any, x: torch.Tensor) -> torch.Tensor:
    far = torch.ones(3000, 1) * torch.arange(3000)
    return m.lin(x).mean() if far.min() < 0 else m.lin(x).sum()


CASES = [
    (token_by_token, "the model runs more than 10,000 operators in one call", "torch.nn.LSTM"),
    (
        large_masks,
        "a table of 9,000,000 elements that it made from constants is too large",
        "give a smaller batch or seq",
    ),
    (vmapped, "a transform of torch.func", "write the batch of the transform as a dim"),
    (hidden, "made from parameters out of sight", "compute it in forward"),
    (prompted, "uses a tensor of shape [8] that needs a gradient and is no parameter of the model", "freeze it"),
    (updates, "writes into the parameter teacher.weight in place", "after the optimizer's step"),
    (keeps_graph, "writes a tensor with a gradient into the buffer seen", "detach it, since the next step"),
    (keeps_in_view, "writes a tensor with a gradient into the buffer seen", "itself, not a view"),
    (keeps_in_a_cache, "writes what it computes in place into a tensor that is no buffer", "register_buffer"),
    (logs, "decides by the values of computed tensors", "call .item() outside"),
    (picks_by_number, "decides by the values of computed tensors", "index_select, gather or take_along_dim"),
    (old_view, "reads a tensor of which a part, or a view, was written in place before", "make a new one"),
    (decides, "decides by the values of computed tensors", "without data-dependent control flow"),
    (differentiates, "differentiates inside forward", "write the derivative out"),
    (casts, "opens an autocast region (float16)", "the type of the whole step with dtype"),
    (hooks, "puts a hook on the gradient of a computed tensor", "torch.autograd.Function"),
    (freezes, "changes in forward which weights are trained", "functional_call"),
    (freezes_one, "changes in forward which weights are trained", "before it is planned"),
    (swaps_a_weight, "gives a tensor other memory in forward", "after the optimizer's step"),
    (swaps_a_buffer, "gives a tensor other memory in forward", "copy_"),
    (
        averages_by_data,
        "reads a tensor of which a part, or a view, was written in place before",
        "into the tensor itself",
    ),
    (names_a_type, "by a name that is another one on another device", "x.to(torch.float32)"),
    (counts_ids, "divides gradients by how often an id occurs in the whole batch", "build the embedding without it"),
    (shifts, "drops elements by alpha_dropout, which also shifts and scales those that stay", "set its rate to 0"),
    (beyond, "looks up row 16 of a table that has 16", "ids within the table"),
]


@pytest.mark.parametrize(("run", "says", "helps"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_one_sentence_names_the_line_and_a_way_out(run: Any, says: str, helps: str) -> None:
    model = Model(run)
    model.stale = model.lin.weight * 2
    with pytest.raises(CaptureError, match=re.escape(says)) as error:
        capture_module(model, {"x": torch.zeros(6, 8)})
    said = str(error.value)
    assert helps in said and "\n" not in said
    assert re.search(r"test_refusals\.py:\d+ \(", said), said


@pytest.mark.parametrize("folder", ["torch", "planner_core"])
def test_the_line_is_named_in_a_folder_that_has_a_librarys_name(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "deciding.py"
    path.parent.mkdir()
    path.write_text("def forward(model, x):\n    return x if model.lin(x).sum() > 0 else -x\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    with pytest.raises(CaptureError, match=rf"{folder}/deciding\.py:2 \(return x if"):
        capture_module(Model(scope["forward"]), {"x": torch.zeros(6, 8)})


def test_hooks_that_a_plan_would_drop_are_refused_before_a_run() -> None:
    plain = Model(lambda m, x: m.lin(x).mean())
    plain.lin.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match=r"the parameter lin\.weight has a hook on its gradient"):
        capture_module(plain, {"x": torch.zeros(6, 8)})
    module = Model(lambda m, x: m.lin(x).mean())
    module.lin.register_full_backward_hook(lambda m, i, o: None)
    with pytest.raises(CaptureError, match="lin has a hook on its backward pass"):
        capture_module(module, {"x": torch.zeros(6, 8)})
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CaptureError, match=r"0\.weight has no size before its module"):
        capture_module(lazy, {"input": torch.zeros(6, 8)})
    scripted = nn.Sequential(torch.jit.script(nn.Linear(8, 4)))
    with pytest.raises(CaptureError, match="0 is a TorchScript module"):
        capture_module(scripted, {"input": torch.zeros(6, 8)})


def test_a_sparse_buffer_is_refused_where_it_is_used() -> None:
    model = Model(lambda m, x: m.lin(x).mean())
    model.register_buffer("near", torch.eye(8).to_sparse())
    assert capture_module(model, {"x": torch.zeros(6, 8)}).top.ops
    model.run = lambda m, x: m.lin(x @ m.near).mean()
    with pytest.raises(CaptureError, match=r"computes with a sparse_coo tensor.*; use a dense tensor, or indices with"):
        capture_module(model, {"x": torch.zeros(6, 8)})


def test_a_result_in_an_object_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"forward returns a SimpleNamespace.*; return tensors, tuples or dicts of them"
    ):
        capture_module(Model(lambda m, x: [SimpleNamespace(loss=m.lin(x).mean())]), {"x": torch.zeros(6, 8)})


def test_the_part_that_asks_is_named() -> None:
    whole = nn.ModuleDict({"part": Model(logs)})
    whole.forward = lambda x: whole["part"](x)  # type: ignore[method-assign,assignment]
    with pytest.raises(CaptureError, match="part decides by the values of computed tensors"):
        capture_module(whole, {"x": torch.zeros(6, 8)})


# --- what looks alike and is right -------------------------------------------------------------------------


@torch.jit.script
def gated(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def scripted(m: Any, x: torch.Tensor) -> torch.Tensor:
    return gated(m.lin(x)).mean()


def recomputes(m: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    h = checkpoint(lambda y: m.lin(y).relu(), x, use_reentrant=False)
    return checkpoint(lambda y: m.lin(y).tanh(), h, use_reentrant=True).mean()


def counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    m.seen.lerp_(h.detach().mean(0), 0.5)
    return (h - m.seen).pow(2).mean()


def fills(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(6, 4)
    for i in range(6):
        out[i] = m.out(m.lin(x)[i])
    return out.pow(2).mean()


def writes_parts(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    h[:, :4].add_(1.0)
    left, right = h[:, :4], h[:, 4:]
    left.mul_(2.0)
    return (right * 3).mean() + left.mean()


def no_casts(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.lin(x)
    with torch.autocast(device_type=h.device.type, enabled=torch.is_autocast_enabled(h.device.type)):
        return h.mean()


FINE: list[tuple[Any, list[str]]] = [
    (scripted, ["linear", "sigmoid", "mul", "mean"]),
    (recomputes, ["linear", "relu", "linear", "tanh", "mean"]),
    (counts, ["linear", "detach", "mean", "lerp_", "sub", "pow", "mean"]),
    (fills, ["linear", "getitem", "linear", "setitem"] * 6 + ["pow", "mean"]),
    (
        writes_parts,
        ["linear", "getitem", "add_", "setitem", "getitem", "getitem", "mul_", "mul", "mean", "mean", "add"],
    ),
    (no_casts, ["linear", "mean"]),
]


def test_a_checkpoint_around_running_statistics_is_told() -> None:
    norm = nn.BatchNorm1d(8)

    def normed(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(m.norm, m.lin(x), use_reentrant=False).square().mean()

    model = Model(normed)
    model.norm = norm
    told = capture_module(model, {"x": torch.zeros(6, 8)}).assumptions[0]
    assert told.endswith("running statistics in it count a step once, where torch counts it twice")


@pytest.mark.parametrize(("run", "fns"), FINE, ids=lambda c: getattr(c, "__name__", ""))
def test_what_looks_alike_is_recorded_op_by_op(run: Any, fns: list[str]) -> None:
    graph = capture_module(Model(run), {"x": torch.zeros(6, 8)}, flat=True)
    assert [op.fn for op in graph.top.ops] == fns
    lookup = {op.fn: op for op in graph.top.ops}
    if run is counts:
        assert lookup["lerp_"].attrs["kept"] is True
    if run is recomputes:
        assert graph.assumptions[0].startswith("the model's own torch.utils.checkpoint is run as a plain call")
    if run is fills:  # zeros that were filled pass the gradient on
        assert all(graph.top.values[v].grad for op in graph.top.ops for v in op.outputs)
