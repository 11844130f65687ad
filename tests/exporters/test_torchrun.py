"""The exported script: a page that trains as one process does, goes on elsewhere, and ends and starts again when it is told to."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import planner_core as shardscope
from explorer.components.overview.launch import launch_line
from explorer.text import words
from planner_core.core import InputError, Plan, plan_from_json, plan_to_json
from planner_core.exporters import Remark, RemarkKind
from planner_core.exporters.api import export, export_text
from planner_core.exporters.configs.common import launch_sizes
from planner_core.models import SNAPSHOT_TRANSFORMERS
from planner_core.models.sources import build_from_config
from planner_core.planning.methods import TARGETS
from planner_core.runtime import initializer
from planner_core.runtime.training import warmup_cosine
from planner_core.verification import materialise, scaled
from planner_core.verification.numerics import same_traffic
from tests.exporters.test_targets import planned
from tests.support.tiny_models import LLAMA
from tests.support.torchrun import command, environment, run_script, torchrun

STEPS, RATE, WARMUP, CLIP = 4, 1e-2, 2, 0.5
HOW = (
    "--steps",
    str(STEPS),
    "--lr",
    str(RATE),
    "--warmup",
    str(WARMUP),
    "--clip",
    str(CLIP),
    "--report-every",
    "1",
    "--weight-decay",
    "0",
    "--data",
    "tokens.bin",
    "--weights",
    "weights",
)


@pytest.mark.parametrize(
    ("sizes", "gpus_per_node", "nodes"), [((2, 4, 2), 8, 2), ((8, 2), 4, 4), ((8, 2), 8, 2), ((8, 2), None, 2)]
)
def test_a_host_has_the_processes_of_its_gpus(sizes: tuple[int, ...], gpus_per_node: int | None, nodes: int) -> None:
    """Pairs of GPUs in hosts of eight were started as `--nproc-per-node 2 --nnodes 8`, and by the page's line still were when the
    export was right."""
    levels = [{"name": f"level {i}", "size": n, "unit_gb_per_s": 50, "latency_us": 5} for i, n in enumerate(sizes)]
    cluster = {"gpu": "h100-sxm", "levels": levels}
    if gpus_per_node:
        cluster["gpus_per_node"] = gpus_per_node
    result = shardscope.plan("gpt2-xl", cluster=cluster, mesh="16", layers=1, seq=64, batch=16, accumulate=1)
    plan = result.best
    assert launch_sizes(plan) == (nodes, 16 // nodes)
    assert launch_sizes(plan_from_json(plan_to_json(plan))) == (nodes, 16 // nodes)
    shown = launch_line(TARGETS["torchrun"], result.cluster, plan)
    assert f"torchrun --nnodes {nodes} --nproc-per-node {16 // nodes} " in shown
    written = [str(r) for r in export_text(plan, "torchrun").remarks if Remark.of(r).kind == RemarkKind.LAUNCH]
    assert any(f"torchrun --nproc-per-node {16 // nodes} --nnodes {nodes} " in remark for remark in written)
    assert words.cluster_words(result.cluster) == f"{nodes} nodes × {16 // nodes} H100"


@cache
def plans(gpus: int = 2) -> dict[str, Plan]:
    found = shardscope.plan(
        LLAMA, cluster=f"1x8-h100:gpus={gpus}", mesh=str(gpus), batch=8, seq=16, dtype="float32", accumulate=2
    )
    return {p.name: p for p in found.plans}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens, weights, and the scripts of two plans for two ranks."""
    place = tmp_path_factory.mktemp("script")
    tokens = np.random.default_rng(3).integers(0, 256, 2_000).astype(np.uint16)
    tokens.tofile(place / "tokens.bin")
    model: Any = materialise(model := build_from_config(LLAMA, "float32")[0], initializer(model, 7))
    model.save_pretrained(place / "weights")
    export(plans()["FSDP"], "torchrun", place / "fsdp.py")
    export(plans()["Megatron-LM + sequence parallel"], "torchrun", place / "megatron.py")
    return place


def run(place: Path, script: str, ranks: int, *options: str) -> str:
    return run_script(script, *options, ranks=ranks, folder=place)


