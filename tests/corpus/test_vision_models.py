"""Models of torchvision and timm: planned and run on two processes as predicted, or refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from planner_core.core import PlannerError, plan_from_json, plan_to_json
from planner_core.models.loading import capture_file
from planner_core.planning import Request, plan_model
from tests.support import vision_models as vision
from tests.support.corpus import cluster, run
from tests.support.ranks import fresh_ranks
from tests.support.vision_site import SITE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (SITE / "timm").is_dir(), reason="make .venv/vision installs torchvision and timm"),
]
REFUSED = dict.fromkeys(vision.DETECTORS, "decides by the values of computed tensors")
"""Models that no plan can hold, and words of the sentence that refuses them."""
ROUNDED = ("timm_efficientvit_b0",)
"""Models whose own code casts to float32: their difference from one process is rounding, which float64 cannot confirm."""


def planned(name: str) -> dict[str, Any] | str:
    """The best plan, or the sentence that refuses the model. In a process of its own, since transformers imports torchvision too
    where it can."""
    source = f"{vision.__file__}:{name}"
    try:
        return plan_to_json(plan_model(Request(source, cluster=cluster(2), mesh="2"), capture_file(source)).best)
    except PlannerError as error:
        return str(error)


@pytest.mark.parametrize("name", [n for n in vision.names() if n not in REFUSED])
def test_the_best_plan_runs_as_predicted(name: str) -> None:
    (found,) = fresh_ranks(planned, 1, (name,), timeout_s=900, backend=None)
    assert isinstance(found, dict), found
    (ran,) = run({name: (plan_from_json(found),)}, 2, timeout_s=900)[name]
    assert ran["ok"] or name in ROUNDED, ran["error"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_plan_can_hold_is_refused_with_a_sentence(name: str) -> None:
    (found,) = fresh_ranks(planned, 1, (name,), timeout_s=900, backend=None)
    assert isinstance(found, str) and REFUSED[name] in found and "\n" not in found
