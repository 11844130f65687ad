"""What a page makes of a plan is tested here, and planning elsewhere: a request is planned once for all pages and processes."""

import pytest

from explorer.session import shared_plans
from tests.support.plans import replay_plan_model


@pytest.fixture(autouse=True)
def _plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_plans, "plan_model", replay_plan_model)
