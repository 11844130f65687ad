"""What a command makes of a plan is tested here, and planning elsewhere: a request is planned once for all commands."""

import pytest

import planner_core.planning
from tests.support.plans import replay_plan_model


@pytest.fixture(autouse=True)
def _plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_core.planning, "plan_model", replay_plan_model)
