"""What the sentences beneath the table of plans say of what stands in no row."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from explorer.analysis.shortlist import shortlist
from explorer.text import words
from planner_core.core import Pipeline, PlanRole, option_switch
from planner_core.planning import LEAST_MEMORY_NAME, Request, Result, plan_model, prepare_planner
from planner_core.planning.analysis.legend import describe_axes, describe_fullest_ranks, row_title
from planner_core.planning.analysis.reporting import first_plan_text, plan_summary, text
from planner_core.planning.methods import note_shared_workload, parse_layout
from planner_core.planning.stages.answer import _add_notes, why_no_stages
from planner_core.planning.stages.search import StagedPlan


@pytest.fixture(scope="module")
def result() -> Result:
    return plan_model(Request("llama-3-8b", layers=2, cluster="2x8-h100", seq=512, batch=32, accumulate=None))


def test_stages_that_are_announced_have_a_reason_for_no_row(result: Result) -> None:
    """The first line said that stages follow, and only the JSON said why none did."""
    assert first_plan_text(result.best, result.asked).endswith("and stages follow") and result.staged is None
    assert "\nstages: no quicker plan with stages was found\n" in text(result)
    fixed = replace(result, asked=replace(result.asked, accumulate=1))  # fixes the micro-batches, so none are searched
    assert "stages: " not in text(fixed)


def test_work_that_is_split_along_an_axis_of_fsdp_is_named_below_the_rows(result: Result) -> None:
    """A mesh of `16 shard` read as FSDP over 16 GPUs, where the head was split as tensor parallelism splits it."""
    fsdp = next(p for p in result.plans if p.name == "FSDP")
    top = fsdp.blocks[""]
    head = top.params["lm_head.weight"]
    split = replace(top, params={**top.params, "lm_head.weight": replace(head, gathered=())})
    plans = [fsdp, replace(fsdp, name="best", blocks={**fsdp.blocks, "": split})]
    assert [p.mesh.axis_names for p in plans] == [("shard",)] * 2
    assert describe_axes(plans) == ("best: used in parts, as in tensor parallelism: lm_head along shard",)
    assert not describe_axes([fsdp])


def test_a_title_inside_a_sentence_is_no_heading(result: Result) -> None:
    """ "54 % less time than Least communication" stood on Compare."""
    least = replace(result.best, role=PlanRole.BEST, objective="communication")
    assert words.plan_title(least) == "Least communication"
    assert words.title_in_sentence(least) == "the plan with the least communication"


def test_the_reason_for_no_row_claims_no_more_than_the_search(result: Result) -> None:
    """ "No plan with stages is quicker" stood beneath a stated layout with stages that was, and where no plan fitted."""
    best = result.best
    staged = replace(best, name="our current setup", pipeline=Pipeline(2, "1f1b", (1, 1)))
    slow = replace(best, cost=replace(best.cost, step_time_s=2 * best.cost.step_time_s))
    short = replace(best, fits=False)
    assert why_no_stages(best, [staged]) == "no quicker plan with stages was found"
    assert why_no_stages(slow, [best, staged]) == "no quicker plan with stages was found but our current setup"
    assert why_no_stages(staged, [staged]) == "none was found that is quicker than our current setup, which has stages"
    assert why_no_stages(short, [replace(staged, fits=False)]) == "no plan with stages that fits was found"


@pytest.mark.parametrize(("share", "percent"), [(1.3, "130"), (0.234, "23"), (0.0123, "1.2")])
def test_a_wide_gap_of_stages_is_a_number_as_people_write_it(result: Result, share: float, percent: str) -> None:
    """ "At most 1.3e+02 % above the best of the degrees" stood beneath a plan with stages."""
    best = result.best
    staged = _add_notes(StagedPlan(best, result.planner, best.cost.step_time_s / (1 + share)), best)
    assert f": at most {percent} % above the best of the degrees that were looked at. None takes less than " in str(
        staged.plan.notes[1]
    )
    assert plan_summary(staged.plan)["bound_s"] == staged.bound  # a script reads it there, and no sentence


def test_a_plan_with_stages_at_its_bound_is_its_own_bound(result: Result) -> None:
    best = result.best
    staged = _add_notes(StagedPlan(best, result.planner, best.cost.step_time_s), best)
    assert plan_summary(staged.plan)["bound_s"] == best.cost.step_time_s


def test_stages_of_less_memory_are_told_where_no_plan_fits() -> None:
    """Llama-3-70B on 2 nodes of 4 A100: 182 GiB in one stage were said to come nearest, and two stages take 145."""
    asked = Request("llama-3-70b", cluster="4x8-a100:nodes=2,gpus=4,inter=25", batch=64, seq=4096, recompute="auto")
    found = plan_model(replace(asked, accumulate=None))
    (told,) = re.findall(
        r"; 2 stages of .* take ([0-9.]+) GiB, where one stage takes ([0-9.]+)$", found.reasons["stages"]
    )
    assert not found.best.fits and float(told[0]) < 0.85 * float(told[1])
    assert float(told[1]) == pytest.approx(found.best.cost.memory_bytes["peak"] / 2**30, abs=0.1)
    row = found.plans[-1]
    assert row.name == LEAST_MEMORY_NAME and not row.fits and row.pipeline and found.staged is None
    assert row.cost.memory_bytes["peak"] / 2**30 == pytest.approx(float(told[0]), abs=0.1)
    assert not found.choice.fits and found.recommended is found.best and found.best.notes[0] in found.notes
    listed = {one.name: one.what for one in shortlist({p.name: p for p in found.plans}, found.choice, "")}
    assert listed[found.best.name].startswith("needs the least memory of one stage")
    assert listed[LEAST_MEMORY_NAME].startswith("pipeline stages need less, does not fit")


def test_the_rank_that_decides_the_memory_is_named() -> None:
    layout = "dp=2,tp=4,pp=2"
    asked = Request("bert-large", "2x8-h100", layers=8, batch=64, accumulate=8, layout=layout)
    plan = prepare_planner(asked).stated(parse_layout(layout))
    assert plan.pipeline and plan.cost.pipeline
    peaks = [stage.peak_bytes for stage in plan.cost.pipeline.stages]
    assert min(peaks) < max(peaks) == plan.cost.memory_bytes["peak"] == peaks[plan.fullest_rank or 0]
    assert describe_fullest_ranks([plan]) == (
        f"{plan.name}: its memory is that of rank {peaks.index(max(peaks))} of 0 to 1, the fullest; "
        f"the emptiest takes {min(peaks) / 2**30:.1f} GiB",
    )
    assert plan_summary(plan)["pipeline"]["fullest_rank"] == plan.fullest_rank


def test_a_result_and_a_plan_fill_no_page_at_a_prompt(result: Result) -> None:
    """That of two layers of GPT-2 XL had 225 236 characters, and its best plan 30 508."""
    best = result.recommended
    said = repr(best)
    assert said.startswith(f"<Plan {best.name!r}: {best.mesh}, ") and " fits; see .cost" in said
    assert " does not fit; " in repr(replace(best, fits=False))
    whole = repr(result)
    assert said in whole and whole.startswith(f"<Result of {len(result.plans)} plans of {result.graph.name} on ")
    assert len(whole) < 400 and "\n" not in whole


def test_rows_of_one_stage_say_so_beside_stages(result: Result) -> None:
    """ "least communication" had 17.7 ms of it above a row of stages with 3.4, and methods had the micro-batches of "the chosen plan", which
    was that row, with eight."""
    best = result.best
    least = replace(best, name="least communication", objective="communication", role=PlanRole.OTHER)
    taps = replace(least, name="TAPS", method="taps")
    staged = replace(best, name="stages", pipeline=Pipeline(2, "1f1b", (1, 1)), role=PlanRole.STAGES)
    rows = [best, least, taps]
    assert [row_title(p, rows) for p in rows] == ["best", "least communication", "TAPS"]
    assert [row_title(p, [*rows, staged]) for p in (*rows, staged)] == [
        "best, of one stage",
        "least communication, of one stage",
        "TAPS",
        "stages",
    ]
    assert "as the best plan of one stage has" in str(note_shared_workload(result.planner.workload))


@pytest.mark.parametrize(("share", "prove", "named"), [(0.27, False, True), (0.27, True, False), (0.002, False, False)])
def test_a_wide_gap_names_what_closes_it(result: Result, share: float, prove: bool, named: bool) -> None:
    """A gap of "at most 27 % above the best there is" stood without a word that --prove exists."""
    best = replace(result.best, bound=result.best.cost.gpu_time_s / (1 + share), optimal=False)
    open_gap = replace(result, plans=(best,), asked=replace(result.asked, prove=prove))
    said, ended = text(open_gap, word=option_switch), "; the search for a proof ended with the gap that is left"
    assert ("; --prove may narrow the gap that is left" in said) == named and (ended in said) == prove
    assert (f"{ended}: it took the work that a proof may take" in said) == prove
    waits = replace(best, cost=replace(best.cost, host_wait_s=best.cost.step_time_s / 100))
    of_waits = text(replace(open_gap, plans=(waits,)), word=option_switch)
    assert (ended in of_waits) == prove and "it took the work" not in of_waits
    closed = replace(open_gap, plans=(replace(best, optimal=True),))
    assert ended not in text(closed) and "the gap that is left" not in text(closed)
