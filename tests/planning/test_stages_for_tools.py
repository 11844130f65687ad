"""A search for a tool finds the best layout with stages that the tool can be told, and its file is priced as the plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest

from planner_core.core import Graph, InputError, Note, NoteKind, Plan, PlanRole, load_cluster
from planner_core.cost import even_copies
from planner_core.exporters.api import export_text
from planner_core.planning import FIRST_PASSES, Request, Result, add_stages, plan_model, prepare_planner, prove
from planner_core.planning.analysis import list_notes, plan_report
from planner_core.planning.analysis.reporting import text
from planner_core.planning.methods import TOOLS, Inner, Layout, operator_faults, parse_layout, tool_stages
from planner_core.planning.pipeline import PASSES
from planner_core.planning.planner import Planner
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.result import append_staged
from planner_core.planning.stages import STAGES_PLAN_NAME, STOCK_PLAN_NAME, answer, search_stages
from planner_core.planning.stages.degrees import WHOLE_SEARCH, PipelineDegrees, list_degrees
from planner_core.planning.stages.search import _StageSearch
from planner_core.planning.stages.tool_forms import layout_of_tool, list_tool_degrees
from tests.support.terms import values_of

WITH_STAGES = [name for name, tool in TOOLS.items() if tool.stages]
ASKED = Request(
    "llama-3-8b", cluster="2x2-h100:inter=5", batch=32, seq=1024, layers=4, recompute="auto", accumulate=None
)
"""Two nodes of slow Ethernet, where gradients of all weights take longer than stages."""
LARGE = replace(ASKED, model="llama-3-70b", cluster="2x8-h100:inter=5", batch=64, seq=2048)


@cache
def with_stages(tool: str | None) -> Result:
    """The answer for a tool or for none, with stages and nothing else beside the best plan of one stage."""
    return plan_model(replace(ASKED, tool=tool), passes={"stages": PASSES["stages"]})


@cache
def best_with_stages(request: Request) -> Plan:
    found = search_stages(prepare_planner(replace(request, accumulate=1)))
    assert found is not None
    return found.plan


@pytest.mark.parametrize("tool", WITH_STAGES)
def test_its_file_is_priced_as_the_plan(tool: str) -> None:
    """The tool's stack is stated, so that the two prices are of the same kernels."""
    plan = best_with_stages(replace(ASKED, tool=tool, stack=tool))
    assert plan.fits and plan.pipeline is not None and plan.workload.zero <= 1
    assert len({b.recompute for label, b in plan.blocks.items() if label}) == 1
    made = export_text(plan, tool)
    assert made.nearest is not None and not [r for r in made.remarks if r.startswith("differs")]
    assert made.nearest.step_time_s == pytest.approx(plan.cost.step_time_s, rel=1e-9)


