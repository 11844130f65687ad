"""Plans whose products run in chunks: they run as predicted, issue each chunk before the next is made, and compile."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from planner_core.core import Plan
from planner_core.exporters import export
from planner_core.planning.request import Request
from planner_core.verification.api import scaled
from planner_core.verification.fake.group import verify_fake_all
from planner_core.verification.numerics import verify_all
from tests.support.plans import in_chunks, planned
from tests.support.torchrun import script_losses

WAYS = ["none", "full", "selective"]
"""Ways to recompute a block. If it is recomputed in full, the last product and its sums are not repeated."""


@cache
def megatron(
    model: str = "llama-3-8b", recompute: str = "none", accumulate: int = 1, layers: int | None = None
) -> tuple[Plan, Plan]:
    """Megatron-LM's plans of two by four GPUs, without and with sequence parallelism: sums to all ranks, and to a share of the tokens."""
    how = {"recompute": recompute, "accumulate": accumulate, "layers": layers}
    request = Request(model, cluster="1x8-h100", batch=16, mesh="2x4", **how)  # type: ignore[arg-type]
    whole, shares = (p for p in planned(request).plans if p.method in ("megatron", "megatron-sp"))
    return in_chunks(whole), in_chunks(shares)


@pytest.mark.parametrize(
    ("recompute", "layers"), [("none", 2), *(pytest.param(way, None, marks=pytest.mark.slow) for way in WAYS)]
)
def test_traffic_and_memory_at_full_size(recompute: str, layers: int | None) -> None:
    """`layers` None: all 32 of them."""
    plans = megatron(recompute=recompute, layers=layers)
    for plan, report in zip(plans, verify_fake_all(list(plans)), strict=True):
        assert report["ok"], (plan.name, report["order"])
        assert report["memory_bytes"]["rel_error"] < 0.02, report["memory_bytes"]


@pytest.mark.parametrize(
    "recompute", ["full", *(pytest.param(way, marks=pytest.mark.slow) for way in ("none", "selective"))]
)
def test_it_runs_as_predicted(recompute: str) -> None:
    """On real processes: loss, every gradient, a step of AdamW; kinds, numbers and bytes of all collectives by phase and axis."""
    plans = [scaled(p, 4) for p in megatron(recompute=recompute, layers=2)]
    assert all(p.chunks == 4 for p in plans)
    for plan, found in zip(plans, verify_all(plans), strict=True):
        assert found["ok"], (plan.name, found["loss"], found["grad"], found["collectives"])


@pytest.mark.slow
def test_biases_and_two_micro_batches() -> None:
    """BERT's products add a bias, which one rank adds."""
    plans = [scaled(p, 4) for p in (*megatron("bert-large"), *megatron("t5-large"), *megatron(accumulate=2))]
    for plan, found in zip(plans, verify_all(plans), strict=True):
        assert plan.chunks == 4 and found["ok"], (plan.model.name, found["grad"])


@pytest.mark.slow
def test_its_script_shows_chunks_and_trains_alike(tmp_path: Path) -> None:
    """On two ranks, at once; in chunks, eager and compiled."""
    plan, found = megatron()[1], []
    for chunks, options in ((1, ()), (4, ()), (4, ("--compile",))):
        export(scaled(in_chunks(plan, chunks), 2), "torchrun", tmp_path / "train.py")
        found.append(script_losses(tmp_path / "train.py", 2, *options))
    text = (tmp_path / "train.py").read_text()
    assert "chunked([reduce_scatter(TENSOR, 1)], backward=[all_gather(TENSOR, 1)], chunks=4)" in text
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[2] == pytest.approx(found[0], rel=1e-5)
