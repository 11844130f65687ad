"""The first plan is there before baselines and stages are searched, and a proof goes on after the answer."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from planner_core.cli.main import main
from planner_core.core import NoteKind, Plan, PlanRole
from planner_core.cost.communication import sent_per_gpu
from planner_core.models import batches
from planner_core.planning import (
    FASTEST,
    FIRST_PASSES,
    WITH_RECOMPUTATION,
    Request,
    add_less_memory,
    add_stages,
    pipeline,
    plan_model,
    prove,
)
from planner_core.planning.analysis.reporting import plan_summary
from planner_core.planning.derived import after_answer
from planner_core.planning.fitting import micro_batch_numbers, micro_batches
from planner_core.planning.fitting.baselines import note_missing_baselines
from planner_core.planning.fitting.mesh_search import choose_mesh, mesh_of_quick_plan
from planner_core.planning.fitting.micro_batches import choose
from planner_core.planning.fitting.micro_batches.first_plan import MAX_SHOWN_GAP
from planner_core.planning.planner import Planner, candidate_meshes, prepare_planner
from planner_core.planning.request import RARE_COLLECTIONS, THOROUGH
from planner_core.search.algebra import PointAllowance
from tests.support.plans import planned, searched

SMALL = Request("llama-3-8b", cluster="1x8-h100", layers=2, mesh="8")
TIGHT = Request(
    "llama-3-8b",
    cluster="1x8-h100",
    layers=2,
    mesh="4x2",
    batch=16,
    seq=2048,
    accumulate=2,
    recompute="auto",
    precision="pure",
    memory_gb=5.0,
)
"""Its plan stays some per cent above its bound."""


def test_the_first_plan_is_shown_before_any_pass() -> None:
    events: list[object] = []

    def apply_pass(draft: pipeline.Draft) -> tuple[pipeline.Draft, str]:
        events.append("pass")
        return replace(draft, leading=(draft.chosen,)), ""

    result = plan_model(SMALL, show_first=events.append, passes={"pass": apply_pass})
    assert events == [result.best, "pass"] and result.best.bound is not None


def test_the_command_line_prints_it_first(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama-3-8b", "--cluster", "1x8-h100", "--layers", "2", "--mesh", "8"]
    assert main(command) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("first plan: ") and "proven the best" in first and second.startswith("llama-3-8b: ")
    assert main([*command, "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")


def test_a_proven_result_is_returned_as_it_is() -> None:
    result = planned(SMALL)
    assert result.searched.optimal and prove(result) is result


def test_a_step_is_not_called_optimal_whose_gpus_wait_for_their_host() -> None:
    plan = planned(SMALL).best
    waits = replace(
        plan, cost=replace(plan.cost, step_time_s=2 * plan.cost.step_time_s, host_wait_s=plan.cost.step_time_s)
    )
    assert plan_summary(plan)["optimal"] and not plan.cost.host_wait_s
    assert not plan_summary(waits)["optimal"] and plan_summary(waits)["bound_s"] == plan.bound


@pytest.mark.parametrize("changes", [{}, {"objective": "communication"}, {"method": "taps"}, {"mesh": None}])
def test_the_bound_of_a_plan_is_not_above_its_own_seconds(changes: dict[str, Any]) -> None:
    """The search adds seconds that break ties, 6e-8 of a step, and the bound that is handed out has none."""
    result = plan_model(replace(SMALL, **changes), passes=FIRST_PASSES)
    bounded = [p for p in result.plans if p.fits and p.bound is not None and p.pipeline is None and p.method != "tap"]
    assert any(p.optimal for p in bounded)
    for plan in bounded:
        assert plan.bound is not None and plan.bound <= plan.cost.seconds(plan.objective), plan.name
        if plan.objective == "time":
            assert plan_summary(plan)["bound_s"] <= plan.cost.step_time_s


def test_the_bound_of_a_search_for_the_least_bytes_is_in_bytes() -> None:
    plan = searched(Request("llama-3-8b", method="tap"))
    summary, sent = plan_summary(plan), sent_per_gpu(plan)
    assert summary["objective"] == "volume" and summary["bound_s"] is None
    assert 0.9 * sent < summary["bound_bytes"] <= sent
    # In Python it is in GB, and read as seconds TAP's step of 0.27 s was far below its own bound of 5.47.
    assert plan.bound and math.floor(1e9 * plan.bound) == pytest.approx(summary["bound_bytes"], abs=1)
    assert "the GB (1e9 bytes) that a GPU sends" in " ".join(str(type(plan).__doc__).split())
    taps = plan_summary(searched(Request("llama-3-8b", method="taps")))
    assert taps["objective"] == "communication" and "bound_bytes" not in taps
    assert 0.9 * taps["comm_time_s"] < taps["bound_s"] <= taps["comm_time_s"] * (1 + 1e-3)


def test_a_proof_is_not_worse_and_reports_its_progress() -> None:
    result, said = planned(TIGHT), list[str]()
    assert not result.searched.optimal
    proven = prove(result, said.append)
    before, after = result.searched, proven.searched
    assert before.bound is not None and after.bound is not None and said
    assert after.cost.gpu_time_s <= before.cost.gpu_time_s * (1 + 1e-6) and after.bound >= before.bound * (1 - 1e-6)


def test_a_proof_keeps_the_plans_of_less_memory() -> None:
    """They left the page's table as soon as the proof was there, and the page waited for a search that had ended."""
    found = add_less_memory(planned(replace(TIGHT, memory_gb=None)))
    bound = found.searched.cost.step_time_s / 1.02
    unproven = replace(found, plans=tuple(replace(plan, optimal=False, bound=bound) for plan in found.plans))
    proven = prove(unproven)
    assert proven.searched.optimal and any(plan.name.startswith(WITH_RECOMPUTATION) for plan in proven.plans)
    assert [(p.name, p.cost) for p in proven.plans] == [(p.name, p.cost) for p in found.plans]


