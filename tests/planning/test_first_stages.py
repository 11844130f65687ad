"""Stages that are much quicker are part of the first answer, and the search behind it is no worse."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from planner_core.core import NoPlanFits, Note, NoteKind, Plan
from planner_core.planning import FIRST_PASSES, Request, Result, add_stages, plan_model
from planner_core.planning.analysis.reporting import first_plan_text, plan_report, text
from planner_core.planning.pipeline import PASSES, Pass
from planner_core.planning.planner import Planner, prepare_planner
from planner_core.planning.stages import STAGES_PLAN_NAME, answer
from planner_core.planning.stages.degrees import FIRST_SEARCH, WHOLE_SEARCH, PipelineDegrees
from planner_core.planning.stages.search import _StageSearch, search_stages

MUCH_QUICKER = Request(
    "llama-3-8b", cluster="4x2-h100:inter=5", batch=64, seq=1024, layers=4, recompute="auto", accumulate=None
)
"""Four nodes of slow Ethernet: the first plan of one stage takes 661 ms, that with stages 471."""
SMALL_KERNELS = Request("gpt2-xl", cluster="2x8-h100", batch=8, layers=4, recompute="auto", accumulate=None)
"""Most of a step waits for the host. A Switch Transformer was searched for stages for 4.4 s before its first plan of 2.7."""
SLOW = Request(
    "llama-3-70b", cluster="2x2-h100:inter=5", batch=32, seq=1024, layers=4, recompute="auto", accumulate=None
)
"""Two nodes of slow Ethernet: stages are a little quicker."""
ANY_GAIN = (replace(FIRST_SEARCH[0], least_gain=1.0),)


@pytest.fixture(scope="module")
def much_quicker() -> tuple[Plan, Plan, list[Planner | None]]:
    """The first plan that is shown, the chosen plan of one stage, and the planners whose graphs served for stages."""
    shown: list[Plan] = []
    earlier: list[Planner | None] = []

    def prepare(*args: Any, earlier_planner: Planner | None = None, **options: Any) -> Planner:
        earlier.append(earlier_planner)
        return prepare_planner(*args, earlier_planner=earlier_planner, **options)

    with mock.patch.object(answer, "prepare_planner", prepare):
        (chosen,) = plan_model(MUCH_QUICKER, show_first=shown.append, passes={}).plans
    (first,) = shown
    return first, chosen, earlier


def test_the_first_plan_has_stages_where_they_are_much_quicker(much_quicker: tuple[Plan, Plan, list[Any]]) -> None:
    """The first plan of Llama-3-70B on 8 nodes with 12.5 GB/s took 27.9 s, and 5.75 s once stages had been searched."""
    first, _, earlier = much_quicker
    assert first.pipeline is not None and first.fits
    said = first_plan_text(first, MUCH_QUICKER)
    assert re.match(r"first plan: \d x \(", said) and "where the best plan of one stage takes" in said
    assert said.endswith("and stages follow")
    # A T5 of 2 x 1 001 layers was captured a second time for its stages, which took 5 s before its first plan.
    assert earlier and None not in earlier


@pytest.fixture(scope="module")
def answers() -> tuple[Result, Result]:
    """The answer before the whole search, and that after it."""
    with mock.patch.object(answer, "FIRST_SEARCH", ANY_GAIN):
        first = plan_model(SLOW, passes={"first stages": FIRST_PASSES["first stages"]})
        return first, add_stages(first)


def test_the_answer_before_the_whole_search_recommends_stages(answers: tuple[Result, Result]) -> None:
    first, whole = answers
    assert first.staged is not None and first.staged is first.plans[-1]
    assert first.staged.name == first.choice.fastest
    assert first.reasons["first stages"] == "stages are much quicker" and "stages" not in first.reasons
    assert whole.staged is not None and whole.staged.cost.step_time_s <= first.staged.cost.step_time_s
    assert [p.name for p in whole.plans].count(STAGES_PLAN_NAME) == 1 and "first stages" not in whole.reasons


@pytest.mark.slow  # pages/test_one_answer.py shows it of a smaller request
def test_the_answer_of_the_page_and_that_of_the_command_line_are_one(answers: tuple[Result, Result]) -> None:
    _, whole = answers
    straight = plan_model(SLOW, passes={"stages": PASSES["stages"]})
    assert [(p.name, p.cost, p.notes) for p in straight.plans] == [(p.name, p.cost, p.notes) for p in whole.plans]
    assert straight.reasons == whole.reasons


@pytest.mark.parametrize("changes", [{}, {"cluster": "1x8-h100"}, {"accumulate": 4}])
def test_no_stages_are_shown_first_where_they_hardly_win_or_are_not_asked_for(changes: dict[str, object]) -> None:
    shown: list[Plan] = []
    asked = replace(SLOW, **changes)
    result = plan_model(asked, show_first=shown.append, passes={"first stages": FIRST_PASSES["first stages"]})
    assert [p.pipeline for p in (*shown, *result.plans)] == [None, None]
    assert result.reasons["first stages"] == "a moment's search finds no stages that are much quicker"


def test_waits_for_the_host_are_no_reason_to_look_for_stages_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "_find_staged_plan", lambda *args: pytest.fail("stages are searched"))
    shown: list[Plan] = []
    plan_model(SMALL_KERNELS, show_first=shown.append, passes={})
    assert shown[0].cost.host_wait_s > shown[0].cost.step_time_s / 2


def test_the_whole_search_begins_as_the_first_one() -> None:
    """So it is never worse: each search ends before all degrees are tried, and another order might miss a plan that was shown."""
    assert WHOLE_SEARCH[: len(FIRST_SEARCH)] == FIRST_SEARCH
    assert WHOLE_SEARCH[-1].least_gain == 1 and not WHOLE_SEARCH[-1].samples


LITTLE = Request(
    "llama-3-70b",
    cluster="2x8-h100",
    batch=16,
    seq=1024,
    layers=4,
    tool="megatron",
    accumulate=None,
    recompute="full",
    memory_gb=8,
)


@pytest.mark.parametrize("passes", [FIRST_PASSES, pytest.param(PASSES, marks=pytest.mark.slow)], ids=["page", "whole"])
def test_stages_that_fit_a_budget_are_the_answer_where_no_plan_of_one_stage_fits(passes: Mapping[str, Pass]) -> None:
    """`--for megatron --memory-gb 20` was refused, where two stages fit."""
    result = plan_model(LITTLE, passes=passes)
    assert result.staged is not None and result.recommended is result.staged and result.staged.fits
    assert result.staged.cost.memory_bytes["peak"] <= 8e9 < result.best.cost.memory_bytes["peak"]
    assert not result.best.fits and result.reasons == {"stages": "stages are quicker"}
    assert plan_report(result)["choice"]["recommended"] == STAGES_PLAN_NAME and text(result)


def test_a_budget_that_stages_do_not_fit_either_says_what_they_take() -> None:
    with pytest.raises(
        NoPlanFits, match=r"no plan with stages that fits was found; .* stages of .* take .* GiB, where"
    ):
        plan_model(replace(LITTLE, memory_gb=4))


def test_a_narrowed_plan_is_shown_before_stages_are_looked_for(
    much_quicker: tuple[Plan, Plan, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that gave up states bounds no cut. Zamba2 was captured and searched for one sample, 1.1 s, and no stages were found."""
    asked: list[Plan] = []
    monkeypatch.setattr(answer, "_find_staged_plan", lambda request, plan, *args: asked.append(plan))
    _, plan, _ = much_quicker
    narrowed = replace(plan, notes=(Note("not proven: plans were left out", NoteKind.SCOPE),))
    for one in (plan, narrowed, replace(narrowed, fits=False)):
        answer.find_first_staged_plan(MUCH_QUICKER, one)
    assert [(one.fits, one.notes) for one in asked] == [(True, plan.notes), (False, narrowed.notes)]


def test_the_first_look_ends_after_two_degrees_that_are_not_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T5 of 2 x 1 001 layers took 30 s to its first plan, not 16: two whole models were searched with 16 numbers of stages."""
    tried: list[PipelineDegrees] = []
    asked = replace(MUCH_QUICKER, layers=16)  # up to four stages a rank
    best_of_one_stage = plan_model(asked, passes={}).searched

    def fail(self: _StageSearch, d: PipelineDegrees) -> bool | None:
        """No cut is quicker; of the first whole model, bounds already say so."""
        first = next(iter(self.shared_s), d).whole_model
        self.shared_s[d] = 1.0
        if d.whole_model == first:
            return None
        tried.append(d)
        return False

    monkeypatch.setattr(_StageSearch, "search_degrees", fail)
    counts = []
    for counts_models in (False, True):
        tried.clear()
        breadth = replace(ANY_GAIN[0], counts_models=counts_models)
        assert search_stages(prepare_planner(asked), best_of_one_stage=best_of_one_stage, breadths=(breadth,)) is None
        counts.append(len(tried))
    assert FIRST_SEARCH[0].counts_models is False and counts[0] == FIRST_SEARCH[0].failures < counts[1]