def losses(text: str, of: str = "step") -> dict[int, float]:
    return {int(n): float(x) for n, x in re.findall(rf"^{of} (\d+)  loss (\S+)", text, re.MULTILINE)}


@cache
def alone(place: Path) -> tuple[dict[int, float], float]:
    """The same steps in one process, by transformers alone: losses by step, and that of the first batch at the end."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(place / "weights", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    ids = torch.from_numpy(np.fromfile(place / "tokens.bin", np.uint16).astype(np.int64))[: STEPS * 128].view(
        STEPS, 8, 16
    )
    found = {}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * warmup_cosine(step, warmup=WARMUP, steps=STEPS)
        loss = model(input_ids=ids[step], labels=ids[step]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found[step + 1] = float(loss.detach())
    with torch.no_grad():
        return found, float(model(input_ids=ids[0], labels=ids[0]).loss)


@pytest.fixture(scope="module")
def first(folder: Path) -> str:
    """What a run of the FSDP script says that uses most of what there is."""
    return run(
        folder,
        "fsdp.py",
        2,
        *HOW,
        "--save",
        "run",
        "--save-every",
        "2",
        "--keep",
        "0",
        "--profile",
        "trace",
        "--report",
        "log.jsonl",
        "--eval-data",
        "tokens.bin",
        "--eval-every",
        str(STEPS),
        "--eval-steps",
        "1",
    )


def test_the_script_trains_as_one_process_does(folder: Path, first: str) -> None:
    """Micro-batches, clipping, a schedule, safetensors, a file of tokens, an evaluation."""
    wanted, held = alone(folder)
    assert losses(first) == pytest.approx(wanted, rel=5e-6)
    assert losses(first, "evaluation after step") == {STEPS: pytest.approx(held, rel=5e-6)}


def test_the_script_leaves_checkpoints_a_log_and_a_trace(folder: Path, first: str) -> None:
    assert sorted(p.parent.name for p in folder.glob("run/*/.metadata")) == ["step-00000002", "step-00000004"]
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert {r["step"]: r["loss"] for r in rows if "loss" in r} == pytest.approx(losses(first), rel=1e-6)
    assert {"evaluation_loss"} <= rows[-1].keys() and all(r["tokens_per_s"] > 0 for r in rows if "loss" in r)
    for rank in range(2):
        events = json.loads((folder / f"trace/rank{rank}.json").read_text())["traceEvents"]
        assert any("gloo:all_gather" in str(e.get("name")) for e in events), "the trace shows its collectives"


def test_the_script_goes_on_under_another_plan(folder: Path, first: str) -> None:
    """From a checkpoint of two ranks of FSDP with sequence parallelism: weights, moments, rate and place in the data."""
    shutil.copytree(folder / "run" / "step-00000002", folder / "other" / "step-00000002")
    rest = run(folder, "megatron.py", 2, *HOW, "--save", "other")
    wanted, _ = alone(folder)
    assert losses(rest) == pytest.approx({step: wanted[step] for step in (3, 4)}, rel=5e-6)


@pytest.mark.slow
def test_the_script_goes_on_on_another_number_of_ranks(folder: Path, first: str) -> None:
    shutil.copytree(folder / "run" / "step-00000002", folder / "more" / "step-00000002")
    shardscope.save_plan(plans(4)["trade-off 1"], folder / "four.json")
    rest = run(folder, "fsdp.py", 4, *HOW, "--save", "more", "--plan", "four.json")
    wanted, _ = alone(folder)
    assert losses(rest) == pytest.approx({step: wanted[step] for step in (3, 4)}, rel=5e-6)


def test_the_blocks_of_the_script_are_what_runs_with_the_predicted_traffic(folder: Path) -> None:
    """An edit in a block is an edit of the run. The collectives of a step are those of the plan."""
    text = (folder / "megatron.py").read_text()
    head = "def llama_decoder_layer(w, hidden_states, cos, sin):\n"
    assert head in text
    (folder / "edited.py").write_text(text.replace(head, f'{head}    print("this block runs", flush=True)\n'))
    shutil.copy(folder / "megatron.plan.json", folder / "edited.plan.json")
    said = run(folder, "edited.py", 2, "--count")
    assert said.count("this block runs") == 2 * 2 * LLAMA["num_hidden_layers"]  # type: ignore[operator]  # ranks, micro-batches
    found = json.loads(next(x for x in said.splitlines() if x.startswith("collectives ")).removeprefix("collectives "))
    assert same_traffic(found["predicted"], found["measured"]), found
    assert found["predicted"] == plans()["Megatron-LM + sequence parallel"].cost.collectives()


CRASHING = """
import os, sys, time
from pathlib import Path
from planner_core.runtime import training
import {script} as script

