"""The exported script for ten steps, on the GPU and on the CPU, from the same weights: are the losses the same?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import planner_core as shardscope
from bench.gpu.cases import PLANS
from planner_core.runtime.training import model_of

ROOT = Path(__file__).resolve().parents[2]
PLAN = PLANS / "script.json"
"""GPT-2 XL of two layers on one GPU, in float32: a CPU rounds bfloat16 otherwise."""
STEPS = 10
TOLERANCE = 1e-3
"""Allowed relative difference of a loss: rates and products are those of other kernels, and ten steps add up."""


def compare_losses(folder: Path, dry: bool, limit_s: float) -> dict[str, Any]:
    """Return the losses on both, or what the script said instead. `dry`: those of a tiny model on the CPU alone."""
    script = folder / "train.py"
    shardscope.export(shardscope.load_plan(str(PLAN)), "torchrun", str(script))
    options = ["--tiny"] if dry else ["--weights", str(_weights(folder))]
    row = {"plan": PLAN.name, "way": "script", "compiled": False, "ranks": 1, "steps": STEPS}
    for name, gpu in (("losses", False),) if dry else (("losses", True), ("cpu_losses", False)):
        report = folder / f"{name}.jsonl"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})}
        command = [
            sys.executable,
            str(script),
            "--steps",
            str(STEPS),
            "--report-every",
            "1",
            "--report",
            str(report),
            *options,
        ]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return row | {"error": f"the script took longer than {limit_s:.0f} s"}
        if done.returncode:
            return row | {"error": (done.stderr.strip().splitlines() or ["no word"])[-1][:400]}
        row[name] = [json.loads(line)["loss"] for line in report.read_text().splitlines()]
    if dry:
        return row
    apart = max(abs(a / b - 1) for a, b in zip(row["losses"], row["cpu_losses"], strict=True))
    return row | {"largest_difference": apart, "equal": apart <= TOLERANCE}


def _weights(folder: Path) -> Path:
    """First values, drawn by the CPU: a GPU draws others from the same seed."""
    import torch
    from safetensors.torch import save_file

    from planner_core.runtime import initializer

    model = model_of(shardscope.load_plan(str(PLAN))).model
    init = initializer(model, 0, "cpu")
    values: dict[int, torch.Tensor] = {}
    where = folder / "weights"
    where.mkdir(exist_ok=True)
    for name, parameter in model.named_parameters():
        values[id(parameter)] = init(name, parameter).contiguous()
    save_file({name: values[id(p)] for name, p in model.named_parameters()}, str(where / "model.safetensors"))
    return where
