"""The first page says how far an unproven plan may be from the best, and settles once the proof is there."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from explorer.address import settings
from explorer.session import later_searches, shared_plans
from explorer.session.later_searches import LESS_MEMORY_SEARCH, PROOF_SEARCH, STAGES_SEARCH, LaterSearch
from planner_core.core import Plan
from planner_core.planning import LESS_MEMORY, Progress, Request, Result, add_less_memory
from tests.pages.test_app import open_page
from tests.support.app_test import AppTest
from tests.support.plans import planned

ENTRY = Path(__file__).resolve().parents[2] / "streamlit_app.py"
"""The whole app: a page alone knows no other page to link to."""
REQUEST = {"model": "llama-3-8b", "cluster": "1x8-h100", "layers": "2", "batch": "64", "seq": "4096"}


def unproven(plan: Plan) -> Plan:
    return replace(plan, optimal=False, bound=plan.cost.step_time_s / 1.02)


@pytest.fixture(autouse=True)
def _nothing_behind_the_answer() -> Iterator[None]:
    """Here they are searched, and nothing of these results may reach another test."""
    yield
    shared_plans._plans.clear()
    later_searches._results.clear()


@pytest.fixture
def proven() -> Result:
    found = planned(Request("llama-3-8b", cluster="1x8-h100", layers=2, batch=64, seq=4096))
    assert found.searched.optimal
    return replace(found, reasons={**found.reasons, LESS_MEMORY: "searched"})  # else that search comes first


def captions(at: AppTest) -> str:
    return " ".join(c.value for c in at.caption).replace("\\", "")


def what_of_rows(at: AppTest) -> str:
    """What stands below the names in the table of plans."""
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_plans")
    return " | ".join(row["what"] for row in json.loads(drawn.json)["rows"])


def run_after(at: AppTest, search: LaterSearch) -> None:
    """Draw the page anew once its background search has ended, however long that takes.

    A run during which it ends takes the line of the search away and still draws the old table.
    """
    while not at.session_state["jobs"][search.name].done:
        time.sleep(0.01)
    at.run()
    assert not at.exception


def improve_by(
    monkeypatch: pytest.MonkeyPatch, search: LaterSearch, improve: Callable[[Result, Progress], Result]
) -> None:
    """Let a search behind the answer return what `improve` does."""
    others = [replace(one, improve=improve) if one is search else one for one in later_searches.SEARCHES]
    monkeypatch.setattr(later_searches, "SEARCHES", tuple(others))


def opened(monkeypatch: pytest.MonkeyPatch, first: Result) -> AppTest:
    monkeypatch.setattr(shared_plans, "plan_model", lambda *_, **__: first)
    at = AppTest.from_file(ENTRY)
    for key, text in REQUEST.items():
        at.query_params[key] = text
    at.run()
    assert not at.exception
    return at


def test_the_line_settles_when_the_gap_is_closed(monkeypatch: pytest.MonkeyPatch, proven: Result) -> None:
    first = replace(proven, plans=tuple(map(unproven, proven.plans)))
    ready: list[bool] = []

    def prove(result: Result, progress: Progress) -> Result:
        assert result.plans is first.plans
        while not ready:
            progress("search on 8 world")
            time.sleep(0.01)
        return proven

    improve_by(monkeypatch, PROOF_SEARCH, prove)
    at = opened(monkeypatch, first)
    assert "Proving the best plan" in captions(at)
    assert "the best plan, at most 2 % above the bound" in what_of_rows(at)
    ready.append(True)
    run_after(at, PROOF_SEARCH)
    assert "the best plan, proven" in what_of_rows(at) and "Proving" not in captions(at)
    known = shared_plans.known_result(state_request(at))
    assert known is not None and known.plans is proven.plans


def delay_less_memory(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the search for less memory wait for the event that is returned."""
    drawn = threading.Event()

    def search(result: Result, progress: Progress) -> Result:
        drawn.wait()
        return add_less_memory(result, progress)

    improve_by(monkeypatch, LESS_MEMORY_SEARCH, search)
    return drawn


