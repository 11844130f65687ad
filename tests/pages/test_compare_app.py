"""Compare in Streamlit's own test runner: every control writes the address, and the address sets every control."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from explorer.analysis import step_parts
from explorer.text import recipe, units
from planner_core.cost import simulate_step
from planner_core.planning import plan_ids
from planner_core.planning.request import Request
from tests.pages.test_app import open_page
from tests.support.app_test import AppTest
from tests.support.plans import planned


def markdown(at: AppTest) -> str:
    return "\n".join(m.value for m in at.markdown)


def tables(at: AppTest) -> str:
    return "\n".join(str(e.value) for e in at.html)


def steps(at: AppTest) -> list[dict[str, Any]]:
    """The steps of plans that are drawn in time."""
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_streams")
    return list(json.loads(drawn.json)["plans"])


def test_up_to_four_plans_from_the_address() -> None:
    at = open_page("compare", compare="best,megatron-lm,fsdp,data-parallel")
    assert not at.exception
    assert len(at.multiselect(key="w_compare").value) == len(steps(at)) == 4
    assert tables(at).count("<th") >= 5
    at = open_page("compare", compare="best,best,nobodys")  # one of them, with what it is compared with at first
    assert not at.exception and len(at.multiselect(key="w_compare").value) == 2
    assert "no plan “nobodys”" in at.warning[0].value


def test_the_first_two_plans_are_those_that_the_first_page_compares() -> None:
    """It opened on FSDP and Megatron-LM, where the first page's sentence is about FSDP and the best plan."""
    sentence = next(m.value for m in open_page("overview").markdown if " takes " in m.value)
    result = planned(Request("llama-3-8b", cluster="2x8-h100"))
    plans = {recipe.layout_name(p): n for n, p in plan_ids(result.plans).items()}
    one, other = re.fullmatch(r"(.*) takes .* than (.*), within the doubt: .*", sentence.replace("\\", "")).groups()
    assert open_page("compare").multiselect(key="w_compare").value == [plans[one], plans[other]]


def test_the_row_of_the_difference_names_its_two_plans() -> None:
    """It read “difference” below the last of three plans, and was that of the third from the first."""
    at = open_page("compare", compare="fsdp,megatron-lm,best")
    row = tables(at).split("<tr class='difference'>")[1]
    assert re.match(r"<th scope='row' colspan='2'>(Best plan|Megatron-LM) against FSDP</th>", row), row


def test_the_unit_of_a_row_stands_at_its_sum() -> None:
    for row in tables(open_page("compare")).split("<table class='steps'")[1].split("<tbody>")[1].split("</tr>")[:3]:
        assert re.findall(r"[\d>] (m?s)\b", re.sub(r" title='[^']*'", "", row)) == ["ms"], row


def test_every_step_that_is_proven_says_so() -> None:
    """Of four plans three were proven, and the best one's row alone said it."""
    at = open_page("compare", compare="fsdp,megatron-lm,best,trade-off-2")
    rows = tables(at).split("<table class='steps'")[1].split("<tbody>")[1].split("</tr>")[:4]
    assert ["<small>proven</small>" in row for row in rows] == [True, True, True, False], rows


def test_the_list_of_plans_does_not_offer_to_take_all() -> None:
    """“Select all” took the first four of eleven."""
    assert not open_page("compare").multiselect(key="w_compare").proto.select_all


def test_rows_that_differ_and_all_rows() -> None:
    at = open_page("compare", compare="best,megatron-lm")
    few = tables(at).count("<tr>")
    at = open_page("compare", compare="best,megatron-lm", rows="all")
    assert not at.exception
    assert tables(at).count("<tr>") > few


def test_candidates_of_which_none_fits_are_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chart of points that all lie above the line of memory would hide that none of them can be run."""
    at = open_page("plans", tab="block", layers="2")
    assert at.get("plotly_chart") and not at.info
    monkeypatch.setattr(step_parts, "memory_limit_bytes", lambda result: 10**9)
    at.run()
    assert not at.exception and not at.get("plotly_chart")
    assert any(m.value.startswith("No candidate fits: ") for m in at.info)


def test_every_weight_of_a_single_plan_is_listed() -> None:
    """Alone it differs from none: it must not be said that all weights lie the same way."""
    at = open_page("plans", layers="2")
    at.session_state["every_weight"] = True
    at.run()
    assert not at.exception
    assert not any("lie the same way" in c.value for c in at.caption)
    assert "lm_head.weight" in tables(at)


@pytest.mark.parametrize("method", ["tap", *(pytest.param(m, marks=pytest.mark.slow) for m in ("taps", "atp"))])
@pytest.mark.slow(but=("atp",))
def test_what_a_method_costs(method: str) -> None:
    at = open_page("compare", model="gpt2-xl", rungs=method)
    assert not at.exception
    assert f"{method.upper()} takes" in markdown(at)
    assert "nothing is forbidden" in tables(at)


@pytest.mark.parametrize("method", ["taps", "alpa"])
def test_the_first_row_of_what_a_method_costs_is_the_best_plan(method: str) -> None:
    """Where the GPU waits for its host, the rows below found other plans than the planner, and others for each method."""
    at = open_page("compare", model="gpt2-xl", cluster="2x8-h100", layers="2", rungs=method)
    assert not at.exception
    first = tables(at).split("nothing is forbidden, least step time")[1].split("</tr>")[0]
    best = planned(Request("gpt2-xl", cluster="2x8-h100", layers=2)).searched.cost
    assert best.host_wait_s and f">{units.seconds(best.step_time_s)}<" in first
    assert f">{units.seconds(best.comm_time_s)}<" in first


@pytest.mark.slow
def test_a_pin_from_another_cluster_is_drawn_with_its_own_graph() -> None:
    """The bars of a pinned plan's step add up to its own simulated step, not to that of its layout at the page's batch."""
    at = open_page("compare", compare="best@,best@cluster:1x8-h100;batch:8;seq:1024")
    assert not at.exception
    there = planned(Request("llama-3-8b", cluster="1x8-h100", batch=8, seq=1024))
    plan = steps(at)[1]
    assert plan["told"] == units.seconds(there.best.cost.step_time_s)
    simulated_s = simulate_step(there.best, there.graph)
    assert sum(w[4] for w in plan["works"] if w[0] == 1) == pytest.approx(simulated_s)
