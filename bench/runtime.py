"""Our step beside the stock ways on this machine: same model, same ranks, one run, steps taken in turns.

    python -m bench.runtime [RANKS ...]         # 1, 2 and 4 gloo ranks; writes bench/support/results/runtime.jsonl and docs/RUNTIME.md

A row compares two ways of the same training step (forward, backward, AdamW): by the median of its seconds, and by processor
time, which other work on the machine disturbs less. Only ratios of one run mean something. `measure_host` is the processor time of the
host per operator beyond eager, on one rank and tensors so small that little else counts.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import planner_core as shardscope  # noqa: E402
from planner_core.core import Plan  # noqa: E402
from planner_core.verification.processes import run_ranks  # noqa: E402

RESULTS = ROOT / "bench" / "support" / "results" / "runtime.jsonl"
TABLE = ROOT / "docs" / "RUNTIME.md"
BATCH, SEQ, STEPS, WARMING = 4, 128, 21, 3
KEEPS_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""Settings of glibc under which it keeps what tensors free, as torch does on a GPU. Without them each large tensor is mapped anew and
its pages are zeroed, so that the times tell which way allocates more."""
HIDDEN = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
}
QUIET = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**HIDDEN, "intermediate_size": 704, "num_key_value_heads": 8, "architectures": ["LlamaForCausalLM"]},
    "gpt2": {
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 8,
        "vocab_size": 2048,
        "n_positions": 256,
        **QUIET,
        "architectures": ["GPT2LMHeadModel"],
    },
    "bert": {
        **HIDDEN,
        "intermediate_size": 1024,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "architectures": ["BertForMaskedLM"],
    },
}
TINY = {
    **SIZES["llama"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
Batch = dict[str, torch.Tensor]
Step = Callable[[], None]


class Convolutions(nn.Module):
    """A small residual network of convolutions with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(32) for _ in range(4))
        self.head = nn.Linear(32, 16)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Residual(nn.Module):
    """Two convolutions around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(nn.functional.relu(self.first(x)))


def build_model(name: str, sizes: Mapping[str, Any]) -> nn.Module:
    """Return the same model on every rank."""
    if name == "conv":
        return Convolutions()
    import transformers

    torch.manual_seed(0)
    parsed = transformers.AutoConfig.for_model(name, **sizes, use_cache=False)
    model: nn.Module = getattr(transformers, sizes["architectures"][0])(parsed)
    return model


def make_batch(name: str, size: int = BATCH, seq: int = SEQ, vocabulary: int = 2048) -> Batch:
    """Return the whole batch, equal on every rank."""
    draw = torch.Generator().manual_seed(0)
    if name == "conv":
        return {
            "pixels": torch.randn(8 * size, 3, 32, 32, generator=draw),
            "labels": torch.arange(8 * size) % 16,
        }
    ids = torch.randint(0, vocabulary, (size, seq), generator=draw)
    return {"input_ids": ids, "labels": ids}


def make_step(model: nn.Module, batch: Batch) -> Step:
    """One step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        out = model(**batch)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- the ways -----------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the repeated blocks."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def ddp(model: nn.Module) -> nn.Module:
    """DistributedDataParallel as it comes."""
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    """FSDP2, a unit for each block and one for the rest."""
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Megatron's layout of a Llama by parallelize_module (its weights are DTensors); the embedding and the head stay whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    column, row = ColwiseParallel(), RowwiseParallel()
    each = {f"self_attn.{n}_proj": column for n in "qkv"} | {"self_attn.o_proj": row}
    each |= {"mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row}
    for block in blocks_of(model):
        parallelize_module(block, mesh, each)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    return model


def alone(model: nn.Module) -> nn.Module:
    """One process, eager."""
    return model


WAYS: Mapping[str, tuple[Callable[[nn.Module], nn.Module], str, bool]] = {
    "one process": (alone, "best", False),
    "DDP": (ddp, "data parallel", True),
    "FSDP2": (fsdp, "FSDP", True),
    "parallelize_module": (tensor_parallel, "Megatron-LM", False),
}
"""Name -> what applies it, the name of our plan of that layout, whether ranks hold different samples."""


def compare_steps(name: str, way: str, plan_file: str, compiled: bool) -> dict[str, float]:
    """Return the seconds of a step the stock way and ours, in turns."""
    torch.set_num_threads(1)
    stock, _, split = WAYS[way]
    sizes, batch = SIZES.get(name, {}), make_batch(name)
    if split:
        batch = {k: v.chunk(dist.get_world_size())[dist.get_rank()] for k, v in batch.items()}
    theirs = stock(build_model(name, sizes))
    if compiled:
        for block in blocks_of(theirs):
            block.compile(fullgraph=True)
    ours = shardscope.apply(build_model(name, sizes), shardscope.load_plan(plan_file), compile=compiled)
    return _measure_steps({"stock": make_step(theirs, batch), "ours": make_step(ours, batch)})


def _measure_steps(steps: Mapping[str, Step], rounds: int = STEPS) -> dict[str, float]:
    """Medians of seconds and of processor seconds of both, warming up left out."""
    seconds: dict[str, list[float]] = {n: [] for n in steps}
    processor: dict[str, list[float]] = {n: [] for n in steps}
    for number in range(WARMING + rounds):
        for name, step in list(steps.items())[:: 1 if number % 2 else -1]:  # neither way always comes first
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            step()
            processor[name].append(time.process_time() - used)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    medians = {}
    for name in steps:
        medians[f"{name}_s"] = statistics.median(seconds[name][WARMING:])
        medians[f"{name}_cpu_s"] = statistics.median(processor[name][WARMING:])
    return medians


def measure_host(plan_file: str) -> dict[str, float]:
    """Processor seconds of forward and backward of a model of tiny tensors."""
    torch.set_num_threads(1)
    batch = make_batch("llama", 2, 16, 64)
    models = {
        "stock": build_model("llama", TINY),
        "ours": shardscope.apply(build_model("llama", TINY), shardscope.load_plan(plan_file)),
    }
    steps: dict[str, Step] = {n: (lambda m=m: m(**batch).loss.backward()) for n, m in models.items()}  # type: ignore[misc]
    return _measure_steps(steps, 60)


# --- running ------------------------------------------------------------------------------------------


def _plan_model(name: str, sizes: Mapping[str, Any], ranks: int, size: int = BATCH, seq: int = SEQ) -> dict[str, Plan]:
    """Our plans of a model, by name."""
    place = {"cluster": f"1x8-h100:gpus={ranks}", "mesh": str(ranks)}
    if name == "conv":
        result = shardscope.plan(Convolutions(), inputs=make_batch("conv"), **place)
    else:
        config = {"model_type": name, **sizes}
        result = shardscope.plan(config, batch=size, seq=seq, dtype="float32", **place)
    return {p.name: p for p in result.plans}


def _list_cases(ranks: int) -> list[tuple[str, str, bool]]:
    """(model, stock way, compiled): tensor parallelism of a Llama only, convolutions eager only."""
    ways = ["one process"] if ranks == 1 else ["DDP", "FSDP2", "parallelize_module"]
    return [
        (name, way, compiled)
        for name in (*SIZES, "conv")
        for way in ways
        for compiled in (False, True)
        if (name == "llama" or way != "parallelize_module") and not (compiled and name in ("conv", "bert"))
    ]


def _measure_ranks(ranks: int, folder: Path) -> None:
    """All comparisons on a number of ranks that were not made today."""
    plans: dict[str, dict[str, Plan]] = {}
    today = datetime.date.today().isoformat()
    if ranks == 1 and not _is_measured(1, "llama", "host", False, today):
        _write_row({**host_row(folder), "date": today})
    for name, way, compiled in _list_cases(ranks):
        if _is_measured(ranks, name, way, compiled, today):
            continue
        if name not in plans:
            plans[name] = _plan_model(name, SIZES.get(name, {}), ranks)
        file = str(folder / f"{name}-{way}.json".replace(" ", "-"))
        shardscope.save_plan(plans[name][WAYS[way][1]], file)
        times = run_ranks(compare_steps, ranks, (name, way, file, compiled), timeout_s=900)[0]
        _write_row({"model": name, "ranks": ranks, "way": way, "compiled": compiled, **times, "date": today})


def _read_rows() -> list[dict[str, Any]]:
    """Return the rows measured so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def _key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a row is of."""
    return row["ranks"], row["model"], row["way"], row["compiled"]


def _is_measured(ranks: int, name: str, way: str, compiled: bool, date: str) -> bool:
    """Return whether a row was measured on a day."""
    return any(_key_of(r) == (ranks, name, way, compiled) and r["date"] == date for r in _read_rows())


def _write_row(row: dict[str, Any]) -> None:
    """Put a row in the place of an older one, and write the page."""
    print(json.dumps(row), flush=True)
    rows = [*(r for r in _read_rows() if _key_of(r) != _key_of(row)), row]
    RESULTS.write_text("".join(json.dumps(r) + "\n" for r in sorted(rows, key=_key_of)))
    TABLE.write_text(_format_page(_read_rows()))


def host_row(folder: Path) -> dict[str, Any]:
    """Time of the host per operator on one rank."""
    plan = _plan_model("llama", TINY, 1, 2, 16)["best"]
    shardscope.save_plan(plan, folder / "host.json")
    ops = sum(len(b.sites) * len(b.prefixes) for b in plan.blocks.values())
    return {
        "model": "llama",
        "ranks": 1,
        "way": "host",
        "compiled": False,
        "ops": ops,
        **run_ranks(measure_host, 1, (str(folder / "host.json"),))[0],
    }


def _format_page(rows: list[dict[str, Any]]) -> str:
    """docs/RUNTIME.md."""
    lines = [
        "# The rewritten program beside the stock ways",
        "",
        f"Made by `python -m bench.runtime` on {rows[0]['date']}: {os.cpu_count()} processor cores that all ranks share with other "
        f"work, gloo, torch {torch.__version__.partition('+')[0]}, float32, batch {BATCH} x {SEQ} tokens, hidden size 256, four layers "
        f"(the convolutions: {8 * BATCH} images of 32 x 32). Steps of both ways (forward, backward, AdamW) take turns in one run; "
        f"seconds are medians of {STEPS}. The C library keeps what is freed, as torch does on a GPU. Seconds mean nothing elsewhere; "
        "ratios may. Processor time counts work and not waiting: "
        "where a step lasts many times its processor time, other work held the processors, and the ratio of seconds says little.",
        "",
        "| model | ranks | stock way | compiled | stock s | ours s | ours / stock | stock processor s | ours processor s | ours / stock |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in rows if r["way"] != "host"):
        ratio, work = r["ours_s"] / r["stock_s"], r["ours_cpu_s"] / r["stock_cpu_s"]
        lines.append(
            f"| {r['model']} | {r['ranks']} | {r['way']} | {'yes' if r['compiled'] else 'no'} | {r['stock_s']:.3f} | {r['ours_s']:.3f} "
            f"| {ratio:.2f} | {r['stock_cpu_s']:.3f} | {r['ours_cpu_s']:.3f} | {work:.2f} |"
        )
    for r in (r for r in rows if r["way"] == "host"):
        each = 1e6 * (r["ours_cpu_s"] - r["stock_cpu_s"]) / r["ops"]
        lines += [
            "",
            f"The host on one rank, a Llama of {r['ops']} operators on tiny tensors, forward and backward: {each:+.1f} microseconds of "
            f"processor time per operator against eager ({1e3 * r['stock_cpu_s']:.2f} ms eager, {1e3 * r['ours_cpu_s']:.2f} ms ours).",
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, keep, and write the page."""
    os.environ.update(KEEPS_MEMORY)  # for the processes of the ranks: they are started anew
    for ranks in [int(a) for a in sys.argv[1:]] or [1, 2, 4]:
        with tempfile.TemporaryDirectory() as folder:
            _measure_ranks(ranks, Path(folder))


if __name__ == "__main__":
    main()