def test_a_proof_that_ends_at_a_worse_plan_gives_its_bound_to_the_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    result = planned(TIGHT)
    known = result.searched
    assert known.bound is not None
    higher = (known.bound + known.cost.gpu_time_s) / 2
    slow = replace(known, cost=replace(known.cost, step_time_s=2 * known.cost.step_time_s), bound=higher)
    monkeypatch.setattr(after_answer, "plan_model", lambda *_, **__: replace(result, plans=(slow,)))
    proven = prove(result)
    assert proven.searched.cost == known.cost and proven.searched.bound == higher
    assert len(proven.plans) == len(result.plans)


def test_a_bound_rises_for_a_simpler_plan_and_for_the_one_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = planned(TIGHT)
    known = result.searched
    assert known.bound is not None
    simpler = replace(known, role=PlanRole.SIMPLER)
    tied = replace(result, plans=(simpler, replace(known, name=FASTEST, role=PlanRole.FASTEST), *result.plans[1:]))
    slow = replace(known, cost=replace(known.cost, step_time_s=2 * known.cost.step_time_s), bound=1.01 * known.bound)
    monkeypatch.setattr(after_answer, "plan_model", lambda *_, **__: replace(result, plans=(slow,)))
    proven = prove(tied)
    assert [p.bound for p in proven.plans[:2]] == [1.01 * known.bound] * 2
    assert [p.name for p in proven.plans] == [p.name for p in tied.plans] and proven.plans[2:] == tied.plans[2:]


@pytest.mark.slow
def test_a_request_for_a_proof_gets_its_answer_first() -> None:
    shown: list[Plan] = []
    result = plan_model(replace(TIGHT, prove=True), show_first=shown.append, passes={"proof": pipeline.close_gap})
    (first,) = shown
    assert result.asked.prove and result.planner.effort is THOROUGH
    assert result.reasons == {"proof": "a search for a proof follows the first plan"}
    assert first.bound is not None and result.searched.bound is not None
    assert result.searched.bound >= first.bound * (1 - 1e-6)