class Report(training.Report):
    def step(self, step, *rest):
        super().step(step, *rest)
        if step == 3 and not Path("crashed").exists() and os.environ["RANK"] == "0":
            while not Path("{saved}/step-00000002/.metadata").exists():
                time.sleep(0.05)
            Path("crashed").touch()
            os._exit(1)

training.Report = Report
training.run(script.main)
"""


@pytest.mark.slow
def test_a_run_that_fails_goes_on_from_its_last_checkpoint(folder: Path) -> None:
    (folder / "crashing.py").write_text(CRASHING.format(script="fsdp", saved="failed"))
    options = (*HOW, "--save", "failed", "--save-every", "2")
    with pytest.raises(AssertionError):
        run(folder, "crashing.py", 2, *options)
    assert (folder / "crashed").exists()
    again = losses(run(folder, "crashing.py", 2, *options))
    assert again == pytest.approx({n: x for n, x in alone(folder)[0].items() if n > 2}, rel=5e-6)


@pytest.mark.slow
def test_torchrun_starts_a_run_that_fails_again(folder: Path) -> None:
    (folder / "crashed").unlink(missing_ok=True)
    (folder / "crashing.py").write_text(CRASHING.format(script="fsdp", saved="crash"))
    options = (*HOW, "--save", "crash", "--save-every", "2")
    said = torchrun("crashing.py", *options, options=("--max-restarts", "1"), folder=folder)
    assert (folder / "crashed").exists()
    steps = [int(n) for n in re.findall(r"^step (\d+) ", said, re.MULTILINE)]
    assert steps == [1, 2, 3, 3, 4]
    assert losses(said) == pytest.approx(alone(folder)[0], rel=5e-6)


STOPPED = """
import os, signal
from planner_core.runtime import training
import fsdp as script

class Report(training.Report):
    def step(self, step, *rest):
        super().step(step, *rest)
        if step == 2 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)

