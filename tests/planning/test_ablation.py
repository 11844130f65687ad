"""From exact to a paper's method one restriction at a time: each step only forbids, and the last is the method itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from planner_core.planning import choose_mesh
from planner_core.planning.analysis.ablation import DESCRIPTIONS, ablation_steps, exact_step
from planner_core.planning.methods.registry import METHODS
from planner_core.planning.planner import candidate_meshes, prepare_planner, replace_request
from planner_core.planning.request import Request
from tests.support.plans import planned


@pytest.mark.parametrize("method", [m for m in METHODS if m != "exact"])
@pytest.mark.parametrize("model", ["gpt2-xl", pytest.param("llama-3-8b", marks=pytest.mark.slow)])
@pytest.mark.slow(only=("gpt2-xl-tap",))
def test_the_last_rung_is_the_method_and_each_only_forbids(model: str, method: str) -> None:
    request = Request(model, cluster="2x8-h100", layers=6)
    planner = prepare_planner(request)
    best = planned(replace(request, prove=True)).searched
    found = [exact_step(best), *ablation_steps(planner, method)]
    assert {r.name for r in found} <= {*DESCRIPTIONS, "space"}
    assert all(r.says == DESCRIPTIONS.get(r.name, METHODS[method].space) and r.says for r in found)
    plans = [r.plan for r in found]
    assert None not in plans
    own = replace_request(planner, method=method)
    assert plans[-1].blocks == choose_mesh(own, candidate_meshes(own.request, own.cluster)).blocks  # type: ignore[union-attr]
    exact, goal, *rest = [p.cost for p in plans if p is not None]
    assert exact.step_time_s <= min(c.step_time_s for c in (goal, *rest)) * 1.0001
    for a, b in pairwise((goal, *rest)):  # each is the least communication of a smaller space
        assert b.comm_time_s >= a.comm_time_s * 0.9999


def test_the_proof_of_the_last_row_is_the_methods_own() -> None:
    """Of TAP's plan, the least in bytes, was said "at most 0.96 % above the least communication time", above rows with less of that."""
    planner = prepare_planner(Request("llama-3-8b", cluster="2x8-h100", layers=2))
    own = replace_request(planner, method="tap")
    alone = choose_mesh(own, candidate_meshes(own.request, own.cluster))
    before, row = ablation_steps(planner, "tap")[-2:]
    assert row.plan and before.plan and not row.plan.optimal
    assert (row.plan.bound, row.plan.notes) == (alone.bound, alone.notes)
    assert "above the least bytes that TAP admits" in str(row.plan.notes[0].sentence)
    # As the plan of a larger space it keeps that one's bound, which is in seconds.
    called = row.called(before).plan
    assert called and (called.method, called.bound) == ("exact", before.plan.bound)


def test_progress_can_stop_it() -> None:
    planner = prepare_planner(Request("gpt2-xl", cluster="1x8-h100", layers=2))

    class Stopped(Exception):
        pass

    def report_progress(text: str) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        list(ablation_steps(planner, "tap", report_progress))


@pytest.mark.parametrize("method", [m for m in METHODS if m != "exact"])
def test_every_row_adds_a_restriction_of_the_method(method: str) -> None:
    """Alpa-like had a row "runs all copies of a block alike", though its copies may differ."""
    planner = prepare_planner(Request("gpt2-xl", cluster="1x8-h100", layers=2))
    assert any(r.name == "alike" for r in ablation_steps(planner, method)) == METHODS[method].uniform