def test_torchtitan_cuts_evenly_and_megatron_as_its_layout_says() -> None:
    """The head takes as long as some layers, so stages of unequal numbers of layers are quicker."""
    copies = {tool: best_with_stages(replace(ASKED, tool=tool, stack=tool)).pipeline for tool in WITH_STAGES}
    titan, megatron = copies["torchtitan"], copies["megatron"]
    assert titan is not None and titan.copies == even_copies(4, len(titan.copies)) and titan.virtual <= 2
    assert megatron is not None and len(set(megatron.copies)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("tool", WITH_STAGES)
def test_no_stated_layout_is_quicker(tool: str) -> None:
    """Every layout that the tool can be told with equally many layers in its stages, each priced by itself, is the judge."""
    cluster = load_cluster(LARGE.cluster)
    best = best_with_stages(replace(LARGE, tool=tool))
    planners: dict[int, Planner] = {}
    seconds = []
    for pp, tp, vp, samples in itertools.product((2, 4), (1, 2, 4, 8), (1, 2), (1, 2)):
        dp = cluster.num_gpus // (pp * tp)
        if dp == 0 or 64 % (dp * samples) or pp * vp > 4:
            continue
        layout = parse_layout(f"dp={dp},tp={tp},pp={pp},vp={vp},zero={int(dp > 1)}{',sp' * (tp > 1)}")
        key = 64 // (dp * samples)
        if key not in planners:
            planners[key] = prepare_planner(replace(LARGE, accumulate=key, recompute="none", zero=1))
        try:
            plan = planners[key].of_layout(layout)
        except InputError:  # too few micro-batches
            continue
        if plan is not None and plan.fits and not operator_faults(planners[key].graph, layout):
            seconds.append(plan.cost.step_time_s)
    assert len(seconds) > 12
    assert best.cost.step_time_s <= min(seconds) * (1 + 1e-9)


def test_the_answer_for_a_tool_has_stages() -> None:
    result = with_stages("megatron")
    plan = result.recommended
    assert plan is result.staged and plan.cost.step_time_s < result.best.cost.step_time_s
    assert any(str(n).startswith("the best found with stages that megatron can be told: at most") for n in plan.notes)
    assert [p.name for p in result.plans] == ["best", "stages"]  # no second row of the same tool
    rows = [line.split("  ")[0] for line in text(result).split("\n\n")[1].splitlines()]
    assert rows[2:4] == ["best, of one stage", "stages"]
    assert "of the other rows only best comes from that search" in result.choice.sentence


@pytest.mark.parametrize("tool", ["megatron", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_the_price_of_a_tool_is_of_what_is_recommended(tool: str) -> None:
    """Mixtral on 32 H100: "15.5 % slower than the best of all", of Megatron-LM's best of one stage beside the script's. With stages, which were
    recommended, it was 10 % quicker; on slow links the script's best has stages too, and that was not said."""
    free = with_stages(None)
    first = plan_model(replace(ASKED, tool=tool), passes={"first stages": FIRST_PASSES["first stages"]})
    assert first.tool_price is None and not [n for n in list_notes(first) if str(n).startswith(f"for {tool}: ")]
    result = add_stages(first)
    price = result.tool_price
    assert price is not None and free.staged is not None
    assert price.step_s == result.recommended.cost.step_time_s
    assert price.step_without_tool_s == pytest.approx(min(p.cost.step_time_s for p in (free.staged, free.searched)))
    (note,) = (n.sentence for n in list_notes(result) if str(n).startswith(f"for {tool}: "))
    free_s = price.step_without_tool_s - price.wait_without_tool_s
    assert values_of(note, "bytes", "seconds")[:2] == [price.step_s, free_s]
    assert ("faster than" in note) == (price.step_s < free_s)
    assert note in text(result) and note in plan_report(result)["notes"]
    assert with_stages(tool).tool_price == price
    assert (price.own_kernels, result.staged is None) == ((True, False) if tool == "megatron" else (False, True))
    if tool == "fsdp2":
        assert prove(result).tool_price == price


def test_does_not_fit_is_not_said_of_an_answer_with_stages_that_fits() -> None:
    """Below a recommended plan that fits stood "does not fit: ...", and "no plan fits" of a tool whose plan with stages does."""
    first = plan_model(
        replace(
            ASKED,
            model="gpt2-xl",
            cluster="2x2-h100",
            batch=4096,
            layers=2,
            seq=1024,
            accumulate=1,
            tool="megatron",
            recompute="none",
        )
    )
    assert not first.best.fits and first.best.notes and set(first.best.notes) <= set(first.notes)
    staged = replace(first.best, name=STAGES_PLAN_NAME, role=PlanRole.STAGES, fits=True, notes=())
    after = append_staged(first, [(staged, first.planner)])
    assert after.recommended is staged and not set(after.notes) & set(after.best.notes)
    assert "for megatron: the plan fits, where none of all plans on PyTorch's kernels was found to" in map(
        str, list_notes(after)
    )
    assert not [n for n in map(str, list_notes(first)) if n.startswith("for megatron: ")], "nothing fits there"
    assert any(n.kind is NoteKind.SHORTAGE for n in after.best.notes), "the row of one stage keeps it"
    assert f"of the other rows only {after.best.name} comes from that search" in after.choice.sentence
    assert after.best.name != "best", "a row of that name is not there to be spoken of"


@pytest.mark.parametrize("model", ["t5-large", pytest.param("resnet50-100k", marks=pytest.mark.slow)])
def test_no_row_of_a_tool_that_cannot_state_the_model(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its export would refuse the plan that is recommended, so it is not searched either."""
    searched: list[str | None] = []
    real = answer.search_stages
    monkeypatch.setattr(
        answer,
        "search_stages",
        lambda planner, *a, **b: searched.append(planner.request.tool) or real(planner, *a, **b),
    )
    asked = Request(model, cluster="2x2-h100:inter=1", batch=64, layers=2 if model == "t5-large" else None)
    result = plan_model(replace(asked, accumulate=None), passes={"stages": PASSES["stages"]})
    assert searched == [None] and STOCK_PLAN_NAME not in {p.name for p in result.plans}


@pytest.mark.slow
def test_a_large_model_on_slow_links_is_told_of_stages() -> None:
    """Llama-3-70B on 8 nodes of 12.5 GB/s: 32 s without stages, 6.3 s with them, no more than a layout that teams state."""
    best = best_with_stages(
        replace(
            ASKED, model="llama-3-70b", cluster="8x8-h100:inter=12.5", batch=64, seq=4096, layers=80, tool="megatron"
        )
    )
    pricer = Pricer("llama-3-70b", load_cluster("8x8-h100:inter=12.5"))
    stated = pricer.plan(Statement(parse_layout("tp=8,sp,pp=8,vp=2"), 1, 64, 4096))
    assert stated is not None and stated.fits
    assert best.cost.step_time_s <= stated.cost.step_time_s * (1 + 1e-9) < 7


GAP = Note("not proven: at most 15 % above the best there is", NoteKind.GAP)


@pytest.fixture(scope="module")
def added() -> Result:
    """What stages add to a result whose plan of one stage has a gap."""
    result = plan_model(ASKED, passes={})
    return add_stages(replace(result, plans=(replace(result.best, notes=(GAP,)),)))


def test_a_stock_tool_stands_beside_the_best_plan_with_stages(added: Result) -> None:
    """Without a tool the best of Megatron-LM is a row, and the one to run where the two tie."""
    best, stock = added.staged, next(p for p in added.plans if p.name == STOCK_PLAN_NAME)
    assert best is added.plans[-1] and stock.method in ("megatron", "megatron-sp") and stock.fits
    assert best.cost.step_time_s <= stock.cost.step_time_s
    assert [str(n) for n in best.notes if str(n).startswith(STOCK_PLAN_NAME)]
    assert export_text(stock, "megatron").nearest is not None
    if stock.name in {t.name for t in added.choice.ties}:
        assert added.recommended is stock and "stock tools run it as it is" in added.choice.sentence


def test_the_gap_of_a_plan_of_one_stage_is_not_to_the_best_of_all(added: Result) -> None:
    assert added.staged is not None
    assert str(added.best.notes[0]) == f"{GAP}, of one pipeline stage"
    # The whole search follows a first answer that says so already.
    assert append_staged(added, [(added.staged, added.planner)]).best.notes == added.best.notes


def test_degrees_as_layouts() -> None:
    d = PipelineDegrees(2, 2, 4, 2, 2, 8, 1, inner=Inner.TENSOR)

    def layout(degrees: PipelineDegrees, tool: str = "megatron") -> Layout | None:
        stages = tool_stages(tool)
        assert stages is not None
        return layout_of_tool(stages, degrees)

    assert str(layout(d)) == "dp=4,tp=2,pp=2,vp=2,sp,zero=1"
    assert str(layout(replace(d, outer=1))) == "dp=4,tp=2,pp=2,vp=2,sp,order=tp-pp-dp,zero=1"
    assert layout(replace(d, outer=2)) is None  # Megatron-LM has no order pp-tp-dp
    assert str(layout(replace(d, data=1, inner=Inner.ULYSSES))) == "cp=2,pp=2,vp=2,cp_type=ulysses,zero=1"
    assert str(layout(replace(d, inner=Inner.EXPERT))) == "dp=8,ep=2,pp=2,vp=2,zero=1"
    assert layout(replace(d, outer=1), "torchtitan") is None


def test_what_stages_of_a_tool_cannot_be() -> None:
    """Experts need samples of their own, torchtitan is told of two stages a rank at most, and no tool cuts an encoder and a decoder."""
    dense, experts = (prepare_planner(replace(ASKED, model=m, layers=2)).graph for m in ("llama-3-8b", "mixtral-8x7b"))
    d = PipelineDegrees(2, 2, 4, 2, 2, 4)

    def uses(tool: str, degrees: PipelineDegrees, graph: Graph = dense) -> set[str]:
        stages = tool_stages(tool)
        assert stages is not None
        return {one.inner for one in list_tool_degrees(stages, degrees, graph)}

    assert uses("megatron", d) == {"tensor", "ring", "ulysses", "gather"}
    assert uses("megatron", d, experts) >= {"tensor", "expert"} and "expert" not in uses(
        "megatron", replace(d, samples=1), experts
    )
    # A sample for each of 8 expert ranks: no micro-batch of one rank was a multiple of 8, so ep=8 was never looked at.
    dealt = replace(d, tensor=8, samples=8)
    assert uses("megatron", dealt, experts) == {"expert"} and not uses("megatron", dealt)
    cluster = load_cluster("8x8-h100")
    plain, more = (set(list_degrees(cluster, 512, 32, deals=deals)) for deals in (False, True))
    assert plain < more and {(x.samples, x.tensor) for x in more - plain} >= {(8, 8), (32, 8), (8, 2)}
    assert uses("torchtitan", d) == {"tensor", "gather"} and not uses("torchtitan", replace(d, virtual=3))
    assert not uses("megatron", d, prepare_planner(Request("t5-large", cluster="2x8-h100", batch=8, layers=2)).graph)


def test_expert_ranks_of_stages_are_found_beside_a_plan_of_one_stage() -> None:
    """Mixtral on 64 GPUs took 6.15 s without stages and 5.71 s with them: five numbers of stages of two meshes had ended the search."""
    asked = Request(
        "mixtral-8x7b", cluster="8x8-h100", batch=512, seq=4096, recompute="auto", accumulate=1, tool="megatron"
    )
    planner = prepare_planner(asked.with_tool_software())
    search = _StageSearch(planner, lambda text: None, None, None)
    search.below_s = 6.15
    degrees = [d for d in search.degrees if d.inner == Inner.EXPERT and d.tensor == 8 and d.ranks <= 4]
    search.find_micro_batches(degrees)
    search.search_promising(degrees, WHOLE_SEARCH[-1])
    assert search.best is not None and search.best[0].fits and search.best[0].cost.step_time_s < 6