training.Report = Report
training.run(script.main)
"""


def test_a_run_that_is_asked_to_stop_saves_and_ends_well(folder: Path) -> None:
    """One rank that is asked is enough: all end after the same step."""
    (folder / "stopping.py").write_text(STOPPED)
    said = run(folder, "stopping.py", 2, *HOW, "--steps", "100000", "--save", "asked", "--save-every", "0")
    (saved,) = (folder / "asked").glob("*/.metadata")
    assert list(losses(said)) == [1, 2, int(saved.parent.name.removeprefix("step-"))][: len(losses(said))]


@pytest.mark.slow
def test_torchrun_passes_on_that_it_is_asked_to_stop(folder: Path) -> None:
    line = [*command("fsdp.py"), *HOW, "--steps", "100000", "--save", "stopped", "--save-every", "0"]
    process = subprocess.Popen(
        line, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("step 2 "):
                break
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    (saved,) = (folder / "stopped").glob("*/.metadata")
    steps = [int(n) for n in re.findall(r"^step (\d+) ", rest, re.MULTILINE)]
    assert int(saved.parent.name.removeprefix("step-")) >= max(steps, default=2)


@pytest.mark.slow
def test_the_script_compiles_its_blocks(folder: Path) -> None:
    said = run(folder, "fsdp.py", 2, *HOW, "--compile")
    assert losses(said) == pytest.approx(alone(folder)[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("gpt2-xl", "best"),
        ("llama-3-8b", "Megatron-LM + sequence parallel"),
        ("mixtral-8x7b", "best"),
        ("vit-large", "best"),
    ],
)
def test_a_full_size_script_runs_tiny(name: str, which: str, tmp_path: Path) -> None:
    export(planned(name)[which], "torchrun", tmp_path / "train.py")
    said = run(
        tmp_path, "train.py", 4, "--tiny", "--steps", "6", "--lr", "1e-2", "--warmup", "1", "--report-every", "1"
    )
    found = losses(said)
    assert list(found) == [1, 2, 3, 4, 5, 6] and all(np.isfinite(list(found.values())))


@pytest.mark.parametrize("which", ["best", "Megatron-LM + sequence parallel"])
@pytest.mark.slow(only=("best",))
def test_the_script_is_a_page(which: str) -> None:
    """Below 300 lines of at most 120 columns for Llama-3-8B (older models of transformers call more operators), and nothing in it that
    Python does not know."""
    most = 300 if version("transformers") == SNAPSHOT_TRANSFORMERS else 310
    text = export_text(planned("llama-3-8b")[which], "torchrun").text
    lines = text.splitlines()
    assert len(lines) < most and max(map(len, lines)) <= 120
    assert "def llama_decoder_layer(" in text and "all_gather" in text
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_plan_stands_beside_the_script(folder: Path) -> None:
    assert plan_from_json(json.loads((folder / "fsdp.plan.json").read_text())) == plans()["FSDP"]


def test_a_script_whose_blocks_are_of_another_plan_is_refused(folder: Path) -> None:
    shardscope.save_plan(plans()["Megatron-LM"], folder / "stale.plan.json")
    shutil.copy(folder / "fsdp.py", folder / "stale.py")
    with pytest.raises(AssertionError, match=r"blocks were written for another plan.*export it again"):
        run(folder, "stale.py", 2, "--steps", "1")


OTHERWISE = """
from planner_core.runtime import training
from planner_core.runtime.write import planned
import edited as script

plain = planned.write_program

def otherwise(*args, **options):
    made = plain(*args, **options)
    made.source += "\\n# as where the model's code makes its constants in another way: on a GPU"
    return made

planned.write_program = otherwise
training.run(script.main)
"""


def test_the_blocks_of_a_script_run_though_others_would_be_written_here(folder: Path) -> None:
    """Texts say nothing: what counts is that the model runs the operators of the plan, which are compared by their sites."""
    text = (folder / "fsdp.py").read_text()
    head = "def llama_decoder_layer(w, hidden_states, cos, sin):\n"
    assert head in text
    (folder / "edited.py").write_text(text.replace(head, f'{head}    print("this block runs", flush=True)\n'))
    shutil.copy(folder / "fsdp.plan.json", folder / "edited.plan.json")
    (folder / "otherwise.py").write_text(OTHERWISE)
    said = run(folder, "otherwise.py", 2, "--steps", "1")
    assert "this block runs" in said and "made anew" not in said


def test_a_model_that_runs_fewer_operators_than_its_script_was_written_for_names_one(folder: Path) -> None:
    """As where transformers is of another version."""
    shutil.copy(folder / "fsdp.py", folder / "fewer.py")
    shutil.copy(folder / "fsdp.plan.json", folder / "fewer.plan.json")
    (folder / "without.py").write_text(
        "import transformers.models.llama.modeling_llama as llama, torch\n"
        "llama.LlamaRMSNorm.forward = lambda self, x: x * self.weight\n"
        "from planner_core.runtime import training\nimport fewer as script\ntraining.run(script.main)\n"
    )
    with pytest.raises(AssertionError, match=r"PlanMismatch: model\.\S*norm\S* "):
        run(folder, "without.py", 2, "--steps", "1")


@pytest.mark.slow
def test_script_refuses_another_number_of_processes(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"the plan is for 2 devices .* has 3 ranks"):
        run(folder, "fsdp.py", 3, "--steps", "1")


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(64, 32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.scale = nn.Parameter(torch.full((32,), 0.5))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x + self.down(nn.functional.gelu(self.up(x))) * self.scale
        return RESULT

def make():
    ids = torch.randint(0, 64, (8, 16))
    return Net(), EXAMPLE
"""
LOSS = "nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())"


