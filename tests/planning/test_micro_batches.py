"""How many micro-batches, and what is recomputed: the search's choice is the best of all that could be asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from planner_core.core import RECOMPUTE, ZERO, NoPlanFits, Note, NoteKind, P, Plan, R, Shard
from planner_core.planning import Request, plan_model
from planner_core.planning.fitting.front import exact_front
from planner_core.planning.fitting.mesh_search import _find_missed_plan, _ranked_problems, with_lower_bound
from planner_core.planning.fitting.micro_batch_numbers import MicroBatchCandidate
from planner_core.planning.fitting.micro_batches import (
    bound_on_mesh,
    choose_micro_batches,
)
from planner_core.planning.methods import METHODS, describe_least, parse_layout
from planner_core.planning.planner import candidate_meshes, prepare_planner
from planner_core.planning.request import THOROUGH
from planner_core.search import TIE, search_within_budget
from planner_core.verification.api import verify
from tests.support.plans import searched, with_ample_memory

# The budgets below are tight for pure bf16.
ASKED = Request(
    "llama-3-8b", cluster="1x8-h100", batch=16, seq=2048, layers=2, accumulate=None, recompute="auto", precision="pure"
)


def best(request: Request) -> Plan | None:
    """The best plan, or None where nothing fits."""
    try:
        found = searched(request)
    except NoPlanFits:
        return None
    return found if found.fits else None


TIGHT = [("8", 5.0), *(pytest.param(None, gb, marks=pytest.mark.slow) for gb in (3.6, 5.0, 7.0))]
"""Mesh and memory: neither all samples at once nor one at a time is best."""


@pytest.mark.parametrize(("mesh", "gb"), TIGHT)
def test_the_choice_is_the_best_of_all_counts(mesh: str | None, gb: float) -> None:
    free = best(replace(ASKED, memory_gb=gb, mesh=mesh))
    each = {n: best(replace(ASKED, memory_gb=gb, mesh=mesh, accumulate=n)) for n in (1, 2, 4, 8, 16)}
    assert free is not None and any(each.values())
    # The search minimises the GPU's own part of a step: of four micro-batches it is less than of two, and the step with its waits is more.
    plans = [p for p in each.values() if p is not None]
    least_work, shortest = (
        min(plans, key=lambda p, name=name: getattr(p.cost, name)) for name in ("gpu_time_s", "step_time_s")
    )
    assert free.bound is not None and free.bound <= least_work.cost.gpu_time_s * (1 + 1e-6)
    # Numbers below that of the least work are planned without a proof.
    assert free.cost.step_time_s <= shortest.cost.step_time_s * (1 + (1e-5 if shortest is least_work else 5e-3))
    assert each[free.workload.accumulate] is not None


@pytest.mark.parametrize(("mesh", "gb"), TIGHT)
@pytest.mark.parametrize(
    "fixed",
    ["none", pytest.param("keep-matmuls", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.slow)],
)
def test_leaving_recomputation_open_is_never_worse(mesh: str | None, gb: float, fixed: str) -> None:
    free, bound = (best(replace(ASKED, memory_gb=gb, mesh=mesh, recompute=r)) for r in ("auto", fixed))
    assert free is not None
    if bound is None:
        return
    # A proven choice is no worse. One that is not says how much better another plan may be at most.
    assert free.bound is not None and free.bound <= bound.cost.step_time_s * (1 + 1e-6)
    assert free.cost.step_time_s <= bound.cost.step_time_s * (1 + (1e-6 if free.optimal else 1e-3))


@pytest.mark.slow
def test_more_memory_is_never_worse() -> None:
    found = [best(replace(ASKED, memory_gb=gb, mesh="8")) for gb in (3.6, 5.0, 10.0, 60.0)]
    seconds = [p.cost.step_time_s for p in found if p is not None]
    assert len(seconds) >= 3 and seconds[-1] < seconds[0] and all(b <= a * (1 + 1e-6) for a, b in pairwise(seconds))


def test_weights_are_gathered_in_every_micro_batch_and_gradients_summed_once() -> None:
    """FSDP gathers in every micro-batch; data parallelism sums the gradients of all of them once."""

    def num_bytes(layout: str, accumulate: int, kinds: tuple[str, ...]) -> int:
        asked = replace(
            ASKED,
            cluster=with_ample_memory("1x8-h100"),
            batch=32,
            accumulate=accumulate,
            recompute="none",
            memory_gb=500.0,
        )
        stated = prepare_planner(asked).stated(parse_layout(layout))
        assert stated.workload.accumulate == accumulate
        return sum(t.num_bytes for t in stated.cost.traffic if t.kind in kinds)

    sums = [num_bytes("dp=8", n, ("all_reduce", "reduce_scatter")) for n in (1, 4)]
    assert sums[0] == pytest.approx(sums[1], rel=0.05)
    gathers = [num_bytes("fsdp=8", n, ("all_gather",)) for n in (1, 4)]
    assert gathers[1] == pytest.approx(4 * gathers[0], rel=0.05)


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.slow  # verification/test_verify.py shows it of three layouts of two micro-batches, and of a searched plan
def test_what_accumulates_takes_the_predicted_memory_and_traffic(accumulate: int) -> None:
    asked = Request("gpt2-xl", cluster="1x8-h100", batch=64, layers=2, accumulate=accumulate)
    found = verify(searched(asked))
    assert found["collectives_ok"] and found["memory_bytes"]["rel_error"] < 0.01, found["memory_bytes"]


@pytest.mark.slow
def test_two_million_tokens_of_a_70_b_model_fit_on_64_gpus() -> None:
    asked = Request("llama-3-70b", cluster="8x8-h100", batch=512, seq=4096, accumulate=None, recompute="auto")
    found = plan_model(asked)
    assert found.best.fits
    # The bound leaves out the recomputed layer at work, whose 2.2 GB are worth 0.6 % of the step; the rest is between sum and peak. The
    # gap was 0.91 % when this was written. One micro-batch cannot fit; bounded by its plan of any memory, it left a gap of 27 %.
    assert found.searched.optimal or float(str(found.searched.notes[0]).split("at most ")[1].split(" %")[0]) < 1
    assert found.best.workload.accumulate > 1
    assert {b.recompute for label, b in found.best.blocks.items() if label} <= set(RECOMPUTE[1:])


@pytest.mark.slow
def test_the_least_memory_is_that_of_the_smallest_micro_batches() -> None:
    """Where nothing fits however the batch is cut, what is said is needed is less than in one micro-batch."""
    needs = []
    for accumulate in (1, None):
        asked = Request("gpt2-xl", cluster="1x8-h100", batch=64, layers=1, accumulate=accumulate, memory_gb=0.1)
        with pytest.raises(NoPlanFits) as refused:
            plan_model(asked)
        needs.append(refused.value.needed_bytes)
    assert needs[1] < needs[0]


def test_where_nothing_can_fit_only_the_first_number_and_the_last_are_looked_at() -> None:
    told: list[str] = []
    asked = replace(ASKED, layers=600, mesh="8")
    _, plan = choose_micro_batches(asked, None, told.append)
    assert not plan.fits and told.count("coarsen") == 2
    each = [choose_micro_batches(replace(asked, accumulate=n), None, lambda text: None)[1] for n in (1, 2, 4, 8, 16)]
    assert plan.cost.memory_bytes["peak"] == min(p.cost.memory_bytes["peak"] for p in each)


@pytest.mark.parametrize(
    "asked",
    [{"method": "tap"}, {"objective": "communication"}, {"objective": "communication", "mesh": "8"}],
    ids=["tap", "communication", "communication on one mesh"],
)
@pytest.mark.slow(but=("communication on one mesh",))
def test_the_least_communication_is_that_of_the_first_number_that_fits(asked: dict[str, str]) -> None:
    request = replace(ASKED, layers=1, memory_gb=3.0, **asked)  # type: ignore[arg-type]

    def settled(accumulate: int | None) -> Plan:
        return choose_micro_batches(replace(request, accumulate=accumulate), None, lambda text: None)[1]

    with pytest.raises(NoPlanFits):
        settled(2)
    free, fixed = settled(None), settled(4)
    assert free.fits and free.workload.accumulate == 4
    assert free.cost.comm_time_s == pytest.approx(fixed.cost.comm_time_s, rel=1e-5)


@pytest.mark.parametrize("method", ["exact", "tap", "taps"])
def test_the_value_of_a_plan_is_that_of_its_search(method: str) -> None:
    planner = prepare_planner(replace(ASKED, method=method, accumulate=2, recompute="none"))
    how, mesh = METHODS[method], candidate_meshes(planner.request, planner.cluster)[1]
    problem = planner.problem(planner.cost_model(mesh, zero=how.zero, by_volume=how.by_volume), uniform=how.uniform)
    objective = how.objective or "time"
    answer = search_within_budget(problem, objective=objective)
    plan = planner.plan(problem, answer, "best", method, objective)
    assert planner.value(plan) == pytest.approx(answer.value, rel=1e-6)


def test_a_gradient_that_is_cut_before_it_is_scattered_is_divided_in_neither_sum() -> None:
    """On 4 x 128 the gradient of the embedding goes from (R, P) to (P, S(0)) by a cut on the first axis, a scatter on the second and zeros in
    the cut parts. The network priced a division of the whole gradient as well, so that its bound was above the plan."""
    asked = Request("gpt2-xl", cluster="64x8-h100", mesh="4x128", batch=256, seq=1000, layers=2)
    planner = prepare_planner(asked)
    problem = planner.problem(candidate_meshes(planner.request, planner.cluster)[0])
    answer = search_within_budget(problem)
    plan = planner.plan(problem, answer, "best", "exact", "time")
    ways = [e.backward for b in plan.blocks.values() for s in b.sites.values() for e in s.inputs]
    assert any([(step.src, step.dst) for step in way][::2] == [(R, Shard(1)), (Shard(1), P)] for way in ways)
    assert planner.value(plan) == pytest.approx(answer.value, rel=1e-6)


@pytest.mark.parametrize("gb", [500.0, 10.0])
def test_a_stage_that_is_left_open_is_no_worse_than_any(gb: float) -> None:
    """One network holds all stages, so the plan may give each weight its own."""
    request = Request("llama-3-8b", cluster=with_ample_memory("1x8-h100"), batch=16, seq=2048, layers=1, memory_gb=gb)
    seconds, bounds = {}, {}
    for zero in (None, 3, 2, 1):
        planner, plan = choose_micro_batches(replace(request, zero=zero), None, lambda text: None)
        assert plan.fits and plan.bound is not None and plan.workload.zero == (zero or max(ZERO))
        seconds[zero], bounds[zero] = planner.value(plan), plan.bound
    assert seconds[None] <= min(seconds.values()) * (1 + TIE)
    assert all(bounds[None] <= least * (1 + TIE) for least in (*bounds.values(), *seconds.values()))


@pytest.mark.slow
def test_the_front_holds_the_fronts_of_all_stages() -> None:
    request = Request("llama-3-8b", cluster="1x8-h100", mesh="8", batch=16, seq=2048, layers=1)

    def points(zero: int | None) -> list[tuple[float, float]]:
        planner = prepare_planner(replace(request, zero=zero))
        found, exact = exact_front(planner, candidate_meshes(planner.request, planner.cluster), "time")
        assert exact
        return [(p.cost_s, p.memory_bytes) for p in found]

    every = points(None)
    for zero in (1, 2, 3):
        for seconds, held in points(zero):
            assert any(s <= seconds * (1 + 1e-6) and m <= held * (1 + 1e-6) for s, m in every)


def test_a_lower_bound_of_a_larger_space_replaces_the_gap_and_no_other_note() -> None:
    """A plan of a restricted search has a note about its space beside the one about its gap."""
    request = Request("gpt2-xl", cluster="1x8-h100", layers=1)
    planner, best = prepare_planner(request), searched(request)
    scope, old = Note("a mesh was left out", NoteKind.SCOPE), Note("at most 1 % above", NoteKind.GAP)
    value = planner.value(best)
    plan = replace(best, optimal=False, bound=value / 1.01, notes=(scope, old))
    lower = with_lower_bound(planner, plan, value / 1.1)
    assert [note.kind for note in lower.notes] == [NoteKind.GAP, NoteKind.SCOPE]
    assert "at most 10 % above" in lower.notes[0].sentence and lower.bound == value / 1.1


GAPS = pytest.mark.parametrize(
    ("method", "objective", "least"),
    [
        ("taps", "communication", "least communication time that TAPS admits with its micro-batches and recomputation"),
        ("alpa", "time", "least communication time that Alpa-like admits with its micro-batches and recomputation"),
        ("tap", "time", "least bytes that TAP admits with its micro-batches and recomputation"),
        ("exact", "communication", "least communication time with its micro-batches and recomputation"),
        ("exact", "time", "best there is"),
    ],
    ids=["taps", "alpa", "tap", "communication", "time"],
)


@GAPS
def test_the_least_is_of_the_methods_own_plans(method: str, objective: str, least: str) -> None:
    """Of Alpa-like was said "at most 0.29 % above the least communication time possible" beside rows with much less of it."""
    assert describe_least(method, METHODS[method].objective or objective) == least


@GAPS
@pytest.mark.slow(but=("taps",))
def test_a_gap_says_what_its_bound_is_the_least_of(method: str, objective: str, least: str) -> None:
    """Of TAPS was said "the best there is", if the plan was one that the free choice of recomputation had missed."""
    asked = {"memory_gb": 14.0, "method": method, "objective": objective, "recompute": "auto"}
    request = Request("llama-3-8b", "1x8-h100", layers=1, seq=1024, batch=8, mesh="8", **asked)
    planner = prepare_planner(request)
    aim, options = planner.objective(), candidate_meshes(request, planner.cluster)
    (rough, *_), _ = ranked = _ranked_problems(planner, options, METHODS[method], lambda text: None, math.inf)
    answer = planner.solve(rough.problem, aim)
    open_gap = replace(answer, bound=answer.value / 1.1)
    found = planner.plan(rough.problem, open_gap, "best", method, aim)
    lower = with_lower_bound(planner, found, planner.value(found) / 1.5)
    limits = 2 * answer.value, answer.value / 2
    missed = _find_missed_plan(
        replace(planner, effort=THOROUGH), *limits, ranked[0], METHODS[method], lambda text: None
    )
    assert missed and "50 %" in lower.notes[0].sentence
    for plan in (found, lower, missed):
        assert plan.notes[0].kind is NoteKind.GAP and str(plan.notes[0].sentence).endswith(f" % above the {least}")


def test_the_gap_of_a_baseline_is_of_its_own_plans_on_its_mesh() -> None:
    least = describe_least("hf-expert", "time")
    assert least == "best that hf-expert admits on its mesh with its micro-batches and recomputation"


@pytest.mark.parametrize(
    ("model", "gpus", "tool", "batch", "number"), [("mixtral-8x7b", 8, None, 4, 2), ("llama-3-8b", 4, "megatron", 6, 2)]
)
def test_a_mesh_is_left_out_by_what_bounds_all_multiples_of_a_number(
    model: str, gpus: int, tool: str | None, batch: int, number: int
) -> None:
    """Context ranks split the tokens of one sample through a view that joins samples and tokens, and those of two do not. With two micro-batches
    on the mesh of 2 x 2 the least step was 463 ms, and with six 433 ms: so a mesh was left out on which a multiple was better."""
    cluster = with_ample_memory(f"1x8-h100:gpus={gpus}")
    asked = Request(model, cluster=cluster, tool=tool, batch=batch, seq=16384, layers=2, zero=None)
    few, many = (prepare_planner(replace(asked, accumulate=n)) for n in (number, batch))
    count = MicroBatchCandidate.of(few, candidate_meshes(asked, few.cluster))
    least = {mesh: bound_on_mesh(many, mesh) for mesh in count.options}
    assert all(bound_on_mesh(count.bounding, mesh) <= least[mesh] * (1 + TIE) for mesh in count.options)
    # Without the larger space this does not hold.
    assert any(bound_on_mesh(few, mesh) > least[mesh] * (1 + TIE) for mesh in count.options)
