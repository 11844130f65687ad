"""A plan as generated code computes what one process computes, sends what was predicted, and reads like the model."""

from __future__ import annotations

import ast
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import planner_core as shardscope
from planner_core.core import Plan
from planner_core.ops import LocalExecution
from planner_core.ops.catalog import OPERATORS
from planner_core.runtime import Parallel
from planner_core.runtime.library import applied
from planner_core.runtime.program.collectives import Trace
from planner_core.runtime.program.collectives.torch_names import OLDEST_COMPILED
from planner_core.runtime.record.frozen import FrozenModel
from planner_core.runtime.write.operators import _RULES, MEANS, UNCHANGED_KINDS
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.plans import own_planned
from tests.support.plans_train_alike import refusal_of
from tests.support.ranks import run_ranks

TWO = "1x8-h100:gpus=2"


# --- the order of collectives -------------------------------------------------------------------------


def traced(plan_file: str) -> list[tuple[str, str, int]]:
    """What this rank issued and waited for in a second step, in order: (what, kind, bytes)."""
    model = shardscope.apply(OwnGPT(), shardscope.load_plan(plan_file))
    x, y = own_model.batch(0)
    trace = Trace()
    for _ in range(2):
        trace.events.clear()
        model.forward.__self__.engine.trace(trace)
        model(x, y, global_batch=True).backward()
    return [(e.what, e.kind, e.num_bytes) for e in trace.events]


def own_plans() -> dict[str, Plan]:
    return {p.name: p for p in own_planned().plans}


def test_weights_are_gathered_a_block_ahead_and_gradients_reduced_behind_backward(tmp_path: Any) -> None:
    """FSDP: before a unit runs the next one's gather is issued; a bucket of gradients is waited for when the next is ready."""
    shardscope.save_plan(own_plans()["FSDP"], tmp_path / "plan")
    events = [tuple(e) for e in run_ranks(traced, 2, (str(tmp_path / "plan"),))[0]]
    steps = [
        (what, kind)
        for what, kind, num_bytes in events
        if what in ("run", "return") or (kind in ("all_gather", "reduce_scatter") and num_bytes)
    ]
    for what, name in (("run", "blocks.0"), ("return", "blocks.1")):
        at = steps.index((what, name))
        assert steps[at - 1] == ("issue", "all_gather"), steps[:at]
        assert ("wait", "all_gather") in steps[at - 3 : at - 1], steps[:at]
    back = [s for s in steps[steps.index(("return", "end")) :] if s[1] != "all_gather"]
    first = back.index(("issue", "reduce_scatter"))
    assert ("return", "blocks.1") in back[first : back.index(("wait", "reduce_scatter"))], back