@pytest.mark.slow
@pytest.mark.parametrize("example", ['{"ids": ids, "labels": ids}', "(ids, ids.flip(0))"])
def test_the_script_of_a_users_own_model(example: str, tmp_path: Path) -> None:
    """The script imports the user's file; its values are those that the file gives for this seed."""
    file = tmp_path / "mine.py"
    file.write_text(OWN.replace("RESULT", LOSS).replace("EXAMPLE", example))
    plan = scaled(shardscope.plan(f"{file}:make", cluster="1x8-h100", mesh="8").best, 2)
    export(plan, "torchrun", tmp_path / "train.py")
    how = ("--steps", "3", "--lr", "1e-2", "--warmup", "0", "--report-every", "1", "--weight-decay", "0", "--clip", "0")
    found = losses(run(tmp_path, "train.py", 2, *how))
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    model, inputs = scope["make"]()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 1e-2 * warmup_cosine(step, warmup=0, steps=3)
        here = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        assert found[step + 1] == pytest.approx(float(here.detach()), rel=5e-6)
        here.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found[3] < found[1]
    file.unlink()
    with pytest.raises(AssertionError, match="give its place with --model"):
        run(tmp_path, "train.py", 2)


def test_a_stand_in_loss_is_not_trained_on_silently(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN.replace("RESULT", "self.head(x)").replace("EXAMPLE", '{"ids": ids, "labels": ids}'))
    found = shardscope.plan(f"{file}:make", cluster="1x8-h100", mesh="8")
    plan = scaled(next(p for p in found.plans if p.name == "FSDP"), 2)
    export(plan, "torchrun", tmp_path / "train.py")
    assert "returns no loss: put yours into loss_of" in (tmp_path / "train.py").read_text()
    with pytest.raises(AssertionError, match=r"Net returns no loss: compute yours .* in loss_of"):
        run(tmp_path, "train.py", 2, "--steps", "1")
    found = losses(run(tmp_path, "train.py", 2, "--steps", "2", "--report-every", "1", "--stand-in-loss"))
    assert list(found) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_script_of_a_model_with_scans_runs_with_the_predicted_traffic(kind: str, tmp_path: Path) -> None:
    own = {
        "mamba": {"state_size": 8, "intermediate_size": 128, "time_step_rank": 4},
        "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 8, "chunk_size": 8},
    }[kind]
    config = {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "expand": 2, **own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    best = shardscope.plan(str(tmp_path / "config.json"), cluster="1x8-h100", mesh="8", batch=16, seq=32).best
    export(scaled(best, 2), "torchrun", tmp_path / "train.py")
    said = run(tmp_path, "train.py", 2, "--count")
    found = json.loads(next(x for x in said.splitlines() if x.startswith("collectives ")).removeprefix("collectives "))
    assert same_traffic(found["predicted"], found["measured"]), found


@pytest.mark.slow
def test_master_weights_are_the_parameters(folder: Path) -> None:
    """In bfloat16 with float32 masters, which the optimizer keeps no second copy of."""
    found = shardscope.plan(
        LLAMA, cluster="1x8-h100:gpus=2", mesh="2", batch=8, seq=16, dtype="bfloat16", optimizer="adamw-fp32"
    )
    export(next(p for p in found.plans if p.name == "FSDP"), "torchrun", folder / "half.py")
    said = losses(run(folder, "half.py", 2, *HOW))
    assert said == pytest.approx(alone(folder)[0], rel=5e-3)


def test_json_export_is_the_plan() -> None:
    plan = planned("llama-3-8b")["Megatron-LM"]
    assert plan_from_json(json.loads(export_text(plan, "json").text)) == plan


def test_bad_target_and_folder(tmp_path: Path) -> None:
    plan = plans()["FSDP"]
    with pytest.raises(InputError, match="not one of"):
        export(plan, "tensorflow", tmp_path / "x")
    for target in ("json", "torchrun"):
        with pytest.raises(InputError, match="cannot write"):
            export(plan, target, tmp_path / "missing" / "x")
    assert list(tmp_path.iterdir()) == []
