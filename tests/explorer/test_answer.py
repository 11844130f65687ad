"""The first page's figures and words: parts that add up, the strongest rival, the recipe, and the ways out."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.address import settings
from explorer.address.amounts import format_tokens
from explorer.analysis import remedies, rows, shortlist, step_parts
from explorer.text import commands, recipe, tables
from planner_core.core import Cluster, Plan, Unreadable, load_cluster, parse_tokens
from planner_core.planning import Request, Result, plan_ids, plan_model
from planner_core.planning.analysis import step_work
from planner_core.planning.methods import BASELINES
from tests.support.plans import planned, with_pairs

QUICK = Request("gpt2-xl", cluster="1x8-h100", layers=4)
WIDE = Request("llama-3-8b", cluster="2x8-h100", layers=2)


@pytest.fixture(scope="module", params=[QUICK, WIDE], ids=["one node", "two nodes"])
def result(request: pytest.FixtureRequest) -> Result:
    return planned(request.param)


def shown(result: Result) -> tuple[step_parts.RoundedSteps, dict[str, Plan], str]:
    plans = plan_ids(result.plans)
    parts = {n: step_parts.split_step(p, result.graph, result.coarse) for n, p in plans.items()}
    best = next(iter(plans))
    return step_parts.round_steps(parts, best), plans, best


def test_recomputation_is_a_part_of_its_own() -> None:
    asked = Request("gpt2-xl", cluster="1x8-h100", layers=4)
    plain, again = (plan_model(replace(asked, recompute=r), passes={}) for r in ("none", "full"))
    for result, recomputes in ((plain, False), (again, True)):
        parts = step_parts.split_step(result.best, result.graph)
        assert (parts[step_parts.RECOMPUTATION] > 0) == recomputes
        assert ("full recomputation" in recipe.describe_plan(result.best)) == recomputes


def test_what_is_read_adds_up(result: Result) -> None:
    found, plans, best = shown(result)
    for name, plan in plans.items():
        unit = (1.0 if found.name == "s" else 1e-3) / 10**found.places
        assert found.total(name) == round(plan.cost.step_time_s / unit)
        differences = found.subtract(best, name)
        apart_s = plan.cost.step_time_s - plans[best].cost.step_time_s
        assert sum(differences.values()) == round(apart_s / unit)
        assert all(
            abs(differences[p] - (found.exact[name][p] - found.exact[best][p]) * 10**found.places) <= 1
            for p in differences
        )


def test_figures_have_three_digits_however_close_the_rival_is() -> None:
    """FSDP and Megatron-LM's layout of Llama-3-8B stood as 558.3 and 552.1 ms, a digit that no prediction has."""
    parts = {
        "a": {step_parts.COMPUTE: 0.4992, step_parts.WAITS: 0.0591},
        "b": {step_parts.COMPUTE: 0.5015, step_parts.WAITS: 0.0506},
    }
    found = step_parts.round_steps(parts, "a")
    assert [found.text(found.total(n)) for n in parts] == ["558 ms", "552 ms"]


def test_a_difference_is_rounded_once() -> None:
    """Steps of 515.2 and 543.6 ms stood as 515 and 544, and 28.4 ms between them as 29."""
    found = step_parts.round_steps(
        {"a": {step_parts.COMPUTE: 0.5152}, "b": {step_parts.COMPUTE: 0.5436}, "c": {step_parts.COMPUTE: 0.5150}}, "a"
    )
    assert [found.subtract("a", n)[step_parts.COMPUTE] for n in "abc"] == [0, 28, 0]
    assert found.subtract("b", "a")[step_parts.COMPUTE] == -28


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), st.sampled_from([1e-3, 0.1, 1.0, 7.0]))
def test_rounded_parts_add_up_to_the_rounded_sum(values: list[float], quantum: float) -> None:
    parts = {str(i): v for i, v in enumerate(values)}
    rounded = step_parts.apportion(parts, quantum)
    assert sum(rounded.values()) == round(sum(values) / quantum)
    assert all(abs(rounded[k] - v / quantum) <= 1 for k, v in parts.items())


def test_a_plan_is_measured_against_the_strongest_other(result: Result) -> None:
    """The best plan of Llama-3-70B on 64 GPUs stood as 17 % less than Megatron-LM's; FSDP takes 2.6 % more."""
    plans = plan_ids(result.plans)
    listed = shortlist.shortlist(plans, result.choice, "")
    steps = {one.name: plans[one.name].cost.step_time_s for one in listed if plans[one.name].fits}
    recommended = listed[0].name
    against = {n: shortlist.choose_opponent(plans, listed, n) for n in steps}
    assert all(other == recommended for n, other in against.items() if n != recommended)
    usual = {n: t for n, t in steps.items() if n != recommended and plans[n].method in BASELINES}
    fastest = min(steps, key=lambda n: steps[n])
    assert against[recommended] == (fastest if fastest != recommended else min(usual, key=lambda n: usual[n]))


