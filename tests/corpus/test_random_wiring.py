"""Modules of drawn wiring run as predicted: what loops of generated code read, carry and leave to later code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planner_core.core import Plan
from planner_core.models.loading import capture_file
from planner_core.planning import Request, plan_model
from tests.support import random_modules
from tests.support.corpus import cluster, run

pytestmark = pytest.mark.corpus


def two_plans(seed: int) -> tuple[Plan, ...]:
    """The best plan and the one of FSDP."""
    source = f"{random_modules.__file__}:seed_{seed}"
    plans = plan_model(Request(source, cluster=cluster(2), mesh="2"), capture_file(source)).plans
    return plans[0], *(p for p in plans if p.name == "FSDP")


QUICK = (18,)
LONG = [n for n in range(64) if n not in QUICK]


@pytest.mark.parametrize(
    "seeds", [QUICK, *(pytest.param(LONG[i : i + 13], marks=pytest.mark.slow) for i in range(0, len(LONG), 13))]
)
def test_they_run_as_predicted(seeds: Sequence[int]) -> None:
    found = run({f"seed_{s}": two_plans(s) for s in seeds}, 2, timeout_s=900)
    wrong = [f"{name}, {r['plan']}: {r['error']}" for name, rows in found.items() for r in rows if not r["ok"]]
    assert not wrong, "\n".join(wrong)
    assert sum(r["messages"] for rows in found.values() for r in rows) > 30 * len(seeds)
