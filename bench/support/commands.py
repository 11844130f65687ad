"""How long models take to plan, from a command to its answer, and to the first plan: processor seconds of a process of its own.

python -m bench.search --only first commands
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
from planner_core.models import ZOO
from planner_core.search import TIE

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


@dataclass(frozen=True, slots=True)
class Case:
    """A model, by its name in the zoo or by its config, on a cluster, with options of the command line."""

    title: str
    name: str
    config: dict[str, Any]
    cluster: str = "2x8-h100"
    options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What the first column says."""
        return self.title if self.options else f"{self.title}, {self.cluster}"


CASES = (
    *(Case(name, name, {}) for name in ZOO),
    Case("EXAONE-4 32B", "exaone", EXAONE),
    Case("Qwen3-Next 80B", "qwen", QWEN),
    Case("gpt_oss, its default config", "gpt_oss", {"model_type": "gpt_oss"}),
    Case("deepseek_v3, its default config", "deepseek_v3", {"model_type": "deepseek_v3"}),
    Case("deepseek_v4, its default config", "deepseek_v4", {"model_type": "deepseek_v4"}),
    Case("T5 of 2 x 24 layers", "t5", {**DEEP_T5, "num_layers": 24, "num_decoder_layers": 24}),
    Case("T5 of 2 x 1 001 layers", "deep_t5", DEEP_T5),
    *(
        Case(
            f"Llama-3 405B on {gpus:,} H100, 400 GB/s a node, a sample of 8 192 tokens each",
            "llama",
            LLAMA,
            f"1x8-h100:nodes={gpus // 8},inter=400",
            ("--batch", str(gpus), "--seq", "8192"),
        )
        for gpus in (1024, 16_384, 100_000)
    ),
)
LIMIT_S = 100
"""Processor seconds after which a process is stopped."""
AIM = 3.0
FIRST_WORDS = (
    "*Imported*: torch, transformers, this planner, and the file of transformers that holds the model's code. *Built on meta* is given to "
    "compare, and is part of the *first plan*: all from reading the config to the first plan with its bound, which the command line prints "
    f"at once; baselines, trade-offs and stages follow. The aim is {AIM:.0f} s. *Memory* is the growth of the process after import."
)
COMMAND_WORDS = (
    "`python -m planner_core plan FILE --cluster CLUSTER --json`: processor time (user and system) and peak memory of the whole command, with "
    "every baseline, trade-off and plan with stages. *Imported and built* is what importing torch and transformers and building the model on "
    f"meta takes in a process of its own; the aim is {AIM:.0f} times that."
)
BUILD = """import sys, json, torch, transformers
config = json.load(open(sys.argv[1]))
auto = transformers.AutoModelForSeq2SeqLM if config["model_type"] == "t5" else transformers.AutoModelForCausalLM
with torch.device("meta"):
    auto.from_config(transformers.AutoConfig.for_model(**config))
"""
FIRST = """import json, resource, sys, time
import torch, transformers
import planner_core.cli.main, planner_core.models.capture.module, planner_core.models.sources.resolve
from planner_core.planning import Request, plan_model

file, cluster, *sizes = sys.argv[1:]
build = lambda: None
if file.endswith(".json"):
    config = transformers.AutoConfig.for_model(**json.load(open(file)))
    auto = transformers.AutoModelForSeq2SeqLM if config.model_type == "t5" else transformers.AutoModelForCausalLM
    auto._model_mapping[type(config)]  # loads the file with its code
    build = lambda: auto.from_config(config)
imported = time.process_time()
with torch.device("meta"):
    build()
built = time.process_time()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()

def show(plan):
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found = {"step_time_s": plan.cost.step_time_s, "host_wait_s": plan.cost.host_wait_s, "fits": plan.fits, "bound_s": plan.bound}
    times = {"imported": imported, "built": built - imported, "first": time.process_time() - start, "bytes": used * 1024}
    print(json.dumps({"plans": [found], **times}), flush=True)
    raise SystemExit

batch, seq = (int(sizes[1]), int(sizes[3])) if sizes else (None, None)
plan_model(Request(file, cluster=cluster, batch=batch, seq=seq, accumulate=None, recompute="auto"), show_first=show)
"""


@dataclass(frozen=True, slots=True)
class CommandRun:
    """A Python process: its user and system seconds, about `LIMIT_S` if it was stopped; the most memory that it had; what it printed."""

    processor_s: float
    peak_bytes: int
    printed: str


def measure_first_plan(case: Case) -> list[str]:
    """Return the cells of a case: seconds of imports, of building the model, and to the first plan after imports; the plan; bytes."""
    with tempfile.TemporaryDirectory() as where:
        printed = run_python("-c", FIRST, write_config(case, where), case.cluster, *case.options).printed
    try:
        found = json.loads(printed)
    except ValueError:
        return ["", "", f"over {LIMIT_S} s, stopped", "", ""]
    seconds = [f"{found[what]:.2f} s" for what in ("imported", "built", "first")]
    return [*seconds, describe_first_plan(printed), f"{found['bytes'] / 1e9:.2f} GB"]


def measure_command(case: Case) -> list[str]:
    """Return the cells of a case: seconds of the command, of importing and building, their ratio, whether it holds, bytes, the answer."""
    with tempfile.TemporaryDirectory() as where:
        file = write_config(case, where)
        built = run_python("-c", BUILD, file)
        found = run_python("-m", "planner_core", "plan", file, "--cluster", case.cluster, "--json", *case.options)
    stopped, ratio = found.processor_s >= LIMIT_S - 1, found.processor_s / built.processor_s
    return [
        f"over {LIMIT_S} s, stopped" if stopped else f"{found.processor_s:.1f} s",
        f"{built.processor_s:.1f} s",
        f"{ratio:.1f}",
        "holds" if ratio <= AIM else "falls short",
        f"{found.peak_bytes / 1e9:.2f} GB",
        describe_first_plan(found.printed),
    ]


def write_config(case: Case, folder: str) -> str:
    """Return the MODEL argument of a case: its name in the zoo, or the file in `folder` in which its config is written."""
    if not case.config:
        return case.name
    file = Path(folder) / f"{case.name}.json"
    file.write_text(json.dumps(case.config), encoding="utf-8")
    return str(file)


def describe_first_plan(printed: str) -> str:
    """Return what a command says of its first plan: its step, and how far the GPU's work is above the least there is."""
    try:
        plan: dict[str, Any] = json.loads(printed)["plans"][0]
    except ValueError:
        return ""
    waits: float = plan["host_wait_s"]
    step, work = f"{plan['step_time_s']:.4g} s", plan["step_time_s"] - waits
    if not plan["fits"]:
        return f"{step}, does not fit"
    if not plan["bound_s"]:
        return step
    gap = work / plan["bound_s"] - 1
    how = "proven" if gap <= TIE else f"within {100 * gap:.2g} %"
    return f"{step}, {how}, but for {waits:.3g} s of waits for the host" if waits else f"{step}, {how}"


def run_python(*arguments: str, limit_s: int = LIMIT_S, **variables: str) -> CommandRun:
    """Run Python with these arguments and environment variables, with one thread and without a network."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **variables}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=alone,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s)),
        )
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
        out.seek(0)
        return CommandRun(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, out.read())