def test_a_cause_names_the_part_that_differs_most_and_both_sides() -> None:
    mine = {
        step_parts.COMPUTE: 50,
        step_parts.RECOMPUTATION: 0,
        step_parts.WAITS: 30,
        step_parts.WEIGHTS: 5,
        step_parts.OPTIMIZER: 10,
        step_parts.BUBBLE: 0,
        step_parts.HOST: 0,
    }
    other = {
        step_parts.COMPUTE: 70,
        step_parts.RECOMPUTATION: 0,
        step_parts.WAITS: 20,
        step_parts.WEIGHTS: 5,
        step_parts.OPTIMIZER: 11,
        step_parts.BUBBLE: 0,
        step_parts.HOST: 0,
    }
    told = step_parts.explain_difference(step_parts.RoundedSteps("ms", 0, {"a": mine, "b": other}), "a", "b")
    assert told == "compute −20, waits +10, others −1 ms"


def test_the_parts_of_a_difference_add_up_to_it() -> None:
    """It said “recomputation +35 ms, waits −7 ms” of two steps that are 21 ms apart, and left small parts out without a word."""
    nothing = dict.fromkeys(step_parts.ALL_PARTS, 0)
    small = {step_parts.COMPUTE: 3, step_parts.WEIGHTS: 2, step_parts.OPTIMIZER: 2}
    steps = {"a": nothing | {step_parts.RECOMPUTATION: 35}, "b": nothing | {step_parts.WAITS: 7} | small}
    told = step_parts.explain_difference(step_parts.RoundedSteps("ms", 0, steps), "a", "b")
    assert told == "recomputation +35, waits −7, others −7 ms"
    steps["b"] = steps["b"] | {step_parts.COMPUTE: -2, step_parts.WEIGHTS: 2, step_parts.OPTIMIZER: 0}
    told = step_parts.explain_difference(step_parts.RoundedSteps("ms", 0, steps), "a", "b")
    assert told == "recomputation +35, waits −7 ms", "what is left takes nothing in sum"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("data-parallel", r"data parallel over 8,"),
        ("fsdp", r"FSDP over 8,"),
        ("megatron", r"tensor parallel \d(,| with)"),
    ],
)
def test_a_recipe_speaks_as_the_tools_do(method: str, said: str) -> None:
    result = planned(Request("llama-3-8b", cluster="1x8-h100", layers=2))
    plan = next(p for p in result.plans if p.method == method)
    assert re.search(said, recipe.describe_plan(plan)), recipe.describe_plan(plan)
    assert recipe.describe_plan(plan).endswith("1 micro-batch, no recomputation")


def test_sequence_parallelism_is_said_of_the_plan_that_has_it() -> None:
    result = planned(Request("llama-3-8b", cluster="1x8-h100", layers=2))
    found = {p.method: "with sequence parallelism" in recipe.describe_plan(p) for p in result.plans}
    assert found["megatron-sp"] and not found["megatron"] and not found["fsdp"]


@pytest.mark.parametrize(
    ("text", "tokens"), [("15T", 15e12), ("300 b", 300e9), ("1e12", 1e12), ("2.5M", 2.5e6), ("7", 7.0)]
)
def test_tokens_are_read_as_people_write_them(text: str, tokens: float) -> None:
    assert parse_tokens(text) == tokens
    assert parse_tokens(format_tokens(tokens)) == tokens