def test_a_request_for_a_proof_keeps_the_better_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for a proof that ends at a slower plan leaves the first one, with the higher of the two bounds."""
    shown: list[Plan] = []
    drafts: list[pipeline.Draft] = []
    choose_step = pipeline.choose_step

    def choose_slower(asked: Request, *more: Any) -> pipeline.Draft:
        if not asked.prove:
            drafts.append(choose_step(asked, *more))
            return drafts[0]
        plan = drafts[0].chosen
        assert plan.bound is not None
        slower = replace(plan, cost=replace(plan.cost, step_time_s=2 * plan.cost.step_time_s), bound=1.01 * plan.bound)
        return replace(drafts[0], chosen=slower)

    monkeypatch.setattr(pipeline, "choose_step", choose_slower)
    request = replace(TIGHT, prove=True)
    result = plan_model(request, show_first=shown.append, passes={"proof": pipeline.close_gap})
    assert result.searched.cost == shown[0].cost and result.reasons["proof"].endswith("ends at a worse plan")
    assert shown[0].bound is not None and result.searched.bound == 1.01 * shown[0].bound


def test_what_an_earlier_request_took_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later request shares the graphs of an earlier planner, and has an allowance of points of its own: without any, its plan is slower."""
    request = replace(TIGHT, recompute="full", memory_gb=4.8)
    alone = plan_model(request, passes={})
    spent = alone.planner.changed(work=PointAllowance(0))
    later = plan_model(request, earlier_planner=spent, passes={})
    assert later.planner.effort == spent.effort and later.planner.graphs is spent.graphs
    assert (later.best.cost, later.best.bound) == (alone.best.cost, alone.best.bound)
    # An allowance that other requests had used up would show here: 70.67 ms instead of 70.57.
    monkeypatch.setattr(micro_batch_numbers, "PointAllowance", lambda points: spent.work)
    starved = plan_model(request, earlier_planner=spent, passes={})
    assert starved.best.cost.gpu_time_s > later.best.cost.gpu_time_s * (1 + 1e-6)


