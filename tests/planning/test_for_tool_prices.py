"""What a tool's plan says is what its exported file takes, by both readers of that file: the export and `price --config`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner_core.core import Plan, load_cluster
from planner_core.exporters.api import export_text
from planner_core.exporters.targets import TARGETS
from planner_core.planning import Request, plan_model
from planner_core.planning.pipeline import PASSES
from planner_core.planning.pricing import PricedRun, Pricer, price_statement, read_setup

ASKED = Request("llama-3-8b", cluster="1x8-h100", batch=32, seq=1024, layers=2, recompute="auto", accumulate=None)
TIGHT: dict[str, Any] = {"layers": 16, "seq": 4096, "batch": 64, "cluster": "1x8-h100:gpu=a100-40gb-sxm"}
"""Only with micro-batches or recomputation does a plan fit."""
STAGES: dict[str, Any] = {"model": "llama-3-70b", "cluster": "2x8-h100:inter=5", "batch": 64, "seq": 2048, "layers": 8}
"""Two nodes of slow Ethernet, where gradients of all weights take longer than stages."""


def price_exported(plan: Plan, tool: str, folder: Path, request: Request) -> PricedRun:
    """Price the exported file of a plan as `price --config` does; accelerate's file leaves the samples to the training script."""
    file = folder / f"exported{TARGETS[tool].suffix}"
    file.write_text(export_text(plan, tool).text)
    cluster = load_cluster(request.cluster)
    setup = read_setup(file, cluster.num_gpus)
    sizes: dict[str, Any] = {"layers": request.layers, "seq": request.seq}
    if tool == "accelerate":
        ranks, accumulate = setup.layout.data, int(plan.workload["accumulate"])
        sizes |= {"micro_batch": plan.workload["batch"] // ranks // accumulate, "accumulate": accumulate}
    pricer = Pricer(request.model, cluster)
    stated, _ = pricer.state_run(setup.layout, setup.options_beside(setup.layout, sizes))
    return price_statement(pricer, stated, advise=False)


@pytest.mark.parametrize(
    ("tool", "changes"),
    [
        ("megatron", {}),
        ("megatron", TIGHT),
        ("megatron", STAGES),
        ("torchtitan", {}),
        ("torchtitan", TIGHT),
        pytest.param("torchtitan", STAGES, marks=pytest.mark.slow),
        ("deepspeed", {}),
        ("accelerate", TIGHT),
        pytest.param("megatron", {"model": "mixtral-8x7b", "batch": 16}, marks=pytest.mark.slow),
        pytest.param("torchtitan", {"model": "mixtral-8x7b", "batch": 16}, marks=pytest.mark.slow),
    ],
)
def test_a_tools_plan_is_its_exported_file(tool: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Llama-3-8B under ZeRO-1 was recommended for Megatron-LM by torch's kernels, and its own export did not fit."""
    request = replace(ASKED, tool=tool, **changes)
    plan = plan_model(request, passes={"stages": PASSES["stages"]}).recommended
    assert plan.fits
    priced = price_exported(plan, tool, tmp_path, request).plan
    assert priced is not None and priced.fits
    assert (priced.cost.step_time_s, priced.cost.memory_bytes["peak"]) == (
        plan.cost.step_time_s,
        plan.cost.memory_bytes["peak"],
    )
    nearest = export_text(plan, tool).nearest
    if nearest is not None:
        assert (nearest.step_time_s, nearest.peak_bytes, nearest.fits) == (
            plan.cost.step_time_s,
            plan.cost.memory_bytes["peak"],
            True,
        )


def test_a_stated_stack_counts_instead_of_the_tools() -> None:
    """Kernels that a request states count on the tool's stack, as options beside a tool's file do."""
    own, torch, kernel = (
        plan_model(replace(ASKED, tool="megatron", recompute="none", accumulate=1, **changes), passes={}).workload
        for changes in ({}, {"stack": "torch"}, {"attention": "softmax"})  # type: ignore[dict-item]
    )
    assert (own.stack, torch.stack) == ("megatron", "torch")
    assert (kernel.stack, kernel.attention) == ("megatron", "softmax")
