"""No sentence about a plan contradicts its numbers: every model of the zoo, cluster and method, judged by arithmetic."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from explorer.analysis import candidate_marks, step_parts
from explorer.text import recipe, words
from explorer.text.option_words import page_wording
from planner_core.core import (
    BlockLabel,
    InputError,
    NoPlanFits,
    Plan,
    Sentence,
    Shard,
    cluster_names,
    memory_amount,
    time_amount,
)
from planner_core.models import ZOO
from planner_core.planning import METHODS, Request, Result, plan_ids, prepare_planner
from planner_core.planning.analysis import ablation_steps, exact_step
from tests.support.plans import planned

QUICK = {("gpt2-xl", "1x8-h100", "exact"), ("gpt2-xl", "2x8-v100-eth", "exact")}
EXPERTS = re.compile(r"expert parallel over (\d+) of the same GPUs")
DEGREES = re.compile(r"(?:over|parallel|on) (\d+)")


def cases() -> list[object]:
    """Every model by every method on two nodes, and one model on every cluster by the search; only a handful in the quick run."""
    methods = [(m, "2x8-h100", method) for m in ZOO for method in METHODS]
    clusters = [("gpt2-xl", c, "exact") for c in cluster_names() if c not in ("2x8-h100", "64x8-h100")]
    return [
        pytest.param(case, id=", ".join(case), marks=() if case in QUICK else pytest.mark.slow)
        for case in (*methods, *clusters)
    ]


@pytest.fixture(scope="module", params=cases())
def result(request: pytest.FixtureRequest) -> Result:
    model, cluster, method = request.param
    depth = ZOO[model].depth
    dtype = "float16" if "v100" in cluster else "bfloat16"
    try:
        return planned(Request(model, cluster=cluster, method=method, dtype=dtype, layers=4 if depth else None))
    except NoPlanFits:
        pytest.skip("no plan fits")


def test_what_a_sentence_calls_split_gathered_or_whole_is(result: Result) -> None:
    for plan in result.plans:
        for axis in range(len(plan.mesh.axis_sizes)):
            said = {way: words.name_weights(plan, axis, way) for way in words.PLACEMENT_KINDS}
            for family, ways in placed(plan, axis).items():
                assert all(family not in said[way] or set(ways) == {way} for way in words.PLACEMENT_KINDS), (
                    plan.name,
                    axis,
                    family,
                    said,
                )
                for way, leaves in ways.items():
                    told = {family, f"most of {family}", *leaves} & set(said[way]) or [
                        s for s in said[way] if s.split(" of ")[0] in leaves
                    ]
                    assert told, (plan.name, axis, family, way, said)


def placed(plan: Plan, axis: int) -> dict[str, dict[str, set[str]]]:
    """Family -> how its matrices lie on an axis, read from the placements -> the matrices' names."""
    found: dict[str, dict[str, set[str]]] = {}
    for block in plan.blocks.values():
        for name, param in block.params.items():
            if words.is_vector(name):
                continue
            way = (
                "gathered" if axis in param.gathered else "split" if isinstance(param.working[axis], Shard) else "whole"
            )
            found.setdefault(words.family(name), {}).setdefault(way, set()).add(
                name.removesuffix(".weight").rpartition(".")[2]
            )
    return found


def test_degrees_of_a_recipe_make_up_all_gpus(result: Result) -> None:
    """Experts are dealt out over GPUs that another degree counts."""
    for plan in result.plans:
        axes = (
            recipe.describe_layout(plan).partition(" with ")[0]
            if "sequence" not in recipe.describe_layout(plan)
            else recipe.describe_layout(plan)
        )
        axes = axes.replace(" with sequence parallelism", "").partition(" with ")[0]
        experts = EXPERTS.findall(axes)
        assert all(plan.mesh.num_devices % int(n) == 0 for n in experts) and len(experts) <= 1
        axes = EXPERTS.sub("", axes)
        assert math.prod(int(n) for n in DEGREES.findall(axes)) == plan.mesh.num_devices, recipe.describe_layout(plan)


def test_fits_is_what_the_drawn_line_says(result: Result) -> None:
    for plan in result.plans:
        assert plan.fits == (plan.cost.memory_bytes["peak"] <= result.cluster.gpu.memory_bytes * 0.92)
        assert plan.fits == (plan.cost.memory_bytes["peak"] <= step_parts.memory_limit_bytes(result))


