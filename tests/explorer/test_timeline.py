"""The step timeline is the plan's own price laid out in time: its lengths add up to the step, for every zoo model."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from explorer.analysis import breakdown as parts
from explorer.analysis.timeline import PHASES, Bar, Timeline, timeline
from explorer.figures.palette import MEMORY_KINDS
from planner_core.core.cluster import Cluster
from planner_core.core.plan import Plan
from planner_core.core.workload import Workload
from planner_core.cost.memory import tensors_at_peak, walk
from planner_core.cost.model import cost_model, cost_model_of
from planner_core.cost.schedule.exposed import NOT_HIDDEN, WAITED, exposed_parts
from planner_core.cost.step import price, units_of
from planner_core.cost.step_messages import WAIT, message_time, messages
from planner_core.models.zoo import ZOO
from planner_core.planning.pipeline import Result
from planner_core.planning.request import Request
from tests.support.plans import planned

QUICK = ("llama-3-8b", "mixtral-8x7b")


@pytest.fixture(scope="module", params=[pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ZOO])
def result(request: pytest.FixtureRequest) -> Result:
    return planned(Request(request.param, layers=4 if ZOO[request.param].depth else None))


def test_lengths_are_the_plans_times(result: Result) -> None:
    for plan in result.plans:
        line, cost = timeline(plan, result.graph), plan.cost
        assert line.step_s == pytest.approx(cost.step_time_s, rel=1e-9)
        assert line.total("compute") == pytest.approx(cost.compute_time_s, rel=1e-9)
        assert line.total("exposed") == pytest.approx(cost.exposed_comm_time_s, rel=1e-9, abs=1e-12)
        model = cost_model_of(plan)
        shows = sum(e.seconds for e in exposed_parts(plan.blocks, result.graph, model) if e.why in (WAITED, NOT_HIDDEN))
        for unit in units_of(plan.blocks, result.graph, model):
            shows += unit.copies * sum(message_time(m, model) for m in unit.alone)
        assert line.total("hidden") == pytest.approx(cost.comm_time_s - shows, rel=1e-9, abs=1e-9)


def test_every_figure_opens_to_parts_that_add_up(result: Result) -> None:
    for plan in result.plans:
        cost = plan.cost
        sent = parts.collectives(plan, result.graph)
        assert sum(s.message.count * s.each_s for s in sent) == pytest.approx(cost.comm_time_s, rel=1e-9, abs=1e-12)
        found = sum(s.message.count * s.wire_bytes for s in sent)
        assert found == pytest.approx(sum(t.wire_bytes for t in cost.traffic), rel=1e-6, abs=len(sent))
        assert {s.algorithm for s in sent} >= {t.algorithm for t in cost.traffic if t.wire_bytes}
        assert sum(w.total_s for w in parts.work(plan, result.graph)) == pytest.approx(cost.compute_time_s, rel=1e-9)
        waits = sum(w.seconds for w in parts.waits(plan, result.graph))
        assert waits == pytest.approx(cost.exposed_comm_time_s, rel=1e-9, abs=1e-12)
        assert tensors_by_kind(plan, result) == {k: n for k in MEMORY_KINDS if (n := cost.memory_bytes[k])}


def tensors_by_kind(plan: Plan, result: Result) -> Counter[str]:
    found: Counter[str] = Counter()
    for h in tensors_at_peak(plan.blocks, result.graph, cost_model_of(plan)):
        assert h.num_bytes > 0 and h.copies > 0
        assert not h.dtype or h.num_bytes <= math.prod(h.shape) * 12, (
            "no share is larger than the whole with 32-bit states"
        )
        found[h.kind] += h.total_bytes
    return found


@pytest.mark.parametrize(("model", "settings"), [("llama-3-8b", {"recompute": "full"}), ("gpt2-xl", {"layers": 2, "recompute": "full"}),
                                                 ("t5-large", {"layers": 2, "batch": 16, "seq": 16})])  # fmt: skip
def test_the_memory_opens_wherever_its_peak_stands(model: str, settings: dict[str, Any]) -> None:
    """Recomputed blocks, the loss, the optimizer's step: each is the peak of one of these."""
    found = planned(Request(model, **settings))
    for plan in found.plans:
        assert tensors_by_kind(plan, found) == {k: n for k in MEMORY_KINDS if (n := plan.cost.memory_bytes[k])}


