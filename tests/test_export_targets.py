"""Exports for other programs are run by those programs: same loss, same gradients, and the collectives that they issue."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner_core.capture.hf import build
from planner_core.errors import InputError
from planner_core.export import TARGETS, export_plan, export_text
from planner_core.export.torchrun import model_spec
from planner_core.pipeline import plan_model
from planner_core.plan import Plan
from planner_core.planner import Request
from planner_core.verify import scaled
from planner_core.verify.models import gentle_initializer, materialise

ROOT = Path(__file__).resolve().parent.parent
BATCH, SEQ, WIDTH, LAYERS = 4, 16, 64, 2
PAYLOAD = BATCH * SEQ * WIDTH * 4
"""Bytes of one hidden state."""
OTHERS = [t for t in TARGETS if t not in ("json", "torchrun")]


@cache
def planned(name: str) -> dict[str, Plan]:
    return {p.name: p for p in plan_model(Request(name, cluster="2x8-h100", mesh="2x8")).plans}


def consume(name: str, which: str, target: str, folder: Path) -> dict[str, Any]:
    """The scaled plan exported and run by its consumer on 2 ranks."""
    plan = scaled(planned(name)[which], 2)
    config = plan.model["config"]
    model: Any = build(config, "float32")[0]
    materialise(model, gentle_initializer(model, 0))
    model.save_pretrained(folder / "model")
    found = model_spec(config)
    sizes = {"batch": BATCH, "seq": SEQ}
    inputs = {k: [[sizes.get(d, d) for d in shape], kind, high] for k, (shape, kind, high) in found["full"]["inputs"].items()}
    (folder / "spec.json").write_text(json.dumps({"class": found["class"], "inputs": inputs}))
    export_plan(plan, target, folder / ("plan.py" if target == "parallelize_module" else "plan.json"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "tests" / "export_consumer.py")]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, target, str(folder)], env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    row: dict[str, Any] = next(json.loads(x.removeprefix("ROW ")) for x in done.stdout.splitlines() if x.startswith("ROW "))
    assert row["parallel"] == pytest.approx(row["single"], rel=1e-6)
    assert row["after"][0] == pytest.approx(row["after"][1], rel=1e-5)
    assert row["after"][0] < row["single"]
    return row


def counts(row: dict[str, Any], phase: str) -> dict[str, tuple[int, int]]:
    return {kind: (r["count"], r["bytes"]) for kind, r in row["collectives"][phase].items()}


def test_parallelize_module_trains_like_one_process(tmp_path: Path) -> None:
    row = consume("llama-3-8b", "Megatron-LM", "parallelize_module", tmp_path)
    assert row["grad_error"] < 1e-5, row["worst"]
    assert len([n for n in row["split"] if ".layers." in n]) == 7 * LAYERS
    forward, backward = counts(row, "forward"), counts(row, "backward")
    assert forward["all_reduce"] == (2 * LAYERS, 2 * LAYERS * PAYLOAD)
    assert backward["all_reduce"] == ((2 * LAYERS + 1), (2 * LAYERS + 1) * PAYLOAD)  # one for each shared input, one for the head's
    predicted = scaled(planned("llama-3-8b")["Megatron-LM"], 2).cost.collectives()["backward"]["all_reduce"]
    assert predicted["count"] == backward["all_reduce"][0]  # the same collectives as the plan, at this batch and length
    assert predicted["bytes"] * BATCH * SEQ == backward["all_reduce"][1] * 8 * 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-large", "vit-large", "t5-large", "mixtral-8x7b"])
def test_parallelize_module_of_other_models(name: str, tmp_path: Path) -> None:
    row = consume(name, "Megatron-LM", "parallelize_module", tmp_path)
    assert row["grad_error"] < 1e-5, row["worst"]
    assert row["split"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [("llama-3-8b", "Megatron-LM"), ("mixtral-8x7b", "hf-expert"), ("bert-large", "Megatron-LM"), ("vit-large", "Megatron-LM")],
)
def test_hf_trains_like_one_process(name: str, which: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    row = consume(name, which, "hf", tmp_path)
    assert row["grad_error"] < 2e-5, row["worst"]
    if name == "llama-3-8b":
        assert counts(row, "forward")["all_reduce"] == (2 * LAYERS, 2 * LAYERS * PAYLOAD)
        assert counts(row, "backward")["all_reduce"] == ((5 * LAYERS + 1), (5 * LAYERS + 1) * PAYLOAD)  # each column by itself
        assert f"{5 * LAYERS} backward all_reduces" in " ".join(export_text(scaled(planned(name)[which], 2), "hf").remarks)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_trains_like_one_process(tmp_path: Path) -> None:
    row = consume("llama-3-8b", "Megatron-LM", "deepspeed", tmp_path)
    assert {"LinearLayer", "LinearAllreduce"} <= set(row["kinds"])


def test_hf_switches_the_built_in_rules_off() -> None:
    data = json.loads(export_text(planned("mixtral-8x7b")["Megatron-LM"], "hf").text)
    assert data["tp_size"] == 8
    assert data["tp_plan"]["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert data["tp_plan"]["model.layers.*.mlp.experts"] in ("replicate", "moe_tp_experts")


@pytest.mark.parametrize("target", ["parallelize_module", "hf", "deepspeed"])
def test_what_cannot_be_expressed_is_named(target: str) -> None:
    with pytest.raises(InputError, match="splits no linear layer"):
        export_text(planned("gpt2-xl")["best"], target)
    conv = next(p for p in plan_model(Request("gpt2-xl", cluster="1x4-a100-pcie", mesh="4", method="atp")).plans)
    with pytest.raises(InputError, match="Conv1D"):
        export_text(conv, target)
    said = " ".join(export_text(planned("t5-large")["Megatron-LM"], target).remarks)
    assert "encoder.block.*.layer.*.SelfAttention.q" in said
    assert "scores" in said
    said = " ".join(export_text(planned("llama-3-8b")["Megatron-LM + sequence parallel"], target).remarks)
    assert "tokens are split between the blocks" in said


def test_two_tensor_axes_are_refused() -> None:
    plan = next(p for p in plan_model(Request("llama-3-8b", cluster="2x8-h100", mesh="2x8", method="atp")).plans)
    for target in OTHERS:
        with pytest.raises(InputError, match="over 2 mesh axes"):
            export_text(plan, target)


def test_degrees_for_megatron_and_torchtitan() -> None:
    plan = planned("llama-3-8b")["Megatron-LM + sequence parallel"]
    made = export_text(plan, "megatron")
    flags = json.loads(made.text)["flags"]
    assert (flags["tensor-model-parallel-size"], flags["sequence-parallel"], flags["num-query-groups"]) == (8, True, 8)
    assert "Unverified" in " ".join(made.remarks)
    made = export_text(plan, "torchtitan")
    assert "tensor_parallel_degree = 8" in made.text
    assert "data_parallel_replicate_degree = 2" in made.text
    assert "Unverified" in " ".join(made.remarks)
    whole = export_text(planned("llama-3-8b")["best"], "torchtitan").text
    assert "tensor_parallel_degree = 1" in whole
    assert "data_parallel_shard_degree = 16" in whole
