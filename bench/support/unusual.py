"""How long unusual models take to plan, from a command to its answer: processor seconds of the whole process, imports included.

    python -m bench.search --only unusual

The aims are those of the project: a small module in 2 s, a layer of hundreds of operators and a deep encoder-decoder in 5 s.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.support.kept_rows import ROOT

SMALL = '''"""A module of about one million parameters, as a user would hand it over."""

import torch
from torch import nn


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 1024)
        self.second = nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def make():
    return Small(), (torch.zeros(64, 512),)
'''
DEEP_T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16,
    "num_layers": 1001, "num_decoder_layers": 1001,
}  # fmt: skip
FILES = {
    "small.py": SMALL,
    "deepseek_v4.json": json.dumps({"model_type": "deepseek_v4"}),
    "deep_t5.json": json.dumps(DEEP_T5),
}
CASES = (
    ("module of 1.05 M parameters", "small.py:make", 2.0),
    ("deepseek_v4, its default config", "deepseek_v4.json", 5.0),
    ("T5 of 2 x 1 001 layers, from a config", "deep_t5.json", 5.0),
)
LIMIT_S = 100
"""Processor seconds after which a command is stopped."""
CLUSTER = "2x8-h100"


def section() -> list[str]:
    """The section of docs/BENCHMARKS.md."""
    lines = [
        f"## Planning the unusual, on {CLUSTER}",
        "",
        f"`python -m planner_core plan FILE --cluster {CLUSTER}`: processor time (user and system) of the whole command, in one run. "
        "Imports are the share of it that `import torch, transformers` takes in a process of its own.",
        "",
        "| model | processor time | imports | aim | |",
        "| --- | --- | --- | --- | --- |",
    ]
    imports = processor_s("-c", "import torch, transformers")
    with tempfile.TemporaryDirectory() as where:
        for name, text in FILES.items():
            (Path(where) / name).write_text(text, encoding="utf-8")
        for name, model, aim in CASES:
            command = ("-m", "planner_core", "plan", f"{where}/{model}", "--cluster", CLUSTER)
            took = processor_s(*command)
            said = f"over {LIMIT_S} s, stopped" if took >= LIMIT_S - 1 else f"{took:.1f} s"
            told = "holds" if took <= aim else "falls short"
            lines.append(f"| {name} | {said} | {imports:.1f} s | {aim:.0f} s | {told} |")
    return [*lines, ""]


def processor_s(*arguments: str) -> float:
    """User and system seconds of a Python process and of its children, about `LIMIT_S` if it was stopped."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False, stdout=subprocess.DEVNULL, preexec_fn=_limit)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
