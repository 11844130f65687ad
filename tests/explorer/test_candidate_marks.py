"""Candidates as points, ties, pins and the shelf of results."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from explorer.address import pins, settings
from explorer.analysis import candidate_marks as marks
from explorer.figures import plans_chart, scatter
from explorer.figures.palette import LIGHT
from explorer.jobs.result_cache import ResultCache
from planner_core.core import Unreadable
from planner_core.planning import plan_ids
from planner_core.planning.pipeline import Result
from planner_core.planning.pricing import load_own_runs, load_published_runs
from planner_core.planning.request import Request
from planner_core.search.candidates.scoring import Candidates
from tests.support.plans import planned


@pytest.fixture(scope="module")
def result() -> Result:
    return planned(Request("llama-3-8b", zero=3))


@pytest.fixture(scope="module")
def plans(result: Result) -> dict[str, Any]:
    return plan_ids(result.plans)


def made_up(n: int) -> Candidates:
    """Candidates of nine weights with costs that differ all."""
    random = np.random.default_rng(0)
    grid = np.indices((3,) * 11, dtype=np.int8).reshape(11, -1).T[:n]
    names = tuple(f"w{k}.weight" for k in range(11))
    comm, memory = random.random(n), random.random(n) * 2**33
    return Candidates("Block", names, grid, comm, memory, np.zeros(n, dtype=bool), 8, 4)


# --- candidates --------------------------------------------------------------------------------------


def test_marks_hold_every_candidate_once(result: Result) -> None:
    (found,) = result.candidates
    running = np.isfinite(found.comm_s).sum()
    drawn = marks.group_by_cost(found)
    assert drawn.count.sum() == running and len(drawn.first) < running
    for first, count in list(zip(drawn.first, drawn.count, strict=True))[:20]:
        assert len(marks.find_equal_cost(found, int(first))) == count
        assert first in marks.find_equal_cost(found, int(first))


def test_a_plan_is_found_among_the_candidates() -> None:
    found = planned(Request("llama-3-8b", mesh="2x8"))
    ((block,), plans) = found.candidates, plan_ids(found.plans)
    like = {n: marks.candidate_of_plan(block, p) for n, p in plans.items()}
    for name, index in like.items():
        if index is not None:
            params = plans[name].blocks["LlamaDecoderLayer"].params
            placed = [marks.PLACEMENTS[c] for c in block.choice[index]]
            assert placed == [str(params[w].working[-1]) for w in block.weights]
    assert like["megatron-lm"] is not None
    gathering = [n for n, p in plans.items() if any(x.gathered for x in p.blocks["LlamaDecoderLayer"].params.values())]
    assert gathering and all(like[n] is None for n in gathering), "no candidate gathers weights"


def test_a_plan_on_another_axis_is_no_candidate(result: Result) -> None:
    (block,) = result.candidates
    others = [p for p in result.plans if p.mesh.axis_sizes[-1] != block.axis_size]
    assert others and not any(marks.candidate_of_plan(block, p) is not None for p in others)


@pytest.mark.parametrize("n", [2187, 59_049, 100_000])
def test_a_large_scatter_is_drawn_by_webgl_with_every_mark(n: int) -> None:
    found = made_up(n)
    figure = scatter.candidates_scatter(found, None, 80 * 2**30, LIGHT)
    assert figure.data[0].type == "scattergl" and len(figure.data[0].x) == n


def test_every_published_run_has_one_colour() -> None:
    """A kind that begins with no family's words was left out of the figure without a word."""
    kinds = sorted(kind for kinds in scatter.KINDS_OF_FAMILY.values() for kind in kinds)
    assert sorted({r.kind for r in (*load_published_runs(), *load_own_runs())}) == kinds
    assert scatter.KINDS_OF_FAMILY.keys() == scatter.FAMILY_COLOURS.keys()


# --- ties ----------------------------------------------------------------------------------------------


