"""Compare and Topology in Streamlit's own test runner: every control writes the address, and the address sets every control."""

from __future__ import annotations

import json
import re

import pytest

from explorer.text import units
from planner_core.planning.request import Request
from tests.pages.test_app import open_page, words
from tests.support.app_test import AppTest
from tests.support.plans import searched


def markdown(at: AppTest) -> str:
    return "\n".join(m.value for m in at.markdown)


def tables(at: AppTest) -> str:
    return "\n".join(str(e.value) for e in at.html)


def test_up_to_four_plans_from_the_address() -> None:
    at = open_page("compare", compare="best,megatron-lm,fsdp,data-parallel")
    assert not at.exception
    assert len(at.multiselect(key="w_compare").value) == 4
    assert "All 16 GPUs do the same" in words(at)
    assert tables(at).count("<th") >= 5
    at = open_page("compare", compare="best,best,nobodys")  # one of them, with what it is compared with at first
    assert not at.exception and len(at.multiselect(key="w_compare").value) == 2
    assert "no plan “nobodys”" in at.warning[0].value


def test_days_and_money_stand_beside_every_step() -> None:
    """Days and cost of 1e9 tokens, which are set on the page itself, follow from the tokens per second in the same row:
    `tokens / (per GPU · GPUs)` seconds."""
    at = open_page("compare", model="gpt2-xl", price="2")
    next(w for w in at.text_input if w.label == "Tokens to train on").set_value("1B").run()
    assert not at.exception
    table = next(str(e.value) for e in at.html if "how fast each plan trains" in str(e.value))
    assert "days for 1.00 B tokens" in table
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert len(rows) == 2
    for _, _, per_gpu, _, days, cost in rows:
        tokens_per_day = float(per_gpu.replace("\u202f", "")) * 16 * 86_400
        assert float(days.removesuffix(" days").replace("\u202f", "")) == pytest.approx(1e9 / tokens_per_day, rel=0.01)
        assert float(cost.replace("\u202f", "")) == pytest.approx(2 * 24 * 16 * 1e9 / tokens_per_day, abs=0.51)


def test_rows_that_differ_and_all_rows() -> None:
    at = open_page("compare", compare="best,megatron-lm")
    few = tables(at).count("<tr>")
    at = open_page("compare", compare="best,megatron-lm", rows="all")
    assert not at.exception
    assert tables(at).count("<tr>") > few
    assert "All weights" in markdown(at)


@pytest.mark.parametrize("method", ["tap", *(pytest.param(m, marks=pytest.mark.slow) for m in ("taps", "atp"))])
def test_what_a_method_costs(method: str) -> None:
    at = open_page("compare", model="gpt2-xl", rungs=method)
    assert not at.exception
    assert f"{method.upper()}’s plan takes" in markdown(at)
    assert "nothing is forbidden" in tables(at)


@pytest.mark.slow
def test_other_links_from_the_address() -> None:
    at = open_page("topology", bandwidth="1,0.25", latency="2,1")
    assert not at.exception
    assert at.select_slider(key="w_bandwidth_1").value == "0.25"
    assert at.select_slider(key="w_latency_0").value == "2"
    assert "best plan for the links as set" in tables(at)
    assert "Planning anew for these links" in markdown(at)


def test_a_slider_writes_the_address_and_back_at_one_leaves_it() -> None:
    at = open_page("topology", model="gpt2-xl", layers="2")
    assert "links as set" not in tables(at)
    at.select_slider(key="w_bandwidth_1").set_value("0.125").run()
    assert not at.exception
    assert at.query_params["bandwidth"] == "1,0.125"
    at.select_slider(key="w_bandwidth_1").set_value("1").run()
    assert "bandwidth" not in at.query_params


def test_another_cluster_forgets_the_links() -> None:
    at = open_page("topology", model="gpt2-xl", layers="2", bandwidth="1,0.25")
    at.selectbox(key="w_cluster").set_value("1x8-h100").run()
    assert not at.exception
    assert "bandwidth" not in at.query_params


def test_volume_stands_beside_topology() -> None:
    at = open_page("topology")
    assert "least bytes, links unseen" in tables(at)
    assert "Bytes are not time" in markdown(at) or "within the estimate" in markdown(at)


def test_growing_from_the_address() -> None:
    at = open_page("topology", model="gpt2-xl", layers="2", grow="2x8-h100", grow_batch="per-gpu")
    assert not at.exception
    assert "tensor parallelism" in markdown(at)
    assert "1\u202f024" in tables(at)


@pytest.mark.parametrize(
    ("key", "text"),
    [("bandwidth", "fast"), ("latency", "1,0"), ("grow", "nowhere"), ("rungs", "magic"), ("rows", "none")],
)
def test_nonsense_in_the_address_is_told(key: str, text: str) -> None:
    at = open_page("topology" if key != "rows" else "compare", **{key: text})
    assert not at.exception
    assert any(key in w.value for w in at.warning)


def test_a_pin_from_another_cluster_is_drawn_with_its_own_graph() -> None:
    """The bars of a pinned plan's step add up to its own step time, not to that of its layout at the page's batch."""
    at = open_page("compare", compare="best@,best@cluster:1x8-h100;batch:8;seq:1024")
    assert not at.exception
    there = searched(Request("llama-3-8b", cluster="1x8-h100", batch=8, seq=1024))
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_streams")
    plan = json.loads(drawn.json)["plans"][1]
    assert plan["told"] == units.seconds(there.cost.step_time_s)
    assert sum(w[4] for w in plan["works"] if w[0] == 1) == pytest.approx(there.cost.step_time_s)
    assert "All GPUs of a plan do the same" in words(at)


@pytest.mark.parametrize("kind", ["params", "activations"])
def test_a_bar_of_memory_opens_to_the_nodes_that_hold_it(kind: str) -> None:
    at = open_page(
        "compare", model="gpt2-xl", cluster="1x8-h100", layers="2", setup="dp=8", held=f"our-current-setup,{kind}"
    )
    assert not at.exception
    assert "of Our current setup: " in words(at) and "on one GPU at the peak" in words(at)
    assert not at.button(key="let_go").click().run().exception
    assert "on one GPU at the peak" not in words(at)