def test_the_first_plan_does_not_wait_for_the_search_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the plan of the search without proof, and its bound holds: it is not above that of the end."""
    events: list[object] = []
    search_exactly = choose.search_exactly
    monkeypatch.setattr(choose, "search_exactly", lambda *a: (events.append("to the end"), search_exactly(*a))[1])
    result = plan_model(replace(TIGHT, accumulate=None), show_first=events.append, passes={})
    first, then = events
    assert isinstance(first, Plan) and then == "to the end" and first.fits and first.bound is not None
    assert first.bound <= result.best.cost.gpu_time_s * (1 + 1e-6) and result.best.bound is not None
    assert result.best.cost.gpu_time_s <= first.cost.gpu_time_s * (1 + 1e-6)


def _note_plan(events: list[object]) -> Callable[[Planner, Plan], None]:
    return lambda _, plan: events.append(plan)


def test_where_nothing_can_fit_the_first_number_says_so() -> None:
    """The last number of micro-batches needs another capture of most models, so the plan that is shown does not wait for it."""
    events: list[object] = []
    request = Request("llama-3-8b", cluster="1x8-h100", layers=600, mesh="8", batch=16, seq=2048, accumulate=None)

    def search(planner: Planner, *args: Any, **options: Any) -> Plan:
        events.append(planner.workload.accumulate)
        return choose_mesh(planner, *args, **options)

    micro_batches.choose_micro_batches(request, None, lambda text: None, search=search, show_first=_note_plan(events))
    first, plan, *more = events
    assert first == 1 and isinstance(plan, Plan) and not plan.fits
    assert more and all(isinstance(number, int) for number in more), "one plan is shown"


def test_where_states_hardly_fit_the_first_mesh_says_that_nothing_fits_so_far() -> None:
    """Evenly shared states take 99.7 % of the memory, and what takes least of all plans 100.3 %."""
    events: list[object] = []
    request = Request("llama-3-8b", cluster="1x8-h100", layers=175, batch=16, seq=128, accumulate=None)

    def search(planner: Planner, options: Any, *args: Any, **limits: Any) -> Plan:
        events.append((planner.workload.accumulate, len(options)))
        return choose_mesh(planner, options, *args, **limits)

    with pytest.raises(KeyboardInterrupt):
        micro_batches.choose_micro_batches(
            request,
            None,
            lambda text: None,
            search=search,
            show_first=lambda _, plan: _note_and_stop(events)(plan),
        )
    searched, plan = events
    assert searched == (2, 1) and isinstance(plan, Plan) and not plan.fits


@pytest.mark.slow  # the test below shows it of meshes and numbers of a smaller model
def test_a_good_plan_is_shown_before_other_numbers_are_searched() -> None:
    """Its bound holds for these too, so it is no higher than that of the end. Memory is so tight that without recomputation only 16
    micro-batches seem to fit, which leave GPUs without a sample: these are not searched."""
    events: list[object] = []
    request = Request("llama-3-70b", cluster="2x8-h100", batch=16, accumulate=None, recompute="auto")

    def search(planner: Planner, *args: Any, **options: Any) -> Plan:
        events.append(planner.workload.accumulate)
        return choose_mesh(planner, *args, **options)

    _, plan = micro_batches.choose_micro_batches(
        request, None, lambda text: None, search=search, show_first=_note_plan(events)
    )
    (place,) = (k for k, event in enumerate(events) if isinstance(event, Plan))
    first = events[place]
    assert isinstance(first, Plan) and first.fits and {*events[:place]} == {1} and {1, 2} <= {*events[place + 1 :]}
    assert 16 not in events and plan.fits and plan.workload.accumulate == 1
    assert first.bound is not None and plan.bound is not None and first.bound < plan.bound
    assert plan.cost.gpu_time_s <= first.cost.gpu_time_s <= first.bound * (1 + MAX_SHOWN_GAP)


def test_a_good_plan_is_shown_before_other_meshes_are_searched() -> None:
    """Its bound holds for these and for all numbers too, so no plan is below it."""
    events: list[object] = []
    request = Request(
        "llama-3-8b", cluster="2x8-h100", layers=2, batch=16, accumulate=None, recompute="auto", memory_gb=6
    )

    def search(planner: Planner, options: Any, *args: Any, **limits: Any) -> Plan:
        events.append((planner.workload.accumulate, len(options)))
        return choose_mesh(planner, options, *args, **limits)

    _, plan = micro_batches.choose_micro_batches(
        request, None, lambda text: None, search=search, show_first=_note_plan(events)
    )
    (place,) = (k for k, event in enumerate(events) if isinstance(event, Plan))
    first = events[place]
    assert isinstance(first, Plan) and first.fits and events[place - 1 : place + 2 : 2] == [(2, 1), (2, 4)]
    assert first.bound is not None and first.bound <= plan.cost.gpu_time_s <= first.cost.gpu_time_s


def test_the_mesh_of_a_quick_plan_that_fits_is_known_before_a_search() -> None:
    """Of two layers and one micro-batch no plan fits in 5 GB; with four some do."""
    for number, some_fit in ((1, False), (4, True)):
        request = Request(
            "llama-3-8b", cluster="2x8-h100", layers=2, batch=16, accumulate=number, recompute="auto", memory_gb=5
        )
        planner = prepare_planner(request)
        mesh = mesh_of_quick_plan(planner, candidate_meshes(request, planner.cluster), lambda text: None)
        assert (mesh is not None) == some_fit
        assert mesh is None or choose_mesh(planner, [mesh], prove=False).fits


def test_cycles_are_collected_rarely_while_a_request_is_planned() -> None:
    before, while_planning = gc.get_threshold(), set[tuple[int, int, int]]()
    plan_model(SMALL, progress=lambda text: while_planning.add(gc.get_threshold()))
    assert while_planning == {RARE_COLLECTIONS}
    assert gc.get_threshold() == before


def test_that_nothing_fits_is_said_before_networks_of_several_axes_are_built() -> None:
    """The weights, gradients and states of 70 B parameters take more than eight GPUs have."""
    events: list[object] = []
    request = Request("llama-3-70b", cluster="1x8-h100", recompute="auto")
    with pytest.raises(KeyboardInterrupt):
        plan_model(request, progress=lambda text: events.append(str(text)), show_first=_note_and_stop(events))
    *said, first = events
    assert isinstance(first, Plan)
    assert not first.fits
    assert first.mesh.axis_sizes == (8,)
    assert not any("×" in str(text) for text in said)


def test_where_evenly_shared_states_do_not_fit_little_else_is_looked_at() -> None:
    """By how much other meshes, numbers of micro-batches and baselines exceed the memory takes longer than the answer. A proof looks at all."""
    told: list[str] = []
    request = Request("llama-3-70b", cluster="1x8-h100", recompute="auto", accumulate=None)
    found = plan_model(
        request, progress=lambda text: told.append(str(text)), passes={"baselines": pipeline.add_baselines}
    )
    (plan,) = found.plans
    assert not plan.fits and not plan.optimal
    assert not any("×" in text for text in told) and told.count("coarsen") == 1
    (quiet,) = plan_model(request, passes={"baselines": pipeline.add_baselines}).plans
    assert quiet.cost == plan.cost, "an answer depends on whether somebody listens"
    # Nothing is said of meshes that nobody looked at but what evenly shared states say.
    said = next(str(n.sentence) for n in plan.notes if n.kind is NoteKind.SHORTAGE)
    assert "any plan of one stage needs is at most" in said
    (why,) = note_missing_baselines(found.planner, request, ())
    assert str(why).startswith("no baseline is planned, since none can fit: evenly shared weights")
    proven, _ = micro_batches.choose_micro_batches(
        replace(request, prove=True), None, lambda text: told.append(str(text))
    )
    assert any("×" in text for text in told) and proven.effort is THOROUGH


def _note_and_stop(events: list[object]) -> Callable[[Plan], None]:
    def show(plan: Plan) -> None:
        events.append(plan)
        raise KeyboardInterrupt

    return show


def test_what_is_asked_of_a_result_leaves_its_planner_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions share a result, and ask for its candidates, its stages and its proof at once."""
    result = plan_model(TIGHT, passes=FIRST_PASSES)
    planner = result.planner
    before = planner.work.remaining, dict(planner.clock.seconds)
    assert result.candidates
    add_stages(result)
    monkeypatch.setattr(after_answer, "plan_model", lambda *args, **_: continued.append(args[-1]) or result)
    continued: list[Planner] = []
    prove(result)
    assert (planner.work.remaining, planner.clock.seconds) == before
    assert planner.networks.is_empty
    for held in ("networks", "work", "graphs", "clock"):
        assert getattr(continued[0], held) is not getattr(planner, held), held


def test_graphs_that_a_copy_opens_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "has_snapshot", lambda *_: False)
    monkeypatch.setattr(batches, "open_model", lambda *_, **sizes: SimpleNamespace(workload=sizes))
    graphs = batches.BatchGraphs()
    first = graphs.open("llama-3-8b", batch=2, seq=8, dtype="bfloat16", layers=1)
    other = graphs.copy()
    assert other.open("llama-3-8b", batch=2, seq=8, dtype="bfloat16", layers=1) is first
    other.open("llama-3-8b", batch=2, seq=16, dtype="bfloat16", layers=1)
    assert graphs.open("llama-3-8b", batch=2, seq=8, dtype="bfloat16", layers=1) is first
