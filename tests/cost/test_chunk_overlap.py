"""Chunk overlap of a plan, by hand on one reduction, and as a bound on what waits."""

from __future__ import annotations

import pytest

from planner_core.cost.communication.collectives import collective_time
from planner_core.cost.model import cost_model
from planner_core.cost.schedule.chunk_overlap import CHUNKS, REDUCTIONS, overlap
from planner_core.cost.step import op_seconds
from planner_core.cost.step_messages import WAIT, message_time, messages
from planner_core.planning.pipeline import Result, plan_model
from planner_core.planning.request import Request


@pytest.fixture(scope="module")
def atp() -> Result:
    return plan_model(Request("llama-3-8b", cluster="1x8-h100", mesh="2x4", layers=2, method="atp"))


def test_forward_by_hand(atp: Result) -> None:
    """Per result that is reduced: with C chunks, GEMM and reduction in turn take (g + a + (C-1) max(g, a)) / C."""
    plan, graph = atp.best, atp.graph
    model = cost_model(atp.cluster, plan.mesh, atp.workload)
    totals = {}
    for chunks in CHUNKS:
        total = 0.0
        for m in messages(plan.blocks, graph, model):
            if (
                m.phase != "forward"
                or not m.what.startswith("result")
                or m.kind not in REDUCTIONS
                or m.category != WAIT
            ):
                continue
            block = graph.blocks[m.label.partition("#")[0]] if m.label else graph.top
            op = next(o for o in block.ops if o.name == m.site)
            g = op_seconds(block, op, plan.blocks[m.label], {}, model)[0]
            a = collective_time(m.kind, m.num_bytes, model.links[m.axis])[0]
            parts = [collective_time(m.kind, m.num_bytes // chunks, model.links[m.axis])[0]] * chunks
            computed = sent = 0.0
            for part in parts:
                computed += g / chunks
                sent = max(computed, sent) + part
            total += m.count * max(0.0, g + a - sent)
        totals[chunks] = total
    found = overlap(plan.blocks, graph, model)
    assert found.chunks == max(totals, key=totals.__getitem__)
    assert found.forward_s == pytest.approx(totals[found.chunks], rel=1e-9)


def test_no_more_hides_than_waits(atp: Result) -> None:
    plan = atp.best
    model = cost_model(atp.cluster, plan.mesh, atp.workload)
    waits = {"forward": 0.0, "backward": 0.0}
    for m in messages(plan.blocks, atp.graph, model):
        if m.category == WAIT:
            waits[m.phase] += message_time(m, model)
    found = overlap(plan.blocks, atp.graph, model)
    assert 0 < found.forward_s <= waits["forward"]
    assert 0 < found.backward_s <= waits["backward"]
    assert any("chunks" in note for note in plan.notes)
