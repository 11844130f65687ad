"""A plan on one mesh axis leads where the fastest plan needs two and the two tie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from explorer.analysis.shortlist import shortlist
from explorer.analysis.step_parts import split_step
from explorer.components.overview import table
from explorer.text import recipe, words
from planner_core.core import Plan, PlanRole
from planner_core.cost import simulate_step
from planner_core.planning import choose_mesh, plan_ids
from planner_core.planning.analysis.reporting import plan_report, text
from planner_core.planning.fitting import simpler as rule
from planner_core.planning.fitting import simpler as simpler_module
from planner_core.planning.fitting.simpler import FASTEST, SLOWER, prefer_simpler, without_simpler
from planner_core.planning.pipeline import Result
from planner_core.planning.planner import Planner, candidate_meshes, prepare_planner, replace_request
from planner_core.planning.request import Request
from tests.support.plans import planned

ASKED = Request("resnet50-100k", cluster="2x8-v100-eth", batch=2688, zero=3)


@pytest.fixture(scope="module")
def result() -> Result:
    return planned(ASKED, "baselines", "no worse than a baseline", "simpler")


@pytest.fixture(scope="module")
def planner(result: Result) -> Planner:
    return prepare_planner(result.request, result.graph)


def quiet(_: str) -> None:
    pass


def test_a_tie_is_led_by_the_plan_on_one_axis(result: Result) -> None:
    """TAP’s model at a batch where mesh 2x8 is faster by 1 %, and the simulation says the opposite."""
    first, second = result.plans[:2]
    assert first.role is PlanRole.SIMPLER and not first.optimal and len(first.mesh.axis_sizes) == 1
    assert second.name == FASTEST and second.optimal and len(second.mesh.axis_sizes) == 2
    slower = first.cost.step_time_s / second.cost.step_time_s - 1
    assert 0 < slower <= SLOWER and simulate_step(first, result.graph) <= simulate_step(second, result.graph)
    assert not any(
        (p.blocks, p.mesh) == (q.blocks, q.mesh)
        for p in (first, second)
        for q in result.plans
        if q not in (first, second)
    )


def test_the_fastest_stays_the_optimum_of_all_meshes(result: Result, planner: Planner) -> None:
    every = choose_mesh(planner, candidate_meshes(planner.request, planner.cluster))
    fastest = result.plans[1]
    assert (fastest.blocks, fastest.cost, fastest.optimal) == (every.blocks, every.cost, every.optimal)
    assert without_simpler(result.plans) == (every, *result.plans[2:]) and result.searched == every


def test_the_reason_speaks_of_mesh_axes_alone(result: Result) -> None:
    """It said "the fastest leads" where the fastest plan ties with FSDP, which is recommended."""
    assert result.reasons["simpler"] == "a plan on one mesh axis ties with the search's"
    other = planned(Request("gpt2-xl", layers=2, cluster="1x8-h100"), "simpler")
    assert other.reasons["simpler"] == "no plan on one mesh axis leads in place of the search's, of one stage"


def test_the_report_says_that_it_is_a_tie(result: Result) -> None:
    found = result.choice
    assert found.fastest == FASTEST and found.recommended == result.best.name
    assert result.best.name in {t.name for t in found.ties}
    assert "needs one mesh axis, and is not slower by the simulation" in found.sentence
    (row,) = [line for line in text(result).splitlines() if line.startswith("best ")]
    assert row.endswith("a tie")
    summary = plan_report(result)["plans"][0]
    assert summary["notes"][0].startswith("a tie: ") and not summary["optimal"]


def test_the_page_says_that_it_is_a_tie(result: Result) -> None:
    """It recommends the one, says what the other gains and that this is less than the doubt, and of the two that they tie."""
    assert [words.plan_title(p) for p in result.plans[:2]] == ["Simpler plan", "Best plan"]
    # A pin has a title of its own, also of a plan that led by a tie.
    pinned = replace(result.best, name="Simpler plan (32 samples)", role=PlanRole.OTHER)
    assert words.plan_title(pinned) == pinned.name
    plans = plan_ids(result.plans)
    (run, fastest), found = list(plans)[:2], result.choice
    listed = shortlist(plans, found, "")
    assert [(one.name, one.what) for one in listed[:2]] == [
        (run, "recommended"),
        (fastest, "the best plan, proven"),
    ]
    parts = {one.name: split_step(plans[one.name], result.graph, result.coarse) for one in listed}
    sentence = table.explain_choice(plans, listed, recipe.distinct_names(plans), fastest, parts)
    assert f"less than {recipe.layout_name(plans[run])}, within the doubt: " in sentence


def test_it_does_not_lead_where_the_simulation_disagrees(
    result: Result, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest = without_simpler(result.plans)[0]
    assert [p.name for p in prefer_simpler(planner, fastest, (), quiet)] == ["best", FASTEST]
    monkeypatch.setattr(rule, "simulate_step", lambda plan, graph: 1.0 / len(plan.mesh.axis_sizes))
    assert prefer_simpler(planner, fastest, (), quiet) == [fastest]


def test_it_does_not_lead_where_a_usual_layout_is_faster(result: Result, planner: Planner) -> None:
    fastest = without_simpler(result.plans)[0]
    assert prefer_simpler(planner, fastest, [fastest], quiet) == [fastest]


@pytest.mark.parametrize("changes", [{"mesh": "2x8"}, {"memory_gb": 32.0}, {"tool": "torchrun"}, {"method": "taps"}])
def test_what_the_user_set_is_kept(
    result: Result, planner: Planner, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> Plan:
        raise AssertionError("no other plan is looked for")

    fastest = without_simpler(result.plans)[0]
    monkeypatch.setattr(simpler_module, "choose_mesh", never)
    assert prefer_simpler(replace_request(planner, **changes), fastest, (), quiet) == [fastest]
