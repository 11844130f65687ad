"""Every figure of a plan opens to parts that add up to it, for the models of the zoo."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from explorer.analysis import breakdown as parts
from explorer.figures.palette import MEMORY_KINDS
from planner_core.core import Plan
from planner_core.cost import cost_model, cost_model_of, price_with_host
from planner_core.cost.memory import tensors_at_peak, walk
from planner_core.models import ZOO
from planner_core.planning import Request, Result
from tests.support.plans import planned

QUICK = ("llama-3-8b", "mixtral-8x7b")


@pytest.fixture(scope="module", params=[pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ZOO])
def result(request: pytest.FixtureRequest) -> Result:
    return planned(Request(request.param, layers=4 if ZOO[request.param].depth else None))


def test_every_figure_opens_to_parts_that_add_up(result: Result) -> None:
    for plan in result.plans:
        cost = plan.cost
        sent = parts.collective_times(plan, result.graph)
        assert sum(s.message.count * s.each_s for s in sent) == pytest.approx(cost.comm_time_s, rel=1e-9, abs=1e-12)
        found = sum(s.message.count * s.wire_bytes for s in sent)
        assert found == pytest.approx(sum(t.wire_bytes for t in cost.traffic), rel=1e-6, abs=len(sent))
        assert {s.algorithm for s in sent} >= {t.algorithm for t in cost.traffic if t.wire_bytes}
        assert sum(w.total_s for w in parts.op_times(plan, result.graph)) == pytest.approx(cost.gpu_compute_s, rel=1e-9)
        waits = sum(w.seconds for w in parts.exposed_waits(plan, result.graph))
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


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama-3-8b", {"recompute": "full"}),
        ("gpt2-xl", {"layers": 2, "recompute": "full"}),
        pytest.param("t5-large", {"layers": 2, "batch": 16, "seq": 16}, marks=pytest.mark.slow),
    ],
)
def test_the_memory_opens_wherever_its_peak_stands(model: str, settings: dict[str, Any]) -> None:
    """Recomputed blocks, the loss, the optimizer's step: each is the peak of one of these. Work that runs again counts, too."""
    found = planned(Request(model, **settings))
    for plan in found.plans:
        work = sum(w.total_s for w in parts.op_times(plan, found.graph))
        assert work == pytest.approx(plan.cost.gpu_compute_s, rel=1e-9)
        assert tensors_by_kind(plan, found) == {k: n for k in MEMORY_KINDS if (n := plan.cost.memory_bytes[k])}


@pytest.mark.parametrize("precision", ["pure", "mixed"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_memory_opens_with_masters_and_micro_batches(precision: str, accumulate: int) -> None:
    """Working copies stand beside master weights, gradients through the micro-batches of a step: every one is listed."""
    found = planned(Request("gpt2-xl", layers=2))
    for plan in found.plans:
        load = replace(plan.workload, precision=precision, accumulate=accumulate)
        model = cost_model(plan.cluster, plan.mesh, load)
        listed: Counter[str] = Counter()
        for h in tensors_at_peak(plan.blocks, found.graph, model):
            listed[h.kind] += h.total_bytes
        memory = walk(plan.blocks, found.graph, model).memory_bytes()
        assert listed == {k: n for k in MEMORY_KINDS if (n := memory[k])}


def test_the_prices_are_read_from_the_plan_alone(result: Result) -> None:
    assert price_with_host(result.best.blocks, result.graph, cost_model_of(result.best)) == result.best.cost
