"""The step as a list of work: its seconds add up to the simulated step, on every stream, and Perfetto can read it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from planner_core.cli.main import main
from planner_core.cost import WorkKind, simulate_step
from planner_core.cost.schedule import timed
from planner_core.planning import Request, Result
from planner_core.planning.analysis import STREAMS, TraceWork, chrome_trace, step_work
from tests.support.plans import planned

CASES = {
    "gathered weights": Request("llama-3-8b", layers=4),
    "recomputed micro-batches": Request("gpt2-xl", layers=4, recompute="full", accumulate=2, batch=32),
    "two kinds of blocks": Request("t5-large", cluster="1x8-h100", mesh="8", layers=2),
    "kept weights of four micro-batches": Request("llama-3-8b", layers=3, batch=64, accumulate=4, zero=0),
    "a stack whose GPUs have no work between steps": Request("gpt2-xl", layers=2, stack="torchtitan"),
    "no repeated block": Request("resnet50-100k", cluster="1x8-h100", mesh="8"),
}


@pytest.fixture(
    scope="module", params=[pytest.param(c, marks=pytest.mark.slow if c == "no repeated block" else ()) for c in CASES]
)
def result(request: pytest.FixtureRequest) -> Result:
    return planned(CASES[request.param], "baselines")


def seconds(step: list[TraceWork], stream: str, *kinds: str) -> float:
    return sum(w.seconds for w in step if w.stream == stream and (not kinds or w.kind in kinds))


def test_the_compute_stream_adds_up_to_the_simulated_step(result: Result) -> None:
    for plan in result.plans:
        step, cost, whole = step_work(plan, result.graph), plan.cost, simulate_step(plan, result.graph)
        assert seconds(step, "compute") == pytest.approx(whole, rel=1e-9)
        own = seconds(step, "compute", "compute", "recomputation")
        assert own == pytest.approx(cost.compute_time_s - cost.host_wait_s, rel=1e-9)
        assert seconds(step, "compute", "host") == pytest.approx(cost.host_wait_s, rel=1e-9)
        assert seconds(step, "compute", "outside") == pytest.approx(cost.outside_time_s, rel=1e-9)
        assert seconds(step, "compute", "optimizer") == pytest.approx(cost.optimizer_time_s, rel=1e-9)
        held = seconds(step, "compute", "waits", "held up by weight traffic")
        exposed = whole - cost.compute_time_s - cost.optimizer_time_s - cost.outside_time_s
        assert held == pytest.approx(exposed, rel=1e-9, abs=1e-9)
        assert seconds(step, "collectives") == pytest.approx(seconds(step, "compute", "waits"), rel=1e-9, abs=1e-12)
        assert seconds(step, "parts") <= whole * (1 + 1e-9)


def test_weights_are_on_their_way_while_the_layer_before_runs() -> None:
    found = planned(CASES["gathered weights"], "baselines")
    step = step_work(next(p for p in found.plans if p.name == "FSDP"), found.graph)
    layers = {(w.phase, w.copy): w.start_s for w in step if w.stream == "parts" and w.part == "LlamaDecoderLayer"}
    ends = {
        (w.phase, w.copy): w.start_s + w.seconds for w in step if w.stream == "parts" and w.part == "LlamaDecoderLayer"
    }
    sent = {
        (w.phase, w.name.split()[0], w.copy): w.start_s
        for w in step
        if w.stream == "weights" and w.part == "LlamaDecoderLayer"
    }
    for copy in (2, 3, 4):
        assert sent["forward", "all_gather", copy] == layers["forward", copy - 1]
        assert sent["backward", "reduce_scatter", copy] >= ends["backward", copy], "not before its gradients are there"
        assert sent["backward", "all_gather", copy - 1] >= layers["backward", copy] - 1e-12
        assert sent["backward", "all_gather", copy - 1] < ends["backward", copy]


def test_nothing_overlaps_on_a_stream_and_nothing_lies_outside_the_step(result: Result) -> None:
    step = step_work(result.best, result.graph)
    end = simulate_step(result.best, result.graph) * (1 + 1e-9)
    for stream in STREAMS:
        mine = sorted((w for w in step if w.stream == stream), key=lambda w: w.start_s)
        assert all(a.start_s + a.seconds <= b.start_s + 1e-12 for a, b in pairwise(mine)), stream
        assert all(w.start_s >= -1e-12 and w.start_s + w.seconds <= end for w in mine), stream
    compute = sorted((w for w in step if w.stream == "compute"), key=lambda w: w.start_s)
    assert all(a.start_s + a.seconds == pytest.approx(b.start_s, abs=1e-9) for a, b in pairwise(compute)), "no gap"


def test_a_wait_stands_beside_its_collective_and_says_who_waits() -> None:
    found = planned(CASES["gathered weights"], "baselines")
    plan = next(p for p in found.plans if p.method == "megatron")
    step = step_work(plan, found.graph)
    sends = {(w.start_s, w.seconds) for w in step if w.stream == "collectives"}
    waits = [w for w in step if w.kind == "waits"]
    assert waits and all((w.start_s, w.seconds) in sends and "wait" in w.note for w in waits)
    assert {w.part for w in waits} >= {"LlamaDecoderLayer"}
    sent = [w for w in step if w.stream in ("collectives", "weights")]
    assert sent and all(w.name.startswith(f"{w.collective} of ") and f"({w.axis})" in w.note for w in sent)
    assert not any(w.collective or w.axis for w in step if w not in sent)


def test_backward_runs_operators_in_reverse_after_what_it_computes_again() -> None:
    found = planned(replace(CASES["recomputed micro-batches"], accumulate=1), "baselines")
    step = [
        w for w in step_work(found.best, found.graph) if w.stream == "compute" and w.part == "GPT2Block" and w.copy == 1
    ]
    names = {
        kind: [w.name for w in step if w.phase == phase and w.kind == kind2]
        for kind, phase, kind2 in (
            ("there", "forward", "compute"),
            ("again", "backward", "recomputation"),
            ("back", "backward", "compute"),
        )
    }
    assert [n for n in names["there"] if n in names["back"]] == names["back"][::-1]
    assert names["again"] == [n for n in names["there"] if n in names["again"]] != []
    kinds = [w.kind for w in step if w.phase == "backward" and w.kind in ("compute", "recomputation")]
    assert kinds.index("compute") == kinds.count("recomputation")


def test_many_micro_batches_are_put_together_and_still_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(CASES["kept weights of four micro-batches"], "baselines")
    whole = step_work(found.best, found.graph)
    monkeypatch.setattr(timed, "MAX_LISTED_WORK", 10)
    short = step_work(found.best, found.graph)
    assert len(short) < 0.8 * len(whole)
    for kind in WorkKind:
        assert seconds(short, "compute", kind) == pytest.approx(seconds(whole, "compute", kind), rel=1e-9, abs=1e-12)
    assert max(w.start_s + w.seconds for w in short) == pytest.approx(simulate_step(found.best, found.graph))


def test_a_trace_is_a_process_a_plan_and_a_thread_a_stream(result: Result) -> None:
    steps = {p.name: step_work(p, result.graph) for p in result.plans[:2]}
    events = json.loads(json.dumps(chrome_trace(steps)))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == list(steps)
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == list(STREAMS) * len(steps)
    for pid, plan in enumerate(result.plans[:2]):
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["tid"] == STREAMS.index("compute")]
        assert sum(e["dur"] for e in mine) == pytest.approx(simulate_step(plan, result.graph) * 1e6, rel=1e-9)


def test_the_command_writes_a_trace_of_the_picked_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    command = "plan gpt2-xl --cluster 1x8-h100 --layers 1 --json --pick FSDP --trace"
    assert main([*command.split(), str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    told = next(p for p in report["plans"] if p["name"] == "FSDP")
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    assert events[0]["args"]["name"] == "FSDP"
    assert sum(e["dur"] for e in events if e.get("tid") == 1 and e["ph"] == "X") == pytest.approx(
        told["simulated_step_s"] * 1e6
    )
