"""Stated layouts with context and expert ranks run as predicted: loss, gradients, a step of the optimizer, every collective."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planner_core.core import Plan, load_cluster
from planner_core.models.loading import capture_graph
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.request import Request
from planner_core.planning.session import prepare
from planner_core.verification.fake_group import verify_fake_all
from planner_core.verification.numerics import verify_all
from tests.support.tiny_models import tiny_config

SMALL = (
    ("llama-gqa", "dp=2,cp=2,cp_type=gather,zero=1"),
    ("llama-gqa", "cp=2,tp=2,sp"),
    ("llama-gqa", "fsdp=2,cp=2,cp_type=ulysses"),
    ("mixtral", "fsdp=2,ep=2,cp=2"),
)
"""Each kind of context parallelism, tensor parallelism beside it, ZeRO stages 1 and 3, and experts."""
OTHERS = (
    ("llama-gqa", "fsdp=2,cp=2"),
    ("mixtral", "dp=2,cp=2"),
    ("mixtral", "fsdp=4,ep=2"),
    ("mixtral", "fsdp=2,ep=2,tp=2,sp"),
)
FULL = (
    ("llama-3-8b", "dp=2,cp=8", 4096),
    ("llama-3-8b", "fsdp=2,cp=4,tp=2,sp", 16384),
    ("llama-3-8b", "fsdp=2,cp=4,tp=2,sp,cp_type=ulysses", 16384),
    ("mixtral-8x7b", "dp=16,ep=8,zero=1", 4096),
    ("mixtral-8x7b", "fsdp=8,ep=4,tp=2,sp", 1024),
)


def small(name: str, text: str) -> Plan:
    """A tiny model on four ranks, a sample for each data-parallel rank."""
    layout = parse_layout(text)
    graph = capture_graph(tiny_config(name), batch=layout.data, seq=16, dtype="float32")
    asked = Request(name, cluster="1x8-h100:gpus=4", batch=layout.data, seq=16, dtype="float32")
    plan = prepare(asked, graph).of_layout(layout)
    assert plan is not None
    return plan


@pytest.mark.parametrize("cases", [SMALL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["each kind", "others"])
def test_they_run_as_predicted(cases: Sequence[tuple[str, str]]) -> None:
    """On four real processes. Where experts or the loss take tokens in a row, a rank has those of its piece of its sample."""
    plans = [small(*case) for case in cases]
    for (name, text), found in zip(cases, verify_all(plans), strict=True):
        assert found["ok"] and not found["dispatched"], (name, text, found["loss"], found["grad"], found["collectives"])


@pytest.mark.slow
def test_traffic_and_memory_at_full_size() -> None:
    """Four layers, all sixteen ranks in one process: every collective and byte, memory within 2 %."""
    cluster = load_cluster("2x8-h100")
    plans = [Pricer(m, cluster).plan(Statement(parse_layout(text), seq=seq, layers=4)) for m, text, seq in FULL]
    for (name, text, _), found in zip(FULL, verify_fake_all([p for p in plans if p is not None]), strict=True):
        assert found["ok"], (name, text, found["memory_bytes"], found["collectives"])
