"""Plans with pipeline stages as the pages show them: their name, their step by rank, who sends to whom, the marks in the graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from explorer.address import setups
from explorer.analysis import differences, rows, step_parts, streams
from explorer.analysis.shortlist import ListedPlan, choose_opponent
from explorer.components.overview import table
from explorer.figures.palette import WORK
from explorer.graph.modules import group_by_module
from explorer.graph.scene import build_scene
from explorer.graph.stripes import node_stages
from explorer.text import recipe, units, words
from planner_core.core import PHASES, InputError, Plan
from planner_core.cost import simulated_pipeline
from planner_core.cost.communication import bytes_between_gpus, sent_per_gpu
from planner_core.planning import Planner, Request, plan_ids, plan_model, prepare_planner
from planner_core.planning.analysis import step_work
from planner_core.planning.analysis.legend import exposed_and_bubble
from planner_core.planning.methods import parse_layout
from tests.support.plans import planned


@pytest.fixture(scope="module", params=["dp=2,tp=4,pp=2", "dp=4,pp=4,vp=2", "dp=8,pp=2,schedule=zb"])
def staged(request: pytest.FixtureRequest) -> tuple[Planner, Plan]:
    asked = Request("bert-large", "2x8-h100", layers=8, batch=64, accumulate=8, layout=request.param)
    planner = prepare_planner(asked)
    return planner, planner.stated(parse_layout(request.param))


def test_a_name_says_the_stages_the_order_and_the_bubble_of_the_table(staged: tuple[Planner, Plan]) -> None:
    planner, plan = staged
    cut, cost = plan.pipeline, plan.cost.pipeline
    assert cut and cost
    assert recipe.layout_name(plan).startswith(f"PP {cut.ranks} × ")
    assert len(recipe.layout_name(plan)) <= recipe.MAX_NAME_LENGTH
    table = exposed_and_bubble(plan)[1]
    assert cost.bubble_s == step_parts.split_step(plan, planner.graph)[step_parts.BUBBLE] == table
    share = 100 * table / plan.cost.step_time_s
    (told,) = [t for t in recipe.describe_extra_work(plan).split("; ") if t.startswith("bubble ")]
    assert float(told.removeprefix("bubble ").removesuffix(" %")) == pytest.approx(share, rel=0.05)
    assert "8 micro-batches" in recipe.describe_extra_work(plan)
    if cut.virtual > 1:
        assert recipe.describe_extra_work(plan).startswith("interleaved 2, ")


def test_the_bubble_of_an_older_file_is_that_of_the_table(staged: tuple[Planner, Plan]) -> None:
    """It has a mean over ranks, with waits for hosts: where that is more than the step has left, the name said more than the bar."""
    planner, plan = staged
    assert plan.cost.pipeline
    mean = replace(plan.cost.pipeline, bubble_s=2 * plan.cost.exposed_comm_time_s)
    older = replace(plan, cost=replace(plan.cost, pipeline=mean))
    drawn = step_parts.split_step(older, planner.graph)[step_parts.BUBBLE]
    assert recipe.describe_bubble(older) == f"bubble {units.percent(drawn / plan.cost.step_time_s)}"


def test_the_memory_of_a_row_says_which_rank_is_the_fullest(staged: tuple[Planner, Plan]) -> None:
    planner, plan = staged
    assert plan.pipeline and plan.cost.pipeline
    fullest = max(range(len(plan.cost.pipeline.stages)), key=lambda k: plan.cost.pipeline.stages[k].peak_bytes)  # type: ignore[union-attr]
    home = plan_model(planner.request, passes={})
    assert (
        f"Rank {plan.pipeline.rank_of(fullest)} of the pipeline is the fullest"
        in table._memory_cell(plan, home)["hover"]
    )
    assert "pipeline" not in table._memory_cell(replace(plan, pipeline=None), home)["hover"]


def test_every_rank_has_a_row_as_long_as_the_step(staged: tuple[Planner, Plan]) -> None:
    _, plan = staged
    cut, step = plan.pipeline, plan.cost.step_time_s
    assert cut
    (drawn,) = streams.build_streams({}, {"plan": plan}, WORK)["plans"]
    assert len(drawn["lanes"]) == cut.ranks
    assert drawn["staged"]
    for rank in range(cut.ranks):
        mine = [w for w in drawn["works"] if w[0] == rank]
        assert sum(w[4] for w in mine) == pytest.approx(step - plan.cost.outside_time_s, rel=1e-6)
        assert {w[8] for w in mine} >= set(range(1, 9)), "every micro-batch passes every rank"
    kinds = [str(k["kind"]) for k in WORK]
    bubble = sum(w[4] for w in drawn["works"] if kinds[w[1]] == "bubble") / cut.ranks
    assert plan.cost.pipeline
    # With the waits for hosts, which the plan's bubble leaves out.
    simulated = simulated_pipeline(cut, plan.cost.pipeline.stages, 8)
    assert bubble == pytest.approx(simulated.bubble_s, rel=1e-6)
    made = rows.work_rows({}, {"plan": plan})
    assert sum(float(str(r["seconds"])) for r in made) == pytest.approx(sum(w[4] for w in drawn["works"]))


def test_no_two_entries_of_the_legend_look_alike(staged: tuple[Planner, Plan]) -> None:
    """Compare had one blue for the compute of a plan without stages, and again for forward of one with them."""
    planner, plan = staged
    without = planner.stated(parse_layout("dp=8,tp=2"))
    shown = {"stages": plan, "none": without}
    drawn = streams.build_streams({"none": step_work(without, planner.graph)}, shown, WORK)
    entries = [kind for kind in drawn["kinds"] if kind["words"]]
    looks = [(kind["colour"], kind["pale"]) for kind in entries]
    assert len(looks) == len(set(looks)) >= 3
    assert "compute, forward" in [kind["words"] for kind in entries]


def test_the_parts_of_a_step_add_up(staged: tuple[Planner, Plan]) -> None:
    planner, plan = staged
    parts = step_parts.split_step(plan, planner.graph)
    assert sum(parts.values()) == pytest.approx(plan.cost.step_time_s)
    assert parts[step_parts.BUBBLE] > 0
    (*_, rest) = differences.compare_weights({"plan": plan}, {"plan": planner.graph})
    assert rest.waits_s["plan"] == plan.cost.exposed_comm_time_s


def test_who_sends_to_whom_has_the_sends_between_stages(staged: tuple[Planner, Plan]) -> None:
    _, plan = staged
    cut, cost, n = plan.pipeline, plan.cost.pipeline, plan.mesh.num_devices
    assert cut and cost
    matrix = bytes_between_gpus(plan, plan.cluster, PHASES)
    assert matrix.shape == (16, 16)
    first = cost.stages[0]
    assert first.send_bytes > 0
    assert matrix[0, n] >= 8 * first.send_bytes
    forward = bytes_between_gpus(plan, plan.cluster, ("forward",))
    assert np.count_nonzero(forward[0, n:]) == 1, "a GPU hands its part to one GPU of the next rank"
    assert sent_per_gpu(plan) >= sum(t.wire_bytes for t in plan.cost.traffic) + 8 * first.send_bytes


def test_the_graph_says_where_the_model_is_cut(staged: tuple[Planner, Plan]) -> None:
    planner, plan = staged
    assert plan.pipeline
    drawing = build_scene(group_by_module(planner.coarse), brief=True)
    marks = node_stages(plan, drawing)
    (run,) = [m for node, m in marks.items() if node.startswith("run:")]
    assert [tuple(m) for m in run] == list(enumerate(plan.pipeline.copies))
    first, *_, last = [p.node.id for p in sorted(drawing.scopes[""].nodes, key=lambda p: p.y) if p.node.id in marks]
    assert (marks[first], marks[last]) == ([[0, 1]], [[len(plan.pipeline.copies) - 1, 1]])


def test_a_setup_with_stages_is_read_and_written() -> None:
    for line, words_ in (
        ("PP 4 x TP 2 x ZeRO-1 2, interleaved 2, mbs 2, selective", "vp=2"),
        ("PP 2 x DP 8, mbs 1", "pp=2"),
        ("pp 4, dp 4, zero bubble", "schedule=zb"),
        ("pp 4, dp 4, zbv", "vp=2"),
        ("pp 2, dp 8, order=pp-tp-dp, copies=9-7", "copies=9-7"),
    ):
        stated = setups.parse_line(line)
        assert words_ in stated.write()
        assert setups.parse_setup(stated.write()) == setups.parse_line(stated.line()) == stated
    with pytest.raises(InputError, match="interleaved"):
        setups.parse_line("PP 4 x DP 4, interleaved")


def test_plans_with_stages_have_a_title() -> None:
    asked = Request("bert-large", "2x8-h100", layers=8, batch=64, accumulate=8, layout="dp=8,pp=2")
    plan = prepare_planner(asked).stated(parse_layout("dp=8,pp=2"))
    assert words.plan_title(plan) == "Our current setup"


def test_a_plan_with_stages_is_measured_against_the_fastest_without(staged: tuple[Planner, Plan]) -> None:
    """That of GPT-2 XL stood as 36 % less than FSDP, the slowest row; the best plan of one stage takes 11 % more."""
    plan = replace(staged[1], method="exact")
    asked = Request("bert-large", "2x8-h100", layers=8, batch=64, accumulate=8)
    others = plan_ids(planned(asked, "baselines").plans)
    listed = [ListedPlan(n, "") for n in ("stages", *others)]
    fastest = min((n for n in others if others[n].fits), key=lambda n: others[n].cost.step_time_s)
    assert choose_opponent({"stages": plan, **others}, listed, "stages") == fastest
