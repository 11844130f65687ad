"""The order in which ranks issue their collectives and wait for them is the one that the price of a step assumes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import planner_core as shardscope
from planner_core.core import Graph, Plan
from planner_core.cost.schedule.events import Event, schedule_events
from planner_core.cost.schedule.units import schedule_units
from planner_core.models import load_plan_graph
from planner_core.planning import candidate_meshes
from planner_core.planning.fitting.front import unseen_corners
from planner_core.runtime import Trace
from planner_core.runtime.library import applied
from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.engine import BoundProgram
from planner_core.verification.api import scaled, verify
from planner_core.verification.numerics import verify_all
from planner_core.verification.schedule import first_difference
from tests.support.plans import Request, in_chunks, planned, searched
from tests.support.ranks import run_ranks
from tests.support.tiny_models import LLAMA, LLAMA_SIZES

LAYERS = 3
"""A gather over two axes is issued two units ahead."""
SIZES = {**LLAMA_SIZES, "num_hidden_layers": LAYERS}
BATCH, SEQ = 4, 32


@cache
def llama() -> tuple[dict[str, Plan], Graph]:
    config = {**LLAMA, **SIZES}
    found = shardscope.plan(config, cluster="1x8-h100:gpus=2", mesh="2", batch=BATCH, seq=SEQ, dtype="float32")
    return {p.name: p for p in found.plans}, found.graph


@cache
def on_two_axes() -> tuple[dict[str, Plan], Graph]:
    """A plan that gathers weights over both axes of a 2x2 mesh, and one whose working copies are made over one axis and gathered over the
    other."""
    config = {**LLAMA, **SIZES}
    asked = {"mesh": "2x2", "batch": BATCH, "seq": SEQ, "dtype": "float32"}
    found = shardscope.plan(config, cluster="1x8-h100:gpus=4", layout="dp=2,fsdp=2,zero=1", **asked)
    # A report leaves it out, since Megatron-LM's plan is better in time and memory.
    corners = unseen_corners(found.planner, candidate_meshes(found.request, found.cluster), [found.best])
    both = next(p for p in corners if any(len(w.gathered) == 2 for b in p.blocks.values() for w in b.params.values()))
    mixed = next(p for p in found.plans if p.name == "our current setup")
    assert any(w.gathered and w.once_gathered_axes for b in mixed.blocks.values() for w in b.params.values())
    return {"both": both, "mixed": mixed}, found.graph


def saved(folder: Path, names: Sequence[str]) -> list[str]:
    plans = {**llama()[0], **(on_two_axes()[0] if {"both", "mixed"} & set(names) else {})}
    for name in names:
        shardscope.save_plan(plans[name], folder / name)
    return [str(folder / name) for name in names]


def prefixes(graph: Graph) -> list[str]:
    return [c.prefix for c in graph.calls()]


# --- on the ranks ---------------------------------------------------------------------------------------


def model_under(plan_file: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return shardscope.apply(LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)), shardscope.load_plan(plan_file))


def step(model: Any, micro_batches: int) -> None:
    ids = torch.randint(0, 256, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    for number in range(micro_batches):
        loss = model(input_ids=ids, labels=ids, global_batch=True).loss
        if number < micro_batches - 1:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()


def traced(files: list[str], micro_batches: int, fault: str = "") -> list[Any]:
    """What this rank issued and waited for in its second step under each plan."""
    plant(fault)
    found = []
    for file in files:
        model = model_under(file)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            trace = Trace()
            applied(model).engine.trace(trace)
            step(model, micro_batches)
            optimizer.step()
            optimizer.zero_grad()
        found.append(trace.rows())
    return found


def plant(fault: str) -> None:
    """Let this process wait for every collective at once, or gather no weight ahead."""
    issue: Callable[..., Any] = Axis._issue_collective

    def at_once(self: Axis, *args: Any) -> Any:
        out = issue(self, *args)()
        return lambda: out

    if fault == "waits at once":
        Axis._issue_collective = at_once  # type: ignore[method-assign]
    elif fault == "gathers nothing ahead":
        make = BoundProgram._make_call

        def alone(self: BoundProgram, spec: Any, unit: Any, forward: Any, backward: Any) -> Any:
            return make(self, spec, unit, forward[:1], backward[:1])

        BoundProgram._make_call = alone  # type: ignore[method-assign]


# --- the order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.slow(but=("2",))
def test_every_plan_of_a_llama_runs_as_scheduled(micro_batches: int, tmp_path: Path) -> None:
    """Kinds, axes, bytes, numbers of weights and places among the units, issues and waits; without sums in all micro-batches
    but the last."""
    plans, graph = llama()
    baselines = ("best", "data parallel", "FSDP", "Megatron-LM", "Megatron-LM + sequence parallel")
    names = [name for name in plans if micro_batches == 1 or name in baselines]
    assert {"data parallel", "FSDP", "Megatron-LM", "Megatron-LM + sequence parallel"} <= set(names)
    for rank in run_ranks(traced, 2, (saved(tmp_path, names), micro_batches)):
        for name, rows in zip(names, rank, strict=True):
            wanted = schedule_events(plans[name], graph, micro_batches=micro_batches)
            assert first_difference(wanted, [Event(*row) for row in rows], prefixes(graph)) == "", name


def test_a_chunk_is_sent_before_the_next_is_made(tmp_path: Path) -> None:
    """Four sums of a product are issued one behind the other, and then waited for; a run that waits for each at once is caught."""
    plans, graph = llama()
    cut = {name: in_chunks(plans[name]) for name in ("Megatron-LM", "Megatron-LM + sequence parallel")}
    for name, plan in cut.items():
        shardscope.save_plan(plan, tmp_path / name)
    files = [str(tmp_path / name) for name in cut]
    for fault, chosen in (("", files), ("waits at once", files[:1])):
        for (name, plan), rows in zip(cut.items(), run_ranks(traced, 2, (chosen, 1, fault))[0], strict=False):
            wanted = schedule_events(plan, graph)
            assert [e.what for e in wanted if "down_proj" in getattr(e, "site", "")][:8] == ["issue"] * 4 + ["wait"] * 4
            found = first_difference(wanted, [Event(*row) for row in rows], prefixes(graph))
            assert (found == "") is (fault == ""), (name, fault, found)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.slow(but=("2",))
def test_gathers_over_two_axes_run_as_scheduled(micro_batches: int, tmp_path: Path) -> None:
    """A unit's first gather is issued two units ahead, its second one unit ahead. A working copy that is gathered at use is waited for
    before its gather is issued."""
    plans, graph = on_two_axes()
    for rank in run_ranks(traced, 4, (saved(tmp_path, list(plans)), micro_batches)):
        for (name, plan), rows in zip(plans.items(), rank, strict=True):
            wanted = schedule_events(plan, graph, micro_batches=micro_batches)
            assert first_difference(wanted, [Event(*row) for row in rows], prefixes(graph)) == "", name


@pytest.mark.parametrize(
    ("fault", "said"), [("waits at once", "all_gather"), ("gathers nothing ahead", "wait all_gather")]
)
@pytest.mark.slow(but=("gathers nothing ahead-wait all_gather",))
def test_a_run_that_departs_from_the_schedule_is_caught(fault: str, said: str, tmp_path: Path) -> None:
    plans, graph = llama()
    (rows,) = run_ranks(traced, 2, (saved(tmp_path, ["FSDP"]), 1, fault))[0]
    found = first_difference(schedule_events(plans["FSDP"], graph), [Event(*row) for row in rows], prefixes(graph))
    assert "scheduled" in found and said in found


def test_buckets_hold_what_a_block_holds() -> None:
    """By arithmetic: the matrices of a layer travel together (7 of them), gathered forward and backward, scattered once."""
    plans, graph = llama()
    h, m = SIZES["hidden_size"], SIZES["intermediate_size"]
    matrices = 4 * (4 * h * h + 3 * h * m)
    layers = [u for u in schedule_units(plans["FSDP"], graph) if u.name]
    assert [u.name for u in layers] == [f"model.layers.{i}" for i in range(LAYERS)]
    for unit in layers:
        ((gather,), (regather,), (scatter,)) = unit.gathers, unit.regathers, unit.each
        assert (gather[0].kind, gather[0].num_bytes, gather[0].packed) == ("all_gather", matrices, 7)
        assert regather == gather
        assert (scatter[0].kind, scatter[0].num_bytes, scatter[0].packed) == ("reduce_scatter", matrices, 7)
        assert [(chain[0].num_bytes, chain[0].packed) for _, chain in unit.small] == [(2 * 4 * h, 2)], "two norms"
    sums = [e for e in schedule_events(plans["FSDP"], graph) if e.packed and e.kind == "all_reduce"]
    norms = 2 * LAYERS + 1
    assert [(e.what, e.num_bytes, e.packed) for e in sums] == [
        (what, norms * 4 * h, norms) for what in ("issue", "wait")
    ]
    for unit in schedule_units(plans["data parallel"], graph):
        if unit.name:
            ((total,),) = unit.last
            assert (total.kind, total.num_bytes, total.packed) == ("all_reduce", matrices + 2 * 4 * h, 9)
            assert not unit.gathers and not unit.each, "summed once a step"


ZOO = [
    ("gpt2-xl", "2"),
    ("t5-large", "2"),
    ("mixtral-8x7b", "2"),
    ("vit-large", "2"),
    ("resnet50-100k", "2"),
    *((name, "2x2") for name in ("llama-3-8b", "gpt2-xl", "bert-large", "t5-large", "mixtral-8x7b", "resnet50-100k")),
]


@pytest.mark.parametrize(
    ("name", "mesh"), [("bert-large", "2"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ZOO)]
)
@pytest.mark.slow(only=("bert-large-2",))
def test_small_models_of_the_zoo_run_as_scheduled(name: str, mesh: str) -> None:
    ranks = 4 if "x" in mesh else 2
    found = planned(Request(name, cluster="2x8-h100", mesh="2x8" if ranks == 4 else "16"))
    small = [scaled(p, ranks) for p in found.plans]
    reports = verify_all(small, graphs=[load_plan_graph(small[0])] * len(small))
    assert len(reports) > 2
    for plan, report in zip(small, reports, strict=True):
        assert report["order"] == {**report["order"], "ok": True, "difference": ""}, plan.name
        assert report["ok"], plan.name


# --- what shows of a slow network -----------------------------------------------------------------------

DELAY_S, FORWARD_S, BACKWARD_S = 0.02, 0.03, 0.1


class Clock:
    """Counts the seconds that are slept, and sleeps none."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def resting(clock: Clock) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes the function of a unit take a known time, forward and backward."""

    class Rest(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            clock.sleep(FORWARD_S)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            clock.sleep(BACKWARD_S)
            return gradient

    def rested(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            out = function(*args)
            if not isinstance(out, tuple):
                return Rest.apply(out)
            lone = next((i for i, x in enumerate(out) if x.dim() == 0), 0)  # the loss, where there is one
            return tuple(Rest.apply(x) if i == lone else x for i, x in enumerate(out))

        return call

    return rested


def slow_network(clock: Clock, delay_s: float) -> None:
    """Let every collective take `delay_s` longer, one after the other, as on one link."""
    issue, free = Axis._issue_collective, [0.0]

    def late(self: Axis, *args: Any) -> Any:
        finish = issue(self, *args)
        free[0] = ready = max(free[0], clock.monotonic()) + delay_s

        def finished() -> Any:
            clock.sleep(max(0.0, ready - clock.monotonic()))
            return finish()

        return finished

    Axis._issue_collective = late  # type: ignore[method-assign]


def timed(file: str) -> dict[str, float]:
    """Seconds of a step: as it is, on a slow network, and on a slow network when every collective is waited for at once."""
    clock = Clock()
    model = model_under(file)
    step(model, 1)
    rested = resting(clock)
    for ready in applied(model).programs.values():
        for call in ready.bound.calls:
            object.__setattr__(call, "function", rested(call.function))  # a call is complete when it is made
    found, issue = {}, Axis._issue_collective
    for how in ("fast", "slow", "at once"):
        Axis._issue_collective = issue  # type: ignore[method-assign]
        if how != "fast":
            slow_network(clock, DELAY_S)
        if how == "at once":
            plant("waits at once")
        times = []
        for _ in range(2):
            dist.barrier()
            start = clock.monotonic()
            step(model, 1)
            times.append(clock.monotonic() - start)
        found[how] = min(times[1:])
    return found


def seconds(events: Sequence[Event], delay_s: float) -> float:
    """The schedule on one compute stream and one link, by hand."""
    now = link = 0.0
    under_way: dict[Event, list[float]] = defaultdict(list)
    for e in events:
        if e.what == "issue":
            link = max(link, now) + delay_s
            under_way[replace(e, what="wait")].append(link)
        elif e.what == "wait":
            now = max(now, under_way[e].pop(0))
        else:
            now += FORWARD_S if e.what == "run" else BACKWARD_S
    return now


def growth(name: str, folder: Path) -> tuple[float, float, float, float]:
    """Seconds that a step grows by on a slow network: as scheduled, as run, when waiting at once; and the sum of all delays."""
    plans, graph = on_two_axes() if name == "both" else llama()
    events = schedule_events(plans[name], graph)
    exposed = seconds(events, DELAY_S) - seconds(events, 0.0)
    delays = DELAY_S * sum(e.what == "issue" for e in events)
    found = run_ranks(timed, plans[name].mesh.num_devices, tuple(saved(folder, [name])))[0]
    return exposed, found["slow"] - found["fast"], found["at once"] - found["fast"], delays


@pytest.mark.parametrize("name", ["FSDP", "data parallel", "Megatron-LM", "both"])
@pytest.mark.slow(but=("both",))
def test_a_slow_network_costs_what_the_schedule_says_is_exposed(name: str, tmp_path: Path) -> None:
    """Every collective takes 20 ms more, every unit computes for 30 ms forward and 100 ms backward, on a clock that counts. The
    step grows by what the schedule exposes; when the same program waits at once it grows by all delays."""
    exposed, grown, at_once, delays = growth(name, tmp_path)
    assert grown == pytest.approx(exposed)
    assert at_once == pytest.approx(delays)
    if name == "Megatron-LM":
        assert exposed > 0.6 * delays, "operators wait for most of it"
    else:
        assert exposed < 0.5 * delays


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (
            "yolos",
            {"image_size": [64, 64], "num_detection_tokens": 8},
        ),  # reads positions in the middle, in a unit that has no weight
        # cuts its positions in two: one gradient of two terms
        pytest.param("dpt", {"image_size": 64, "neck_hidden_sizes": [16, 16, 16, 16]}, marks=pytest.mark.slow),
    ],
)
def test_a_weight_that_is_used_twice_is_reduced_once(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    common = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **common, **sizes}))
    found = verify(searched(Request(str(tmp_path / "config.json"), cluster="2x8-h100", batch=16)))
    assert found["ok"] and found["order"]["events"], found["order"]
