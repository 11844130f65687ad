"""Figures of Compare and Topology: their numbers are the plans' own, and nothing is told by colour alone."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from explorer.analysis import differences, streams
from explorer.analysis.step_parts import memory_limit_bytes
from explorer.figures import compare as charts
from explorer.figures import topology
from explorer.figures.palette import DARK, LIGHT, WORK, Theme
from explorer.figures.style import LIMIT_WORDS
from explorer.text import units, words
from planner_core.core import PHASES, NoteKind, Plan
from planner_core.cost import simulate_step
from planner_core.cost.communication import bytes_between_gpus, sent_per_gpu
from planner_core.planning.analysis import ablation_steps, step_work
from planner_core.planning.analysis.ablation import DESCRIPTIONS
from planner_core.planning.pipeline import Result, plan_model
from planner_core.planning.request import Request
from tests.support.plans import planned, with_pairs

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def result() -> Result:
    return planned(Request("llama-3-8b"))


@pytest.fixture(scope="module")
def plans(result: Result) -> dict[str, Plan]:
    return {p.name: p for p in result.plans}


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_bars_hold_the_plans_numbers(result: Result, plans: dict[str, Plan], theme: Theme) -> None:
    stacks = charts.memory_bars(plans, theme, {n: memory_limit_bytes(result) for n in plans})
    drawn = sum(t.x[0] for t in stacks.data if t.type == "bar") * units.GIB
    kinds = ("params", "grads", "optimizer", "activations", "buffers")
    assert drawn == pytest.approx(sum(result.best.cost.memory_bytes[k] for k in kinds))
    assert any(LIMIT_WORDS in a.text for a in stacks.layout.annotations)
    bars = charts.collectives_bars(plans, theme)
    assert sum(t.x[0] for t in bars.data) * 1e9 == pytest.approx(sum(t.wire_bytes for t in result.best.cost.traffic))
    longest = max(x for t in bars.data for x in t.x)
    visible = {t.name for t in bars.data if max(t.x) >= charts.MIN_NAMED_SHARE * longest}
    named = [name for name, _, _ in charts.collective_keys(plans, theme)]
    assert set(named) == visible and len(named) == len(visible), (
        "a name for each bar that can be seen, and for no other"
    )
    assert {axis.matches for axis in bars.select_xaxes()} <= {None, "x"}, "the phases have one scale"
    assert sum(axis.matches is None for axis in bars.select_xaxes()) == 1
    drawn_as = {(t.name, t.marker.color, dict(charts.PATTERNS)[t.marker.pattern.shape]) for t in bars.data}
    assert set(charts.collective_keys(plans, theme)) <= drawn_as, "the legend has the bars' colours and patterns"
    assert {(t.name, t.marker.color, "") for t in stacks.data if t.type == "bar" and any(t.x)} == set(
        charts.memory_keys(plans)[:-1]
    )
    assert stacks.layout.height == bars.layout.height and stacks.layout.bargap == bars.layout.bargap, "rows are level"


def test_the_streams_drawn_are_the_steps_work(result: Result, plans: dict[str, Plan]) -> None:
    two = {n: plans[n] for n in ("best", "Megatron-LM")}
    steps = {n: step_work(p, result.graph) for n, p in two.items()}
    drawn = streams.build_streams(steps, two, WORK)
    kinds = [k["told"] for k in drawn["kinds"]]
    exposed = [i for i, told in enumerate(kinds) if told.startswith("exposed")]
    assert json.loads(json.dumps(drawn)) == drawn
    for shown, plan in zip(drawn["plans"], two.values(), strict=True):
        compute = [w for w in shown["works"] if w[0] == shown["lanes"].index("compute")]
        step_s, cost = simulate_step(plan, result.graph), plan.cost
        assert sum(w[4] for w in compute) == pytest.approx(step_s) == shown["step_s"]
        exposed_s = step_s - cost.compute_time_s - cost.optimizer_time_s - cost.outside_time_s
        assert sum(w[4] for w in compute if w[1] in exposed) == pytest.approx(exposed_s)
        assert shown["told"].startswith(units.seconds(step_s)) and shown["told"].endswith(
            units.seconds(cost.step_time_s)
        )
        waits = [drawn["words"][w[6]] for w in compute if kinds[w[1]] == "exposed, the GPU waits"]
        assert waits and all("wait" in note for note in waits)
        assert any(drawn["words"][w[5]] == "self_attn.q_proj/linear" for w in compute)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_drawing_shows_every_gpu_and_every_pair_that_talks(result: Result, theme: Theme) -> None:
    svg = topology.cluster_svg(result.best, theme, result.plans)
    root = ElementTree.fromstring(svg)
    titles = [str(t.text) for t in root.iter(f"{SVG}title")]
    assert sum(bool(re.match(r"GPU \d+ sends", t)) for t in titles) == 16
    matrix = bytes_between_gpus(result.best, result.cluster, PHASES)
    inside = [(i, j) for i in range(16) for j in range(i) if i // 8 == j // 8 and matrix[i, j] + matrix[j, i]]
    assert len(list(root.iter(f"{SVG}path"))) == len(inside)
    assert not list(root.iter(f"{SVG}script"))


def test_the_parts_of_what_a_gpu_sends_add_up_to_the_sum_of_its_row(plans: dict[str, Plan]) -> None:
    """As on each link of the drawing: what goes on to another node is not counted inside as well."""
    plan = plans["FSDP"]
    matrix = bytes_between_gpus(plan, plan.cluster, PHASES)
    beyond = matrix[:8, 8:].sum() / 8
    near, far = units.traffic(matrix[0].sum() - beyond), units.traffic(beyond)
    assert beyond > 0
    svg = topology.cluster_svg(plan, LIGHT)
    assert f": {near} per GPU<" in svg
    assert f"<title>{units.traffic(8 * beyond)} out of each node</title>" in svg and f": {far} per GPU<" in svg


def test_a_box_is_a_host_of_several_levels(plans: dict[str, Plan]) -> None:
    """Pairs of GPUs in hosts of eight were drawn as eight nodes, with PCIe as a network beside InfiniBand."""
    pairs = topology.cluster_svg(replace(plans["FSDP"], cluster=with_pairs("2x8-h100")), LIGHT)
    assert ": 2 nodes of 8 GPUs" in pairs and ">NVLink and PCIe: " in pairs and ">InfiniBand: " in pairs
    rack = replace(plans["FSDP"].cluster, gpus_per_node=4)
    assert ": 2 racks of 8 GPUs" in topology.cluster_svg(replace(plans["FSDP"], cluster=rack), LIGHT)


def test_waits_by_weight_add_up_to_the_exposed_communication(result: Result, plans: dict[str, Plan]) -> None:
    rows = differences.compare_weights(plans, dict.fromkeys(plans, result.graph))
    for name, plan in plans.items():
        assert sum(r.waits_s[name] for r in rows) == pytest.approx(plan.cost.exposed_comm_time_s, rel=1e-9, abs=1e-12)
    assert rows[-1].weight == differences.NO_WEIGHT


def test_rows_are_every_weight_once_and_say_which_differ(result: Result, plans: dict[str, Plan]) -> None:
    two = {n: plans[n] for n in ("data parallel", "FSDP")}
    rows = differences.compare_weights(two, dict.fromkeys(two, result.graph))
    assert sum(r.copies for r in rows[:-1]) == len(result.graph.parameters())
    assert any("lm_head" in r.weight for r in rows if not r.same)
    assert all((r.placements["data parallel"] == r.placements["FSDP"]) == r.same for r in rows[:-1])
    same = differences.compare_weights({"a": plans["FSDP"], "b": plans["FSDP"]}, {"a": result.graph, "b": result.graph})
    assert all(r.same for r in same)


def test_what_a_method_costs_is_told_with_its_reason(plans: dict[str, Plan]) -> None:
    plan = plans["FSDP"]

    def describe(*shares: float) -> str:
        costs = [replace(plan.cost, step_time_s=share * plan.cost.step_time_s) for share in shares]
        says = ("forbids nothing", "keeps weights whole", "counts bytes")
        return words.describe_restrictions(
            "TAP", [(s, replace(plan, cost=c)) for s, c in zip(says, costs, strict=True)]
        )

    assert describe(1, 1.1, 1.6).startswith("TAP takes 60 % more step time")
    assert "Most of it because it counts bytes" in describe(1, 1.1, 1.6)
    # A row that costs more than the whole method explains nothing: the next one takes some of it back.
    text = describe(1, 2, 1.6)
    assert "because it" not in text and "may be shorter than in the row above" in text
    # Seconds are no bytes: the sentence said “16 % more communication” above a table of 32.6 GB against 42.3 GB.
    best = replace(plans["data parallel"], cost=replace(plans["data parallel"].cost, comm_time_s=1.0))
    slow = replace(plan, cost=replace(plan.cost, comm_time_s=1.16))
    text = words.describe_restrictions("TAPS", [("forbids nothing", best), ("counts bytes", slow)])
    sent, against = (units.traffic(sent_per_gpu(p)) for p in (plan, best))
    assert (
        sent != against
        and f" and 16 % more time in communication against the best plan; a GPU sends {sent} against {against}." in text
    )
    assert f"; a GPU sends {sent} in both." in describe(1, 1.1, 1.6)
    only = words.describe_restrictions("TAP", [(DESCRIPTIONS["exact"], None)])
    assert "No plan fits" in only


def test_a_row_of_what_a_method_costs_says_how_far_from_proven_it_is() -> None:
    """The row of least communication was “not proven: at most 7.6 %” by the command line, and said nothing here."""
    steps = ablation_steps(plan_model(Request("llama-3-8b", layers=2), passes={}).planner, "tap")
    least = next(s.plan for s in steps if s.plan is not None)
    assert not least.optimal
    (note,) = (n.sentence for n in least.notes if n.kind is NoteKind.GAP)
    assert words.describe_proof(least) == note and note.startswith("not proven: at most")
    assert words.describe_proof(replace(least, optimal=True)) == "yes"
    goal, later = steps[0], replace(steps[1], plan=replace(least, notes=least.notes))
    assert words.describe_proof(later.called(goal).plan) == "no", "its bound is that of a smaller space"
    for is_proven in (True, False):
        said = words.describe_restrictions(
            "TAP", [(s.says, s.plan and replace(s.plan, optimal=is_proven)) for s in steps]
        )
        assert ("not proven" in said) != is_proven


# --- plans that were pinned on another cluster, at another batch ---------------------------------------------


@pytest.fixture(scope="module")
def far() -> Result:
    return planned(Request("llama-3-8b", cluster="1x8-h200", batch=8, seq=1024))


def lines(figure: object) -> list[float]:
    return [s.x0 * units.GIB for s in figure.layout.shapes]  # type: ignore[attr-defined]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_each_bar_has_the_line_of_its_own_gpu(result: Result, far: Result, theme: Theme) -> None:
    here, there = memory_limit_bytes(result), memory_limit_bytes(far)
    assert here != there
    both = charts.memory_bars({"a": result.best, "b": far.best}, theme, {"a": here, "b": there})
    assert lines(both) == pytest.approx([here, there])
    assert [s.y0 < k < s.y1 for k, s in enumerate(both.layout.shapes)] == [True, True]
    told = [a.text for a in both.layout.annotations]
    assert {f"{LIMIT_WORDS} {units.memory(m)}" for m in (here, there)} <= set(told)
    alone = charts.memory_bars({"a": far.best, "b": far.best}, theme, {"a": there, "b": there})
    assert lines(alone) == pytest.approx([there])


def test_a_plan_is_drawn_on_its_own_cluster(result: Result, far: Result) -> None:
    svg = ElementTree.fromstring(topology.cluster_svg(far.best, LIGHT, [result.best, far.best], per_row=2))
    titles = [str(t.text) for t in svg.iter(f"{SVG}title")]
    assert sum(bool(re.match(r"GPU \d+ sends", t)) for t in titles) == 8


def test_steps_of_other_batches_are_told_by_the_sample(result: Result, far: Result) -> None:
    def told(seq: int, size: int) -> None:
        there = replace(far.best, workload=replace(far.best.workload, seq=seq))
        said = words.compare_steps(result.best, there)
        of = "sample" if seq == result.workload.seq else "token"
        assert f"a {of}" in said and "a step" not in said
        own = result.workload.batch * (1 if of == "sample" else result.workload.seq)
        for seconds in (result.best.cost.step_time_s / own, far.best.cost.step_time_s / size):
            assert units.seconds(seconds) in said

    told(result.workload.seq, 8)
    told(1024, 8 * 1024)
    assert " a " not in words.compare_steps(result.best, result.plans[-1]).partition(".")[0], "the table has both steps"