@pytest.mark.parametrize("precision", ["pure", "mixed"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_memory_opens_with_masters_and_micro_batches(precision: str, accumulate: int) -> None:
    """Working copies stand beside master weights, gradients through the micro-batches of a step: every one is listed."""
    found = planned(Request("gpt2-xl", layers=2))
    for plan in found.plans:
        load = Workload(**{**plan.workload, "precision": precision, "accumulate": accumulate})
        model = cost_model(Cluster.from_json(plan.cluster), plan.mesh, load)
        listed: Counter[str] = Counter()
        for h in tensors_at_peak(plan.blocks, found.graph, model):
            listed[h.kind] += h.total_bytes
        memory = walk(plan.blocks, found.graph, model).memory_bytes()
        assert listed == {k: n for k in MEMORY_KINDS if (n := memory[k])}


def test_the_lanes_fill_the_step_without_gap_or_overlap(result: Result) -> None:
    line = timeline(result.best, result.graph)
    busy = sorted((b for b in line.bars if b.lane != "hidden"), key=lambda b: b.start_s)
    assert busy[0].start_s == 0
    for a, b in pairwise(busy):
        assert b.start_s == pytest.approx(a.start_s + a.seconds)
    hidden = sorted((b for b in line.bars if b.lane == "hidden"), key=lambda b: b.start_s)
    for a, b in pairwise(hidden):
        assert b.start_s >= a.start_s + a.seconds - 1e-12
    assert all(b.start_s >= -1e-12 and b.start_s + b.seconds <= line.step_s + 1e-12 for b in hidden)


def test_backward_runs_the_parts_in_reverse(result: Result) -> None:
    line = timeline(result.best, result.graph)
    there, back = ([(part, n) for part, n, *_ in line.spans(phase)] for phase in PHASES)
    assert there == list(reversed(back))
    assert line.start_of("backward") == pytest.approx(
        line.total("compute", "forward") + line.total("exposed", "forward")
    )


def test_every_layer_is_drawn() -> None:
    result = planned(Request("llama-3-8b"))
    line = timeline(result.best, result.graph)
    layers = {b.copy for b in line.bars if b.part == "LlamaDecoderLayer" and b.phase == "forward"}
    assert layers == set(range(1, 33))
    assert [part for part, *_ in line.spans("forward")] == ["embed_tokens", "LlamaDecoderLayer", "norm … lm_head"]
    assert line.num_ranks == 16


def test_recomputation_is_backward_work() -> None:
    lines = {}
    for recompute in ("none", "full"):
        result = planned(Request("gpt2-xl", recompute=recompute, layers=6))
        lines[recompute] = line = timeline(result.best, result.graph)
        assert line.step_s == pytest.approx(result.best.cost.step_time_s, rel=1e-9)
    none, full = lines["none"], lines["full"]
    layers = sum(b.seconds for b in full.bars if (b.lane, b.phase) == ("compute", "forward") and b.part == "GPT2Block")
    more = full.total("compute", "backward") - none.total("compute", "backward")
    assert 0.6 * layers < more < layers, "the last operators of a block are not computed again"


def test_the_prices_are_read_from_the_plan_alone(result: Result) -> None:
    assert price(result.best.blocks, result.graph, cost_model_of(result.best)) == result.best.cost


def test_weight_traffic_is_hidden_or_shown(result: Result) -> None:
    """What a step sends beside compute, phase by phase: hidden bars, and exposed ones that are not the price of contention."""
    model = cost_model_of(result.best)
    line = timeline(result.best, result.graph)
    sent = waited = 0.0
    for m in messages(result.best.blocks, result.graph, model):
        sent += message_time(m, model)
        waited += message_time(m, model) if m.category == WAIT else 0.0
    hidden = line.total("hidden", "forward") + line.total("hidden", "backward")
    exposed = line.total("exposed", "forward") + line.total("exposed", "backward")
    assert waited <= exposed * (1 + 1e-9)
    assert hidden <= (sent - waited) * (1 + 1e-9)
    assert hidden + exposed >= sent * (1 - 1e-9)


def test_words_stand_only_on_bars_without_gaps() -> None:
    """A layer that mostly waits must not look like compute because its name is painted over the gaps."""
    layer = [Bar("compute", "forward", "x", 1, 1, 0.0, 1.0), Bar("exposed", "forward", "x", 1, 1, 1.0, 3.0)]
    assert not Timeline(tuple(layer), 2, 0.0).dense("forward")
    assert Timeline(tuple(layer[:1]), 2, 0.0).dense("forward")
