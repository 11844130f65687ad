"""How long real and unusual models take to plan, from a command to its answer: processor seconds of the whole process, imports included.

    python -m bench.search --only unusual

Each is put beside what no planner can save: importing torch and transformers, and building the model on meta. The aim is three times that.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_heads": 16,
    "num_layers": 1001,
    "num_decoder_layers": 1001,
}
EXAONE = {
    "model_type": "exaone4",
    "vocab_size": 102400,
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
QWEN = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
FILES = {
    "small.py": SMALL,
    "deepseek_v4.json": json.dumps({"model_type": "deepseek_v4"}),
    "deep_t5.json": json.dumps(DEEP_T5),
    "exaone.json": json.dumps(EXAONE),
    "qwen.json": json.dumps(QWEN),
    "llama.json": json.dumps(LLAMA),
}
NODES = "1x8-h100:nodes={},inter=400"
LARGE = tuple((NODES.format(gpus // 8), gpus) for gpus in (1024, 16_384, 100_000))
CASES = (
    ("EXAONE-4 32B", "exaone.json", "2x8-h100", ()),
    ("Qwen3-Next 80B", "qwen.json", "2x8-h100", ()),
    ("deepseek_v4, its default config", "deepseek_v4.json", "2x8-h100", ()),
    ("T5 of 2 x 1 001 layers", "deep_t5.json", "2x8-h100", ()),
    ("module of 1.05 M parameters", "small.py:make", "2x8-h100", ()),
    *(
        ("Llama-3 405B, a sample of 8 192 tokens a GPU", "llama.json", cluster, ("--batch", str(gpus), "--seq", "8192"))
        for cluster, gpus in LARGE
    ),
)
BUILD = """import sys, json, torch, transformers
config = json.load(open(sys.argv[1]))
auto = transformers.AutoModelForSeq2SeqLM if config["model_type"] == "t5" else transformers.AutoModelForCausalLM
with torch.device("meta"):
    auto.from_config(transformers.AutoConfig.for_model(**config))
"""
LIMIT_S = 100
"""Processor seconds after which a command is stopped."""
AIM = 3.0


@dataclass(frozen=True, slots=True)
class CommandRun:
    """A Python process: its user and system seconds, about `LIMIT_S` if it was stopped; the most memory that it had; what it printed."""

    processor_s: float
    peak_bytes: int
    printed: str


def measure_commands() -> list[str]:
    """The section of docs/BENCHMARKS.md."""
    lines = [
        "## From a command to its answer, real and unusual models",
        "",
        "`python -m planner_core plan FILE --cluster CLUSTER --json`: processor time (user and system) and peak memory of the whole command, "
        "in one run, with every baseline, trade-off and plan with stages. *Built* is what importing torch and transformers and building the "
        f"model on meta takes in a process of its own; the aim is {AIM:.0f} times that.",
        "",
        "| model | cluster | processor time | built | ratio | | peak memory | first plan |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as where:
        for name, text in FILES.items():
            (Path(where) / name).write_text(text, encoding="utf-8")
        for name, model, cluster, options in CASES:
            file = f"{where}/{model}"
            built = (
                run_python("-c", BUILD, file)
                if file.endswith(".json")
                else run_python("-c", "import torch, transformers")
            )
            found = run_python("-m", "planner_core", "plan", file, "--cluster", cluster, "--json", *options)
            lines.append(format_row(name, cluster, built, found))
    return [*lines, ""]


def format_row(name: str, cluster: str, built: CommandRun, found: CommandRun) -> str:
    """A line of the table."""
    stopped, ratio = found.processor_s >= LIMIT_S - 1, found.processor_s / built.processor_s
    took = f"over {LIMIT_S} s, stopped" if stopped else f"{found.processor_s:.1f} s"
    holds = "holds" if ratio <= AIM else "falls short"
    cells = (
        name,
        cluster,
        took,
        f"{built.processor_s:.1f} s",
        f"{ratio:.1f}",
        holds,
        f"{found.peak_bytes / 1e9:.2f} GB",
        describe_first_plan(found.printed),
    )
    return f"| {' | '.join(cells)} |"


def describe_first_plan(printed: str) -> str:
    """What a command says of its first plan: its step, and how far it is above the best there is."""
    try:
        plan: dict[str, Any] = json.loads(printed)["plans"][0]
    except ValueError:
        return ""
    step = f"{plan['step_time_s']:.4g} s"
    if not plan["fits"]:
        return f"{step}, does not fit"
    if plan["optimal"]:
        return f"{step}, proven"
    bound = plan["bound_s"]
    return f"{step}, within {100 * (plan['step_time_s'] / bound - 1):.2g} %" if bound else step


def run_python(*arguments: str) -> CommandRun:
    """Run Python with these arguments, with one thread and without a network."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=alone,
            preexec_fn=_limit_processor_time,
        )
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
        out.seek(0)
        return CommandRun(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, out.read())


def _limit_processor_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
