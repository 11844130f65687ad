"""The steps that choose a number of micro-batches, and the rules that they follow, one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from planner_core.core import DeviceMesh, Note, NoteKind, Plan, axis_names
from planner_core.planning import Request
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.fitting.micro_batch_numbers import MicroBatchCandidate, MicroBatchNumbers
from planner_core.planning.fitting.micro_batches import choose, one_number
from planner_core.planning.fitting.micro_batches.choose import STEPS, order_by_ratio
from planner_core.planning.fitting.micro_batches.first_plan import (
    MAX_SHOWN_GAP,
    is_good,
    offer_first_plan,
    states_hardly_fit,
)
from planner_core.planning.fitting.micro_batches.state import LowerBounds, SearchState, SearchTask
from planner_core.planning.fitting.shortage import least_state_bytes
from planner_core.planning.planner import candidate_meshes, prepare_planner
from planner_core.planning.request import MOMENT, THOROUGH, Effort
from planner_core.search.algebra import Incumbent
from tests.support.plans import searched

ASKED = Request(
    "llama-3-8b", cluster="1x8-h100", batch=16, seq=2048, layers=2, accumulate=None, recompute="auto", precision="pure"
)


def task_of(request: Request, shown: list[Plan] | None = None, effort: Effort = MOMENT, **search: Any) -> SearchTask:
    """Return the task of a request, whose first plan is added to `shown`."""
    numbers = MicroBatchNumbers.of_request(request, None, lambda text: None, effort)
    plans = [] if shown is None else shown
    return SearchTask(
        numbers, search.get("meshes", choose_mesh), lambda text: None, lambda planner, plan: plans.append(plan)
    )


def state_of(task: SearchTask, **known: Any) -> SearchState:
    """Return the state before the first step."""
    first = task.numbers.first
    return SearchState(MicroBatchCandidate.of(first, candidate_meshes(first.request, first.cluster)), True, **known)


def fail(*args: Any, **options: Any) -> Plan:
    """Stand in for a search that nobody may begin."""
    raise AssertionError("nothing is left to search")


def test_a_number_has_the_highest_bound_of_its_divisors_until_it_is_searched() -> None:
    bounds = LowerBounds(any_number=1.0, any_memory={1: 2.0, 2: 4.0, 3: 3.0})
    assert [bounds.of_number(n) for n in (1, 4, 6, 9, 12)] == [2.0, 4.0, 4.0, 3.0, 4.0]
    assert bounds.of_numbers([6, 9]) == 3.0 and bounds.of_numbers([]) == math.inf
    assert LowerBounds(any_number=1.0).of_number(7) == 1.0
    bounds.raise_within_budget(6, 5.0)
    bounds.raise_within_budget(6, 4.5)
    assert bounds.of_number(6) == 5.0 and bounds.of_number(12) == 4.0, "a bound within a budget is of one number alone"


def test_the_bound_on_a_mesh_is_the_highest_of_the_divisors_that_have_it() -> None:
    line, square = (DeviceMesh(axis_names(len(sizes)), sizes) for sizes in ((4,), (2, 2)))
    bounds = LowerBounds(on_mesh={1: {line: 2.0, square: 1.0}, 2: {line: 3.0}, 3: {line: 9.0}})
    assert bounds.of_divisors_on(line, 4) == 3.0 and bounds.of_divisors_on(square, 4) == 1.0
    assert LowerBounds().of_divisors_on(line, 4) is None


def test_numbers_are_near_by_their_ratio() -> None:
    assert order_by_ratio([1, 2, 4, 8, 16, 32], 8) == [8, 4, 16, 2, 32, 1]
    assert order_by_ratio([8, 1, 2], 0.1) == [1, 2, 8], "less than one micro-batch is one"


def test_multiples_of_the_last_useful_number_hold_no_better_plan() -> None:
    state = state_of(task_of(ASKED))
    assert state.last_useful_number == 0 and state.may_hold_better_plan(4)
    state.bounds.any_memory[4] = 0.0
    assert not state.may_hold_better_plan(4) and state.may_hold_better_plan(8)
    planner = prepare_planner(replace(ASKED, accumulate=2))
    state.best_of_any_memory = planner, searched(replace(ASKED, accumulate=2))
    assert state.last_useful_number == 2 and not state.may_hold_better_plan(8) and state.may_hold_better_plan(1)
    state.best_fitting = Incumbent(1.0)
    state.bounds.any_number = state.bounds.any_memory[4] = 1.0
    assert not state.may_hold_better_plan(1), "a tie is no better plan"


def test_a_first_plan_is_near_its_bound_or_of_a_relaxation() -> None:
    plan = searched(replace(ASKED, accumulate=2))
    seconds = plan.cost.gpu_time_s
    near, far = (replace(plan, bound=seconds / (1 + MAX_SHOWN_GAP * share), notes=()) for share in (0.9, 1.1))
    assert is_good(near) and not is_good(far) and not is_good(replace(near, bound=None))
    of_smaller_space = (Note("a smaller space was searched", NoteKind.SCOPE),)
    assert is_good(replace(far, notes=of_smaller_space))
    assert not is_good(replace(far, bound=0.0, notes=of_smaller_space)), "without a bound nothing is known"


def test_one_plan_is_shown_and_one_that_does_not_fit_only_where_hardly_any_does() -> None:
    shown: list[Plan] = []
    task = task_of(ASKED, shown)
    state, planner = state_of(task), task.numbers.first
    plan = replace(searched(replace(ASKED, accumulate=1)), fits=False, bound=None)
    offer_first_plan(task, state, planner, plan)
    assert not shown and not state.is_first_shown
    state.nothing_can_fit = True
    for _ in range(2):
        offer_first_plan(task, state, planner, plan)
    assert shown == [plan] and state.is_first_shown


@pytest.mark.parametrize(("share", "hardly"), [(0.98, False), (0.995, True)])
def test_states_hardly_fit_that_leave_less_than_a_hundredth(share: float, hardly: bool) -> None:
    states = least_state_bytes(prepare_planner(replace(ASKED, accumulate=1)))
    request = replace(ASKED, accumulate=1, memory_gb=1.0)
    usable = prepare_planner(request).budget  # of 1 GB
    planner = prepare_planner(replace(request, memory_gb=states / share / usable))
    assert least_state_bytes(planner) / planner.budget == pytest.approx(share, rel=1e-3)
    assert states_hardly_fit(planner) == hardly


def test_where_the_fastest_plan_fits_no_other_number_is_searched() -> None:
    task = task_of(replace(ASKED, mesh="8"))
    state = state_of(task)
    choose.take_fastest_if_it_fits(task, state)
    assert state.best_of_any_memory is not None and state.last_useful_number == 1
    alone = replace(task, search_meshes=fail)
    for name in ("feasibility", "least memory", "likely number", "rising numbers", "numbers between"):
        STEPS[name](alone, state)
    assert state.searched == [] and state.fitting_number is None


def test_a_likely_number_is_searched_before_the_first() -> None:
    task = task_of(replace(ASKED, mesh="8", memory_gb=5.0))
    state = state_of(task)
    choose.search_likely_number(task, state)
    (candidate,) = state.searched
    assert state.fitting_number is not None and candidate.micro_batches == 2 == round(state.fitting_number)
    assert 0 < state.bounds.any_number <= state.bounds.any_memory[2] <= state.best_fitting.value < math.inf
    choose.search_rising_numbers(task, state)
    assert {1, 2} <= set(state.bounds.any_memory)


def test_every_step_gives_a_reason_and_the_searched_numbers_have_bounds() -> None:
    state = choose.search_without_proof(task_of(replace(ASKED, mesh="8", memory_gb=5.0)))
    assert list(state.reasons) == list(STEPS) and all(state.reasons.values())
    best = state.best_fitting.solution
    assert best is not None and best[0].value(best[1]) == state.best_fitting.value
    for candidate in state.searched:
        assert state.bounds.any_memory[candidate.micro_batches] <= state.best_fitting.value


def test_one_axis_is_the_answer_where_states_do_not_fit_unless_a_proof_is_asked_for() -> None:
    request = Request("llama-3-70b", cluster="1x8-h100", recompute="auto", accumulate=None)
    for effort, is_answer in ((MOMENT, True), (THOROUGH, False)):
        shown: list[Plan] = []
        task = task_of(request, shown, effort)
        state = state_of(task, nothing_can_fit=True)
        state.states_fit = False
        assert choose.search_one_axis(task, state) == is_answer
        assert [len(plan.mesh.axis_sizes) for plan in shown] == [1] and bool(state.searched) == is_answer


def test_the_fastest_plan_nearly_fits_up_to_a_factor_of_the_budget() -> None:
    planner = prepare_planner(replace(ASKED, mesh="8", accumulate=1))
    candidate = MicroBatchCandidate.of(planner, candidate_meshes(planner.request, planner.cluster))
    assert candidate.plain is not candidate.planner and one_number.fastest_nearly_fits(candidate)
    small = prepare_planner(replace(planner.request, memory_gb=5.0))
    assert not one_number.fastest_nearly_fits(MicroBatchCandidate.of(small, candidate.options))
