"""What a page makes of a plan is tested here, and planning elsewhere: a request is planned once for all pages and processes."""

from types import SimpleNamespace

import pytest

from explorer.jobs import export
from explorer.session import shared_plans
from explorer.session.later_searches import LaterSearch
from tests.support.plans import replay_plan_model


@pytest.fixture(autouse=True)
def _plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_plans, "plan_model", replay_plan_model)


@pytest.fixture(autouse=True)
def _nothing_behind_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches behind an answer would go on during the tests that follow, and a process that waits for an export imports torch."""
    monkeypatch.setattr(LaterSearch, "start", lambda self: SimpleNamespace(done=False))
    monkeypatch.setattr(export.WORKERS, "start", lambda: None)
