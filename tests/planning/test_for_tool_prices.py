"""What a tool's plan says is what its exported file takes, by both readers of that file: the export and `price --config`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from planner_core.core import Plan, divisors, load_cluster
from planner_core.exporters.api import export_text
from planner_core.planning import Request, plan_model, prepare_planner
from planner_core.planning.methods import TARGETS
from planner_core.planning.pipeline import PASSES
from planner_core.planning.pricing import PricedRun, Pricer, price_statement, read_setup

ASKED = Request("llama-3-8b", cluster="1x8-h100", batch=32, seq=1024, layers=2, recompute="auto", accumulate=None)
TIGHT: dict[str, Any] = {"layers": 16, "seq": 4096, "batch": 64, "cluster": "1x8-h100:gpu=a100-40gb-sxm"}
"""Only with micro-batches or recomputation does a plan fit."""
SLOW_NODES: dict[str, Any] = {
    "model": "llama-3-70b",
    "cluster": "2x8-h100:inter=5",
    "batch": 64,
    "seq": 2048,
    "layers": 8,
}
"""Two nodes of slow Ethernet, where gradients of all weights take longer than stages."""

PRICE_ROUNDING = 1e-5
"""Share by which the price of a plan and the sums of the search may differ."""


def price_exported(plan: Plan, tool: str, folder: Path, request: Request) -> PricedRun:
    """Price the exported file of a plan as `price --config` does; accelerate's file leaves the samples to the training script."""
    file = folder / f"exported{TARGETS[tool].suffix}"
    file.write_text(export_text(plan, tool).text)
    cluster = load_cluster(request.cluster)
    setup = read_setup(file, cluster.num_gpus)
    sizes: dict[str, Any] = {"layers": request.layers, "seq": request.seq}
    if tool == "accelerate":
        ranks, accumulate = setup.layout.data, plan.workload.accumulate
        sizes |= {"micro_batch": plan.workload.batch // ranks // accumulate, "accumulate": accumulate}
    pricer = Pricer(request.model, cluster)
    stated, _ = pricer.stated_model.state_run(setup.layout, setup.override_options(setup.layout, sizes))
    return price_statement(pricer, stated, advise=False)


@pytest.mark.parametrize(
    ("tool", "changes"),
    [
        ("megatron", {}),
        pytest.param("megatron", TIGHT, marks=pytest.mark.slow),
        pytest.param("megatron", SLOW_NODES, marks=pytest.mark.slow),
        pytest.param("torchtitan", {}, marks=pytest.mark.slow),
        pytest.param("torchtitan", TIGHT, marks=pytest.mark.slow),
        pytest.param("torchtitan", SLOW_NODES, marks=pytest.mark.slow),
        ("deepspeed", {}),
        pytest.param("accelerate", TIGHT, marks=pytest.mark.slow),
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
        prepare_planner(replace(ASKED, tool="megatron", accumulate=1, **changes).with_tool_software()).workload
        for changes in ({}, {"stack": "torch"}, {"attention": "softmax"})  # type: ignore[dict-item]
    )
    assert (own.stack, torch.stack) == ("megatron", "torch")
    assert (kernel.stack, kernel.attention) == ("megatron", "softmax")


def list_files(tool: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """List files of a tool for 4 GPUs and 16 samples a step: the text, its suffix, and the options that it leaves to the command line."""
    degrees = [(4, 1), (2, 2), (1, 4)]
    if tool == "megatron":
        head = "--micro-batch-size 4 --global-batch-size 16"
        flags = (
            "",
            "--use-distributed-optimizer",
            "--sequence-parallel",
            "--use-distributed-optimizer --sequence-parallel",
        )
        again = ("", "--recompute-granularity full --recompute-method uniform")
        for (_, tensor), more, full in product(degrees, flags, again):
            yield f"--tensor-model-parallel-size {tensor} {head} {more} {full}", ".sh", {}
    elif tool == "torchtitan":
        yield from list_torchtitan_files(degrees)
    elif tool == "deepspeed":
        for stage, micro in product((1, 2, 3), (2, 4)):
            sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": micro, "bf16": {"enabled": True}}
            yield json.dumps({**sizes, "zero_optimization": {"stage": stage}}), ".json", {}
    else:
        head, sizes = "mixed_precision: bf16\nnum_processes: 4\n", {"micro_batch": 4}
        yield f"{head}distributed_type: MULTI_GPU\n", ".yaml", sizes
        for stage in (1, 2, 3):
            yield f"{head}distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: {stage}\n", ".yaml", sizes
        for copies, frees, again in product((1, 2), ("true", "false"), ("true", "false")):
            text = f"{head}distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: {frees}\n"
            text += f"  fsdp_activation_checkpointing: {again}\n"
            yield f"{text}parallelism_config:\n  parallelism_config_dp_replicate_size: {copies}\n", ".yaml", sizes


def list_torchtitan_files(degrees: list[tuple[int, int]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    head = "--training.local_batch_size 4 --training.global_batch_size 16"
    for (ranks, tensor), mode in product(degrees, ("none", "selective", "full")):
        for shards in divisors(ranks):
            for keeps in ("default", "never") if shards == ranks > 1 else ("default",):
                parallel = f"--parallelism.data_parallel_replicate_degree {ranks // shards}"
                parallel += f" --parallelism.data_parallel_shard_degree {shards}"
                parallel += f" --parallelism.tensor_parallel_degree {tensor}"
                parallel += f" --parallelism.fsdp_reshard_after_forward {keeps}"
                yield f"{head} {parallel}\nactivation-checkpoint:{mode}", ".txt", {}


@pytest.mark.parametrize("tool", ["megatron", "torchtitan", "deepspeed", "accelerate"])
@pytest.mark.slow(but=("torchtitan",))
def test_no_file_of_a_tool_is_faster_than_its_bound(tool: str, tmp_path: Path) -> None:
    """ "Proven the best that torchtitan can be told" was beaten by a file with fsdp_reshard_after_forward "never"."""
    asked = replace(ASKED, cluster="1x8-h100:gpus=4", batch=16, layers=4, seq=4096, tool=tool)
    best, pricer = plan_model(asked, passes={}).best, Pricer(asked.model, load_cluster(asked.cluster))
    assert best.fits and best.bound is not None
    for text, suffix, options in list_files(tool):
        (tmp_path / f"one{suffix}").write_text(text)
        setup = read_setup(tmp_path / f"one{suffix}", 4)
        given = {"layers": asked.layers, "seq": asked.seq, **options}
        stated, _ = pricer.stated_model.state_run(setup.layout, setup.override_options(setup.layout, given))
        plan = price_statement(pricer, stated, advise=False).plan
        assert plan is not None and stated.batch == asked.batch
        assert not plan.fits or plan.cost.gpu_time_s >= best.bound * (1 - PRICE_ROUNDING), text