def test_ties_are_those_within_the_error_and_fit(plans: dict[str, Any]) -> None:
    near = marks.find_ties(plans)
    best = min(p.cost.step_time_s for p in plans.values() if p.fits)
    assert set(near) == {n for n, p in plans.items() if p.fits and p.cost.step_time_s <= 1.05 * best}
    assert marks.find_ties({"a": plans[near[0]]}) == []


def test_the_chart_rings_the_ties(plans: dict[str, Any]) -> None:
    points = plans_chart.draw_plans(plans, "best", 80 * 2**30)["points"]
    ringed = {p["id"] for p in points if p["tie"]}
    assert ringed == set(marks.find_ties(plans)) and len(ringed) > 1


# --- pins ------------------------------------------------------------------------------------------------


def test_a_pin_holds_its_settings() -> None:
    values, _ = settings.parse_query(
        {"batch": "32", "nodes": "4", "memory": "40.5", "show": "flops", "model": "gpt2-xl"}
    )
    text = pins.format_pin("fsdp", values)
    assert "," not in text and "show" not in text
    name, found = pins.parse_pin(text, values)
    assert name == "fsdp" and settings.build_request(found) == settings.build_request(values)
    assert pins.describe_changes(found, values) == ""
    here, _ = settings.parse_query({"model": "gpt2-xl", "recompute": "full"})
    told = pins.describe_changes(found, here)
    assert "batch 32" in told and "4 nodes" in told and "recomputation as needed" in told


def test_micro_batches_and_recomputation_are_open_as_they_are_for_the_command_line() -> None:
    """Of methods the page took one micro-batch without recomputation, where `compare` takes those of the best plan: of Llama-3-70B on 32
    GPUs Alpa-like fitted in the one and not in the other."""
    asked = {
        k: settings.build_request(settings.parse_query(a)[0])
        for k, a in {
            "time": {},
            "tap": {"method": "tap"},
            "communication": {"objective": "communication"},
            "told": {"method": "tap", "accumulate": "4", "recompute": "full"},
        }.items()
    }
    assert all((asked[k].accumulate, asked[k].recompute) == (None, "auto") for k in ("time", "tap", "communication"))
    assert (asked["told"].accumulate, asked["told"].recompute) == (4, "full")


@pytest.mark.parametrize("text", ["best@model:gpt2-xl", "best@nonsense:1", "best@batch:-4", "best@show:flops"])
def test_a_broken_pin_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        pins.parse_pin(text, settings.parse_query({})[0])


def test_changes_of_the_cluster_reach_the_request() -> None:
    values, problems = settings.parse_query({"nodes": "4", "inter": "62.5"})
    assert not problems
    assert settings.build_request(values).cluster == "2x8-h100:nodes=4,inter=62.5"
    assert hash(settings.build_request(values)) == hash(
        settings.build_request(settings.parse_query(settings.to_query(values))[0])
    )


# --- the shelf -------------------------------------------------------------------------------------------


def test_a_shelf_forgets_the_least_recently_used() -> None:
    shelf: ResultCache[int, int] = ResultCache(2)
    for key in (1, 2, 1, 3):
        shelf.get(key, lambda k=key: 10 * k)
    assert (shelf.peek(1), shelf.peek(2), shelf.peek(3), len(shelf)) == (10, None, 30, 2)


def test_one_makes_and_the_others_wait() -> None:
    shelf: ResultCache[str, int] = ResultCache(4)
    made, waited = [], []
    go = threading.Event()

    def make() -> int:
        made.append(1)
        go.wait()
        return 7

    threads = [threading.Thread(target=lambda: shelf.get("a", make, lambda: waited.append(1))) for _ in range(4)]
    for t in threads:
        t.start()
    while not waited:
        time.sleep(0.01)
    go.set()
    for t in threads:
        t.join()
    assert len(made) == 1 and shelf.peek("a") == 7


def test_what_is_stopped_leaves_nothing_behind() -> None:
    shelf: ResultCache[str, int] = ResultCache(4)

    class Stopped(BaseException):
        pass

    def stop() -> int:
        raise Stopped

    with pytest.raises(Stopped):
        shelf.get("a", stop)
    assert shelf.get("a", lambda: 3) == 3
