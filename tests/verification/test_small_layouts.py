"""The walk of memory, the traffic and the order of small models under every stated layout are those of the run, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner_core.core import load_cluster
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.verification.api import verify
from tests.support.tiny_models import tiny_config

LAYOUTS = (
    "dp=4",
    "dp=4,zero=1",
    "dp=4,zero=2",
    "fsdp=4",
    "dp=2,fsdp=2",
    "dp=2,tp=2",
    "tp=4",
    "dp=2,tp=2,sp",
    "dp=2,tp=2,sp,zero=1",
)
LOSS_BYTES = 8
"""The run holds the loss; the walk leaves it out."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_memory_traffic_and_order_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(name)))
    pricer = Pricer(str(tmp_path / "config.json"), load_cluster("1x4-h100"))
    for layout in LAYOUTS:
        for accumulate in (1, 2):
            for precision in ("mixed", "pure"):
                stated = Statement(
                    parse_layout(layout), micro_batch=2, accumulate=accumulate, seq=32, precision=precision
                )
                plan = pricer.plan(stated)
                assert plan is not None
                told = verify(plan)
                assert told["ok"], (stated, told)
                held = told["memory_bytes"]
                assert abs(held["predicted"] - held["measured"]) <= LOSS_BYTES, (stated, held)


def test_a_gradient_that_is_summed_once_stands_alone_when_it_is_sent(tmp_path: Path) -> None:
    """The reduced gradient of a micro-batch is added to the sum of the earlier ones and is free before the sum is copied for all_reduce."""
    # With a large vocabulary that moment is the peak of a step: it was predicted 6 % too high for Llama-3-8B of two layers.
    config = {**tiny_config("llama"), "vocab_size": 8192, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pricer = Pricer(str(tmp_path / "config.json"), load_cluster("1x4-h100"))
    plan = pricer.plan(Statement(parse_layout("dp=2,fsdp=2"), micro_batch=2, accumulate=2, seq=4))
    assert plan is not None
    held = verify(plan)["memory_bytes"]
    assert abs(held["predicted"] - held["measured"]) <= LOSS_BYTES, held


@pytest.mark.parametrize(
    ("stack", "layout"),
    [
        ("deepspeed", "dp=4,zero=2"),
        pytest.param("deepspeed", "fsdp=4", marks=pytest.mark.slow),
        ("megatron", "dp=2,tp=2,zero=1"),
        pytest.param("megatron", "dp=2,pp=2", marks=pytest.mark.slow),
    ],
)
def test_a_plan_on_a_tools_stack_is_held_against_what_runs_here(stack: str, layout: str, tmp_path: Path) -> None:
    """DeepSpeed keeps gradients in 16 bits, Megatron-LM in one buffer. A correct plan for them was called 7 % wrong."""
    config = {**tiny_config("llama"), "vocab_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pricer = Pricer(str(tmp_path / "config.json"), load_cluster("1x4-h100"))
    gradients = "bfloat16" if stack == "deepspeed" else None
    stated = Statement(parse_layout(layout), 2, 2, seq=32, stack=stack, gradients=gradients)
    plan = pricer.plan(stated)
    assert plan is not None
    told = verify(plan)
    assert told["ok"], told["memory_bytes"]
    assert plan.pipeline or told["memory_bytes"]["predicted"] != plan.cost.memory_bytes["peak"]