def test_tensor_parallel_collectives_come_in_the_order_of_the_plan(tmp_path: Any) -> None:
    """Megatron with sequence parallelism: gather, scatter for each half of a block, and the other way round in backward."""
    plan = own_plans()["Megatron-LM + sequence parallel"]
    shardscope.save_plan(plan, tmp_path / "plan")
    events = run_ranks(traced, 2, (str(tmp_path / "plan"),))[0]
    issued = [
        kind
        for what, kind, num_bytes in events
        if what == "issue" and kind in ("all_gather", "reduce_scatter") and num_bytes > 4096
    ]
    bodies = ["all_gather", "reduce_scatter"] * 4  # two blocks of attention and a perceptron
    forward = issued[: len(issued) // 2]
    assert "".join(k[0] + k[1] for k in forward).count("".join(k[0] + k[1] for k in bodies)) >= 1, issued


# --- the code -----------------------------------------------------------------------------------------


def program_text(plan_file: str) -> str:
    model = shardscope.apply(OwnGPT(), shardscope.load_plan(plan_file))
    model(*own_model.batch(0), global_batch=True).backward()
    (ready,) = model.forward.__self__.programs.values()
    return str(ready.program.source)


def test_a_block_is_written_once_and_reads_like_the_model(tmp_path: Any) -> None:
    shardscope.save_plan(own_plans()["Megatron-LM"], tmp_path / "plan")
    source = run_ranks(program_text, 2, (str(tmp_path / "plan"),))[0]
    names = [n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    assert names.count("block") == 1 and "forward" in names
    body = source[source.index("def block(") :].partition("\n\n\n")[0]
    for words in ("F.layer_norm(", "F.linear(", "F.scaled_dot_product_attention(", "F.gelu(", "w.qkv_weight"):
        assert words in body, body
    assert "for layer in units.blocks:" in source
    assert body.count("all_reduce_back_same(") == 2, "Megatron's g: one sum behind attention, one behind the perceptron"
    assert body.count("same_back_all_reduce(") == 2, "Megatron's f"
    assert max(map(len, source.splitlines())) < 200


def test_every_operator_that_needs_a_form_for_parts_has_one() -> None:
    """One that has none is refused where it is written, never run as if its tensors were whole."""
    wanted = {o.name for o in OPERATORS if o.local_execution not in UNCHANGED_KINDS}
    assert wanted - {"to"} <= set(_RULES)
    assert {o.name for o in OPERATORS if o.local_execution == LocalExecution.MEAN} <= set(MEANS)


def _compiled(plan_file: str) -> list[Any]:
    from torch._dynamo.utils import counters

    found = []
    for options in (False, {"fullgraph": True, "backend": "aot_eager"}):
        model = shardscope.apply(OwnGPT(layers=3), shardscope.load_plan(plan_file), compile=options)
        for micro in range(2):
            model(*own_model.batch(micro), global_batch=True).backward()
        parallel = applied(model)
        found.append({n: parallel.full(w, w.parameter.grad) for n, w in parallel.engine.weights.items()})
    plain, compiled = found
    error = max(float((plain[n] - compiled[n]).abs().max() / plain[n].abs().max().clamp(min=1e-3)) for n in plain)
    return [error, counters["stats"]["unique_graphs"]]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_COMPILED,
    reason="blocks are compiled with newer versions",
)
@pytest.mark.parametrize("layout", ["tp=2,sp", pytest.param("fsdp=2", marks=pytest.mark.slow)])
def test_blocks_compile_as_whole_graphs_and_once_for_all_copies(layout: str, tmp_path: Any) -> None:
    """Three copies of a block, and the parts before and behind: no more graphs than for two copies."""
    stated = {"layout": layout, "cluster": TWO, "advise": False}
    plan = shardscope.price(OwnGPT(layers=3), inputs=own_model.batch(0), **stated).plan
    assert plan is not None
    shardscope.save_plan(plan, tmp_path / "plan")
    error, graphs = run_ranks(_compiled, 2, (str(tmp_path / "plan"),))[0]
    assert error < 1e-5 and graphs <= 4


# --- what a person may change ---------------------------------------------------------------------------


class Gated(nn.Module):
    """Asks a constant of the batch which way to go."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        if bool(mask.all()):
            x = x * 2.0
        return self.two(x).pow(2).mean()


def _gated(plan_file: str) -> list[Any]:
    x, ones, some = (
        torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),
        torch.ones(4, 8).long(),
        torch.eye(4, 8).long(),
    )
    model = shardscope.apply(Gated(), shardscope.load_plan(plan_file))
    found = [float(model(x, m, global_batch=True)) for m in (ones, ones)]
    try:
        found.append(float(model(x, some, global_batch=True)))
    except shardscope.PlanMismatch as error:
        found.append(str(error))
    return found


def test_a_constant_that_decided_the_way_is_guarded(tmp_path: Any) -> None:
    """Another answer is another program, or another model than the planned one: never the frozen way."""
    x, ones, some = (
        torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),
        torch.ones(4, 8).long(),
        torch.eye(4, 8).long(),
    )
    best = shardscope.plan(Gated(), inputs=(x, ones), cluster=TWO).best
    shardscope.save_plan(best, tmp_path / "plan")
    one, again, other = run_ranks(_gated, 2, (str(tmp_path / "plan"),))[0]
    assert one == again == pytest.approx(float(Gated()(x, ones)), rel=1e-5)
    assert other == pytest.approx(float(Gated()(x, some)), rel=1e-5) or "not in the plan" in str(other)


def _hooked(plan_file: str) -> list[Any]:
    """Losses of two steps of a model with a hook that halves a result, and what was warned of."""
    x, y = own_model.batch(0)
    model = OwnGPT()
    model.blocks[0].up.register_forward_hook(lambda module, args, out: nn.functional.dropout(out, 0.0))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shardscope.apply(model, shardscope.load_plan(plan_file))
    losses = [float(model(x, y, global_batch=True).detach()) for _ in range(2)]
    return [losses, [str(w.message) for w in told if "hook" in str(w.message)]]


def test_a_hook_is_part_of_the_code_and_runs_itself_no_more(tmp_path: Any) -> None:
    shardscope.save_plan(own_plans()["Megatron-LM"], tmp_path / "plan")
    losses, told = run_ranks(_hooked, 2, (str(tmp_path / "plan"),))[0]
    assert losses == pytest.approx(2 * [float(OwnGPT()(*own_model.batch(0)).detach())], rel=1e-5)
    assert len(told) == 1 and told[0].startswith("blocks.0.up has hooks on forward")


def _refusals(plan_file: str) -> list[str]:
    plan, said = shardscope.load_plan(plan_file), []
    x, y = own_model.batch(0)

    def replaced(model: nn.Module) -> None:
        model.blocks[0].up = nn.Linear(32, 128)

    def patched(model: nn.Module) -> None:
        model.blocks[0].forward = lambda x: x

    def moved(model: nn.Module) -> None:
        model.double()

    def hooked(model: nn.Module) -> None:
        next(model.parameters()).register_hook(lambda g: g)

    def frozen(model: nn.Module) -> None:
        next(model.parameters()).requires_grad_(False)

    def valued(model: nn.Module) -> None:
        model.options["loss"]["scale"] = 0.1

    for change in (replaced, patched, moved, hooked, frozen, valued):
        plain = OwnGPT()
        plain.options = {"loss": {"scale": 1.0}}
        model = shardscope.apply(plain, plan)
        model(x, y, global_batch=True)
        said.append(refusal_of(partial(change, model)) or refusal_of(partial(model, x, y, global_batch=True)))
    with torch.autocast("cpu", torch.bfloat16):
        said.append(refusal_of(partial(shardscope.apply(OwnGPT(), plan), x, y, global_batch=True)))
    return said


def test_changes_that_generated_code_would_pass_by_are_refused(tmp_path: Any) -> None:
    shardscope.save_plan(own_plans()["data parallel"], tmp_path / "plan")
    said = run_ranks(_refusals, 2, (str(tmp_path / "plan"),))[0]
    for sentence, words in zip(
        said,
        (
            "has other parts",
            "was replaced after",
            "cannot be moved or cast",
            "has a gradient hook",
            "requires_grad of",
            "options.loss.scale was set after",
            "torch.autocast is on",
        ),
        strict=True,
    ):
        assert words in sentence


class _Slots:
    __slots__ = ("scale",)


class _Stateful(nn.Module):
    """Has state of every kind; no pass runs."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.scale, self.filled = torch.tensor(1.0), torch.tensor(1.0)
        self.options, self.table, self.nested = {"loss": {"scale": 1.0}}, dict.fromkeys(range(100), 1.0), [[1.0]]
        self.config = SimpleNamespace(**{f"field_{i}": i for i in range(80)})
        self.objects, self.slots, self.array = [SimpleNamespace(scale=1.0)], _Slots(), np.ones(3)
        self.members, self.queue, self.pair, self.function = {1.0}, deque([1.0]), ([1.0], "name"), abs
        self.slots.scale = 1.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "scale": lambda m: setattr(m, "scale", torch.tensor(0.1)),
    "filled": lambda m: m.filled.fill_(0.1),
    "filled ": lambda m: setattr(m.filled, "data", torch.tensor(0.1)),
    "options.loss.scale": lambda m: m.options["loss"].update(scale=0.1),
    "options.loss.shift": lambda m: m.options["loss"].update(shift=0.1),
    "table.99": lambda m: m.table.update({99: 0.1}),
    "nested.0.0": lambda m: m.nested[0].__setitem__(0, 0.1),
    "config.field_79": lambda m: setattr(m.config, "field_79", 0),
    "objects.0.scale": lambda m: setattr(m.objects[0], "scale", 0.1),
    "slots.scale": lambda m: setattr(m.slots, "scale", 0.1),
    "array": lambda m: m.array.__setitem__(2, 0.1),
    "members.0.1": lambda m: m.members.add(0.1),
    "queue.0": lambda m: m.queue.__setitem__(0, 0.1),
    "pair.0.0": lambda m: m.pair[0].__setitem__(0, 0.1),
    "function": lambda m: setattr(m, "function", lambda x: x),
    "_Stateful.rate": lambda m: setattr(type(m), "rate", 0.1),
    "rate": lambda m: setattr(m, "rate", 0.1),
}
"""What is set after `apply`, and the name of it that the refusal says."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_of_any_kind_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Stateful, "rate", 1.0)  # and sets it back
    model = _Stateful()
    frozen = FrozenModel(model, lambda param: param.dtype)
    frozen.remember_state()
    assert frozen.describe_change() == ""
    CHANGES[name](model)
    assert frozen.describe_change() == f"{name.strip()} was set after the plan was applied"


def test_what_a_loop_may_do_is_no_change() -> None:
    """It may evaluate, write buffers, and hang its optimizer on the model."""
    model = _Stateful()
    model.register_buffer("mean", torch.zeros(2))
    frozen = FrozenModel(model, lambda param: param.dtype)
    frozen.remember_state()
    model.eval()
    model.mean.add_(1)
    model.options = {"loss": {"scale": 1.0}}  # equal to what it was
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.lin.weight.zero_()
    assert frozen.describe_change() == ""


def test_a_plan_for_another_mesh_is_refused() -> None:
    plan = own_plans()["data parallel"]
    assert run_ranks(_other_mesh, 2, (plan,))[0] == "the plan is for a mesh of sizes (2,), the mesh here has (1, 2)"


def _other_mesh(plan: Plan) -> str:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2))
    return refusal_of(partial(Parallel, OwnGPT(), plan, mesh))
