"""The step as a list of work: its seconds add up to the plan's, on every stream, and Perfetto can read it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from planner_core.cli.main import main
from planner_core.planning import Request, Result
from planner_core.planning.analysis import STREAMS, TraceWork, chrome_trace, step_trace, step_work
from tests.support.plans import planned

CASES = {
    "gathered weights": Request("llama-3-8b", layers=4),
    "recomputed micro-batches": Request("gpt2-xl", layers=4, recompute="full", accumulate=2, batch=32),
    "two kinds of blocks": Request("t5-large", cluster="1x8-h100", mesh="8", layers=2),
    "kept weights of four micro-batches": Request("llama-3-8b", layers=3, batch=64, accumulate=4, zero=0),
    "no repeated block": Request("resnet50-100k", cluster="1x8-h100", mesh="8"),
}


@pytest.fixture(scope="module", params=CASES)
def result(request: pytest.FixtureRequest) -> Result:
    return planned(CASES[request.param])


def seconds(step: list[TraceWork], stream: str, *kinds: str) -> float:
    return sum(w.seconds for w in step if w.stream == stream and (not kinds or w.kind in kinds))


@pytest.mark.slow(only=("no repeated block",))
def test_the_compute_stream_adds_up_to_the_step(result: Result) -> None:
    for plan in result.plans:
        step, cost = step_work(plan, result.graph), plan.cost
        assert seconds(step, "compute") == pytest.approx(cost.step_time_s, rel=1e-9)
        own = seconds(step, "compute", "compute", "recomputation")
        assert own == pytest.approx(cost.compute_time_s - cost.host_wait_s, rel=1e-9)
        assert seconds(step, "compute", "host") == pytest.approx(cost.host_wait_s, rel=1e-9)
        assert seconds(step, "compute", "optimizer") == pytest.approx(cost.optimizer_time_s, rel=1e-9)
        held = seconds(step, "compute", "waits", "held up by weight traffic")
        assert held == pytest.approx(cost.exposed_comm_time_s, rel=1e-9, abs=1e-12)


def test_the_other_streams_send_what_is_counted_and_parts_cover_the_passes(result: Result) -> None:
    for plan in result.plans:
        step = step_work(plan, result.graph)
        sent = seconds(step, "collectives") + seconds(step, "weights")
        assert sent == pytest.approx(plan.cost.comm_time_s, rel=1e-9, abs=1e-12)
        assert seconds(step, "collectives") == pytest.approx(seconds(step, "compute", "waits"), rel=1e-9, abs=1e-12)
        assert seconds(step, "parts") <= plan.cost.step_time_s * (1 + 1e-9)


def test_nothing_overlaps_on_a_stream_and_nothing_lies_outside_the_step(result: Result) -> None:
    step = step_work(result.best, result.graph)
    end = result.best.cost.step_time_s * (1 + 1e-9)
    for stream in STREAMS:
        mine = sorted((w for w in step if w.stream == stream), key=lambda w: w.start_s)
        assert all(a.start_s + a.seconds <= b.start_s + 1e-12 for a, b in pairwise(mine)), stream
        assert all(w.start_s >= -1e-12 and w.start_s + w.seconds <= end for w in mine), stream
    compute = sorted((w for w in step if w.stream == "compute"), key=lambda w: w.start_s)
    assert all(a.start_s + a.seconds == pytest.approx(b.start_s, abs=1e-9) for a, b in pairwise(compute)), "no gap"


def test_a_wait_stands_beside_its_collective_and_says_who_waits() -> None:
    found = planned(Request("llama-3-8b", layers=2))
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
    found = planned(Request("gpt2-xl", layers=2, recompute="full"))
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
    kinds = [w.kind for w in step if w.phase == "backward" and w.kind != "waits"]
    assert kinds.index("compute") == kinds.count("recomputation")


def test_many_micro_batches_are_put_together_and_still_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(Request("llama-3-8b", layers=3, batch=64, accumulate=4, zero=0))
    whole = step_work(found.best, found.graph)
    monkeypatch.setattr(step_trace, "MOST_WORK", 10)
    short = step_work(found.best, found.graph)
    assert len(short) < 0.6 * len(whole)
    for kind in step_trace.KINDS[:5]:
        assert seconds(short, "compute", kind) == pytest.approx(seconds(whole, "compute", kind), rel=1e-9, abs=1e-12)
    assert max(w.start_s + w.seconds for w in short) == pytest.approx(found.best.cost.step_time_s)


def test_a_trace_is_a_process_a_plan_and_a_thread_a_stream(result: Result) -> None:
    steps = {p.name: step_work(p, result.graph) for p in result.plans[:2]}
    events = json.loads(json.dumps(chrome_trace(steps)))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == list(steps)
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == list(STREAMS) * len(steps)
    for pid, plan in enumerate(result.plans[:2]):
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["tid"] == STREAMS.index("compute")]
        assert sum(e["dur"] for e in mine) == pytest.approx(plan.cost.step_time_s * 1e6, rel=1e-9)


def test_the_command_writes_a_trace_of_the_picked_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    assert (
        main(
            [
                "plan",
                "gpt2-xl",
                "--cluster",
                "1x8-h100",
                "--layers",
                "2",
                "--json",
                "--trace",
                str(file),
                "--pick",
                "FSDP",
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    told = next(p for p in report["plans"] if p["name"] == "FSDP")
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    assert events[0]["args"]["name"] == "FSDP"
    assert sum(e["dur"] for e in events if e.get("tid") == 1 and e["ph"] == "X") == pytest.approx(
        told["step_time_s"] * 1e6
    )