def test_plans_of_less_memory_come_behind_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The five rows of the first page had none of less memory than FSDP where the answer fits without recomputation."""
    drawn = delay_less_memory(monkeypatch)
    at = AppTest.from_file(ENTRY)
    at.query_params.update({**REQUEST, "batch": "32"})
    at.run()
    assert "Looking for less memory" in captions(at) and "trade-off; " not in what_of_rows(at)
    drawn.set()
    run_after(at, LESS_MEMORY_SEARCH)
    assert re.search("trade-off; .*recomputation", what_of_rows(at)) and "Looking" not in captions(at)


def test_plans_says_what_is_searched_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, opened by a link, never had a plan with stages; opened after Overview its choice jumped to one, and a row was gone."""
    drawn = delay_less_memory(monkeypatch)
    # Not the request of the test before, to which a search that goes on may add a result.
    at = open_page("plans", **REQUEST | {"batch": "16"})
    assert not at.exception and "Looking for less memory" in captions(at)
    drawn.set()
    run_after(at, LESS_MEMORY_SEARCH)
    assert "Looking" not in captions(at)


def test_a_link_to_a_plan_of_less_memory_finds_it_at_once() -> None:
    at = AppTest.from_file(ENTRY)
    at.query_params.update({**REQUEST, "batch": "16", "plan": "trade-off-with-recomputation-1"})
    at.run()
    assert not at.exception and not at.warning
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_plans")
    assert json.loads(drawn.json)["chosen"] == "trade-off-with-recomputation-1"


def test_a_gap_that_stays_open_is_said(monkeypatch: pytest.MonkeyPatch, proven: Result) -> None:
    first = replace(proven, plans=tuple(map(unproven, proven.plans)))
    improve_by(monkeypatch, PROOF_SEARCH, lambda result, progress: result)
    at = opened(monkeypatch, first)
    run_after(at, PROOF_SEARCH)
    assert "Proving" not in captions(at)
    assert "the best plan, at most 2 % above the bound" in what_of_rows(at)


def test_a_cached_result_does_not_take_away_what_another_search_added(
    monkeypatch: pytest.MonkeyPatch, proven: Result
) -> None:
    """The first result is forgotten before what its searches gave: then a link may run them in another order."""
    request = Request("llama-3-8b", cluster="1x8-h100", layers=2, batch=64, seq=4096)
    first = replace(proven, reasons={})
    monkeypatch.setattr(shared_plans, "plan_model", lambda *_, **__: first)
    LESS_MEMORY_SEARCH.run(request, lambda text: None)
    shared_plans._plans.clear()
    for search in (STAGES_SEARCH, LESS_MEMORY_SEARCH):
        search.run(request, lambda text: None)
    known = shared_plans.known_result(request)
    assert known is not None and {STAGES_SEARCH.name, LESS_MEMORY_SEARCH.name} <= known.reasons.keys()


def test_a_proof_that_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch, proven: Result) -> None:
    first = replace(proven, plans=tuple(map(unproven, proven.plans)))

    def prove(result: Result, progress: Progress) -> Result:
        while True:  # until the report raises
            progress("search on 8 world")
            time.sleep(0.01)

    improve_by(monkeypatch, PROOF_SEARCH, prove)
    at = opened(monkeypatch, first)
    job, request = at.session_state["jobs"][PROOF_SEARCH.name], state_request(at)
    assert not job.done
    monkeypatch.setattr(shared_plans, "plan_model", lambda *_, **__: proven)
    at.query_params["batch"] = "32"
    at.run()
    while not job.done:
        time.sleep(0.01)
    known = shared_plans.known_result(request)
    assert known is not None and PROOF_SEARCH.name not in known.reasons


def state_request(at: AppTest) -> Request:
    return settings.build_request(at.session_state["values"])


def test_no_two_rows_of_plans_have_one_name() -> None:
    """Two rows were "FSDP 8, mixed", told apart by what they recompute in the small line alone."""
    at = open_page("plans", **REQUEST | {"batch": "16"})
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_plans")
    names = [row["name"] for row in json.loads(drawn.json)["rows"]]
    assert not at.exception and len(set(names)) == len(names) > 2