@pytest.mark.parametrize("text", ["", "many", "-1T", "1e99", "0"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_tokens(text)


def values(**changes: Any) -> dict[str, Any]:
    return {k: s.default for k, s in settings.SETTINGS.items()} | changes


def test_ways_out_start_where_they_may_do_and_can_be_asked_for() -> None:
    """302 GiB where 73 are: halving the batch or doubling the GPUs at most halves, so four times is the least."""
    here = values(model="llama-3-70b", cluster="1x8-h100", batch=64, accumulate=1, recompute="none")
    found = remedies.remedy_ladders(here, load_cluster("1x8-h100"), 4.12)
    told = {way.words: dict(way.changes) for ladder in found for way in ladder}
    assert told["Batch 8 instead of 64"] == {"batch": 8}
    assert told["64 GPUs instead of 8"]["nodes"] == 8
    assert not any(text.startswith(("16 GPUs", "Batch 32")) for text in told), "half is too little"
    for way in (way for ladder in found for way in ladder):
        asked = settings.build_request({**here, **way.changes})
        assert load_cluster(asked.cluster).num_gpus >= 8
        again, problems = settings.parse_query(settings.to_query({**here, **way.changes}))
        assert not problems and settings.build_request(again) == asked


def test_moments_in_the_hosts_memory_are_a_way_out_once() -> None:
    """Where they are on the GPU, the optimizer has moments, and the GPU's link to the host is known."""
    cluster = load_cluster("1x8-h100")
    words = "Keep the optimizer’s moments in the host’s memory"
    unknown = replace(cluster, gpu=replace(cluster.gpu, host=None))

    def offered(there: Cluster = cluster, **changes: Any) -> bool:
        here = values(model="llama-3-70b", cluster="1x8-h100", batch=64, **changes)
        return words in [way.words for ladder in remedies.remedy_ladders(here, there, 1.5) for way in ladder]

    assert offered() and not offered(moments="host") and not offered(optimizer="sgd") and not offered(unknown)
    asked = settings.build_request(values(moments="host"))
    assert asked.offload and "--offload" in commands.plan_command(asked, "plan.json").split()
    assert "--offload" not in commands.plan_command(settings.build_request(values()), "plan.json")


def test_a_smaller_batch_is_half_of_the_one_that_is_planned() -> None:
    """Nobody set it, so it goes with the GPUs: 64 samples on 64 of them, and not the 16 of the model."""
    here = values(model="llama-3-8b", cluster="8x8-h100", accumulate=1)
    assert settings.batch_and_tokens(here)[0] == 64
    alone = values(cluster="1x4-a100-pcie")  # of more such nodes no network is known
    found = remedies.remedy_ladders(alone, load_cluster("1x4-a100-pcie"), 3.8)
    instead = [way for ladder in found for way in ladder if "cluster" in way.changes]
    assert [way.changes["cluster"] for way in instead] == ["2x8-h100", "4x8-a100", "8x8-h100"], instead
    assert instead[0].words == "2 nodes × 8 H100 instead of 1 node × 4 A100" and instead[0].changes["gpu"] is None
    found = remedies.remedy_ladders(here, load_cluster("8x8-h100"), 1.5)
    assert next(way.changes["batch"] for ladder in found for way in ladder if "batch" in way.changes) == 32


def test_one_host_of_several_levels_has_no_network() -> None:
    """Its PCIe counted as a network, so more of its nodes were looked for, and no other cluster was offered."""
    host = with_pairs("1x8-h100")
    found = remedies.remedy_ladders(values(model="llama-3-8b", cluster="1x8-h100"), host, 1.5)
    told = [way.words for ladder in found for way in ladder if "cluster" in way.changes]
    assert "2 nodes × 8 H100 instead of 1 node × 8 H100" in told


def test_a_budget_below_the_gpus_memory_can_be_lifted() -> None:
    found = remedies.remedy_ladders(values(memory=4.0), load_cluster("2x8-h100"), None)
    assert found[0][0].changes == {"memory": None}
    assert not any("instead of H100" in way.words for ladder in found for way in ladder)


def test_what_is_drawn_leaves_as_rows(result: Result) -> None:
    """CSV and JSON hold the same rows, and the rows hold the plans' own numbers."""
    plans = plan_ids(result.plans)
    made = rows.plan_rows(plans, dict.fromkeys(plans, result))
    read = list(csv.DictReader(io.StringIO(tables.csv_text(made))))
    again = json.loads(tables.json_text(made))
    assert [r["plan"] for r in read] == [r["plan"] for r in again] == list(plans)
    for row, same, plan in zip(read, again, plans.values(), strict=True):
        assert float(row["step_time_s"]) == same["step_time_s"] == plan.cost.step_time_s
        assert int(row["peak_bytes"]) == plan.cost.memory_bytes["peak"]
        parts = ("gpu_compute_s", "host_wait_s", "exposed_communication_s", "optimizer_time_s", "outside_time_s")
        assert sum(same[p] for p in parts) == pytest.approx(same["step_time_s"]), "no part holds another"
        assert same["fits"] == (same["peak_bytes"] <= same["memory_limit_bytes"])
        assert same["peak_bytes"] <= same["reserved_low_bytes"] <= same["reserved_high_bytes"]
        assert same["bound_value"] == min(plan.bound, plan.cost.gpu_time_s) and (
            same["optimizer"],
            same["precision"],
        ) == ("adamw", "mixed")
    for found in result.candidates:
        drawn = rows.candidate_rows(found)
        assert len(drawn) == int((np.isfinite(found.comm_s) & np.isfinite(found.memory_bytes)).sum())
    work = step_work(result.best, result.graph)
    made = rows.work_rows({"best": work}, {"best": result.best})
    assert [r["seconds"] for r in made] == [w.seconds for w in work]
