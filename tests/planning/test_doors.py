"""All doors give one answer: `plan`, `compare` and `price` from Python, and the report of the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import planner_core as shardscope
from planner_core.cli.main import main
from planner_core.core import InputError, NoPlanFits, Plan
from planner_core.planning.planner import STATED

MODELS = ("llama-3-8b", "gpt2-xl", "mixtral-8x7b", "bert-large")
CLUSTERS = ("1x8-h100:gpus=4", "1x4-a100-pcie", "1x8-h100:nodes=2,gpus=2,inter=10")
LAYOUTS = ("dp=4,zero=1", "dp=4,zero=2", "fsdp=4", "dp=2,fsdp=2", "dp=2,tp=2,sp", "tp=4", "dp=2,cp=2")
TOOLS = ("megatron", "torchtitan", "fsdp2", "deepspeed")
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from(["bfloat16", "float32"]),
    "optimizer": st.sampled_from(["adamw", "adamw-fp32", "sgd"]),
    "precision": st.sampled_from(["pure", "mixed"]),
    "recompute": st.sampled_from(["none", "full", "selective"]),
    "zero": st.sampled_from([0, 1, 2, 3]),
    "accumulate": st.sampled_from([1, 2]),
    "memory_gb": st.sampled_from([6.0, 9.0, 14.0]),
    "gradients": st.sampled_from(["bfloat16", "float32"]),
    "layout": st.sampled_from(LAYOUTS),
    "tool": st.sampled_from(TOOLS),
}
FLAGS = {"tool": "--for"}
"""Flags of the command line that are not the words of Python's options."""

small_requests = st.tuples(
    st.sampled_from(MODELS),
    st.sampled_from(CLUSTERS),
    st.fixed_dictionaries({"batch": st.sampled_from([4, 6, 8, 12])}, optional=OPTIONS),
)


def reported(plan: Plan) -> tuple[object, ...]:
    """What a report says of a plan."""
    cost = plan.cost
    return plan.name, cost.step_time_s, cost.memory_bytes["peak"], plan.fits, plan.is_step_proven, plan.bound


def check_doors(asked: tuple[str, str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """One request at every door: its rows are equal, its refusals are refusals everywhere, and its stated layout has one price."""
    model, cluster, options = asked
    sizes = {"seq": 512, "layers": 2}
    given_options = {**sizes, **options}
    flags = [w for name, v in given_options.items() for w in (FLAGS.get(name, f"--{name.replace('_', '-')}"), str(v))]
    status = main(["plan", model, "--cluster", cluster, *flags, "--json"])
    said = capsys.readouterr().out
    try:
        result = shardscope.plan(model, cluster=cluster, **given_options)
    except (InputError, NoPlanFits) as refused:
        assert status == (3 if isinstance(refused, NoPlanFits) else 2)
        with pytest.raises(type(refused)):
            shardscope.compare(model, cluster=cluster, **given_options)
        return
    report = json.loads(said)
    rows = [
        (p["name"], p["step_time_s"], p["memory_bytes"]["peak"], p["fits"], p["optimal"], p["bound_s"])
        for p in report["plans"]
    ]
    assert status == 0 and rows == [reported(plan) for plan in result.plans]
    assert report["choice"]["recommended"] == result.recommended.name

    compared = {plan.name: plan for plan in shardscope.compare(model, cluster=cluster, **given_options).plans}
    baselines = [plan for plan in result.plans if plan.method not in ("exact", "layout") and plan.pipeline is None]
    for plan in baselines:
        assert plan.name not in compared or reported(plan) == reported(compared[plan.name])

    stated = next((plan for plan in result.plans if plan.name == STATED), None)
    if stated is not None:
        run = {name: v for name, v in given_options.items() if name not in ("zero", "tool", "layout")}
        run |= {name: stated.workload[name] for name in ("accumulate", "recompute", "stack", "gradients")}
        priced = shardscope.price(model, cluster=cluster, layout=options["layout"], **run, advise=False).plan
        assert priced is not None and (priced.cost, priced.fits) == (stated.cost, stated.fits)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 6))
def test_every_door_gives_one_answer(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of a few examples, since a request takes seconds. They are not shrunk: a request is small as it is drawn."""
    few = settings(max_examples=3, phases=(Phase.generate,), deadline=None)
    seed(part)(few(given(small_requests)(lambda asked: check_doors(asked, capsys))))()