def test_parts_of_a_step_are_no_more_than_it_and_add_up(result: Result) -> None:
    for plan in result.plans:
        parts = step_parts.split_step(plan, result.graph, result.coarse)
        assert set(parts) == set(step_parts.ALL_PARTS)
        assert sum(parts.values()) == pytest.approx(plan.cost.step_time_s, rel=1e-9)
        assert max(parts.values()) <= plan.cost.step_time_s and min(parts.values()) > -1e-9


def test_a_headline_says_who_is_faster(result: Result) -> None:
    plans = plan_ids(result.plans)
    for name, plan in plans.items():
        for other in plans.values():
            a, b = plan.cost.step_time_s, other.cost.step_time_s
            text = words.compare_steps(plan, other)
            assert ("tie in time" in text) == (max(a, b) <= min(a, b) * (1 + words.time_doubt(plan, other)))
            if "tie in time" not in text:
                assert text.startswith(f"{words.capitalize(words.title_in_sentence(plan if a < b else other))} takes")
            assert ("not fit" in text) == (not plan.fits or not other.fits)
        if len(plans) > 1:
            against = plans[step_parts.fastest_other(plans, name)]
            assert all(
                against.cost.step_time_s <= p.cost.step_time_s
                for n, p in plans.items()
                if n != name and p.fits >= against.fits
            )


def test_candidates_that_are_called_the_chosen_plans_place_as_it_does(result: Result) -> None:
    for found in result.candidates:
        for plan in result.plans:
            if candidate_marks.candidate_of_plan(found, plan) is not None:
                blocks = [b for label, b in plan.blocks.items() if BlockLabel.parse(label).block == found.block]
                assert not any(b.params[w].gathered for b in blocks for w in found.weights if w in b.params)


def test_memory_is_told_in_one_unit(result: Result) -> None:
    for plan in result.plans:
        for note in plan.notes:
            assert not re.search(r"\d GB(?!/)", page_wording(note)), page_wording(note)
    needed = memory_amount(93.7e9)
    assert page_wording(InputError("the least memory that any plan needs is ", needed, " per GPU; use 50 GB/s")) == (
        "The least memory that any plan needs is 87.3 GiB per GPU; use 50 GB/s."
    )


@pytest.mark.parametrize(
    ("seconds", "in_python", "on_the_page"),
    [(0.20493, "204.9 ms", "205 ms"), (6.68512, "6.685 s", "6.69 s"), (38.387, "38.39 s", "38.4 s")],
)
def test_times_of_a_note_have_three_digits_on_the_page(seconds: float, in_python: str, on_the_page: str) -> None:
    note = Sentence("the GPU waits ", time_amount(seconds))
    assert note == f"the GPU waits {in_python}"
    assert page_wording(note) == f"The GPU waits {on_the_page}."


def test_the_notes_of_a_result_have_at_most_three_digits(result: Result) -> None:
    for note in (*result.notes, *(n for p in result.plans for n in p.notes)):
        assert not re.search(r"[1-9]\.\d{3}|\d{3}\.\d|e\+\d", page_wording(note)), page_wording(note)


@pytest.mark.parametrize(
    ("model", "cluster", "method"),
    [
        pytest.param(m, c, method, marks=() if (m, c, method) == ("gpt2-xl", "1x8-h100", "tap") else pytest.mark.slow)
        for m in ("gpt2-xl", "llama-3-8b", "llama-3-70b", "mixtral-8x7b")
        for c in ("1x8-h100", "2x8-h100", "8x8-h100")
        for method in METHODS
        if method != "exact"
    ],
)
def test_no_part_of_a_methods_price_is_larger_than_the_whole(model: str, cluster: str, method: str) -> None:
    request = Request(model, cluster=cluster, layers=4)
    best = planned(replace(request, prove=True)).searched
    found = [exact_step(best), *ablation_steps(prepare_planner(request), method)]
    text = words.describe_restrictions(method, [(r.says, r.plan) for r in found])
    known = [r.plan for r in found if r.plan is not None]
    whole = known[-1].cost.step_time_s - known[0].cost.step_time_s
    part = re.search(r"because it .*\(([\d.]+) (s|ms|µs) a step\)", text)
    if part is not None:
        assert float(part[1]) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[part[2]] <= whole * 1.01
    unsure = words.time_doubt(known[0], known[-1]) * known[0].cost.step_time_s
    falls = any(b.cost.step_time_s < a.cost.step_time_s - unsure for a, b in pairwise(known) if a.fits and b.fits)
    assert ("may be shorter than in the row above" in text) == falls
    assert ("needs least of it" in text) == any(not p.fits for p in known)
