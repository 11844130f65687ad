"""Published training runs (`assets/measurements/published/runs.csv`) as statements that `price` can price."""

from __future__ import annotations

import csv
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_core.core import ASSETS, Plan, load_cluster
from planner_core.planning import Planner
from planner_core.planning.methods import Layout
from planner_core.planning.pricing import Pricer, Statement

RUNS = ASSETS / "measurements" / "published" / "runs.csv"
H100, A100 = ("h100-sxm", 450), ("a100-80gb-sxm", 300)
GPUS = {
    "H100 80GB": H100,
    "H100 (80GB)": H100,
    "H100 80GB SXM": H100,
    "H100": H100,
    "H100 80GB HBM3 SXM": H100,
    "DGX-H100": H100,
    "DGX H100 80GB": H100,
    "DGX-H100 80GB": H100,
    "H100 SXM 96GB HBM2e (500W cap, 2.4 TB/s HBM)": ("h100-96gb-500w", 450),
    "H200": ("h200-sxm", 450),
    "A100 80GB": A100,
    "A100-SXM4-80GB": A100,
    "A100 80GB SXM": A100,
    "DGX A100": A100,
    "A100 40GB": ("a100-40gb-sxm", 300),
    "A800": ("a800-80gb", 200),
    "MI300X": ("mi300x", 448),
}
"""The preset of each GPU as the sources name it, and GB/s one way out of it inside a node."""
NODE = 8
AMPLE_BYTES = 10**14
"""Memory per GPU while a stated layout is priced: it ran, whatever is thought of its memory."""
USUAL_GBIT = {"h": 3200, "a": 1600}
"""Gbit/s out of a node where a source names none: eight links of 400 beside an H100 or H200, of 200 beside an A100."""
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """One row as a statement: a config, a cluster, a layout, and the seconds of a step that were measured."""

    id: str
    source: str
    name: str
    gpu: str
    gpus: int
    cluster: str
    config: dict[str, Any]
    stated: Statement
    measured_s: float
    row: Row

    @property
    def nodes(self) -> int:
        """Nodes of eight GPUs."""
        return max(1, self.gpus // NODE)

    @property
    def layout(self) -> str:
        """The kind of layout."""
        layout = self.stated.layout
        if layout.tp > 1:
            return "tensor parallel"
        return "FSDP" if layout.fsdp > 1 else f"ZeRO-{layout.zero}" if layout.zero else "data parallel"


def plan_run(run: Run) -> tuple[Plan | None, Planner]:
    """Return the plan of a run, which is None where the layout is not legal for the model, and its planner. Raises InputError."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(run.config))
        pricer = Pricer(str(config), load_cluster(run.cluster).with_memory(AMPLE_BYTES))
        return pricer.plan(run.stated), pricer.planner(run.stated)


def read_runs(grades: str = "A") -> Iterator[Run]:
    """Rows that can be stated: a known GPU, no pipeline, plain recomputation, a measured speed."""
    with RUNS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["grade"] in grades and _can_be_stated(row):
                yield _read_run(row)


def _can_be_stated(row: Row) -> bool:
    plain = row["recompute"].split(" ")[0] in ("none", "full") or row["recompute"].startswith("selective (per-op")
    whole = row["pp"] in ("", "1") and row["cp"] in ("", "1")
    shaped = bool(row["layers"] and row["micro_batch_seqs"] and _parse_number(row["micro_batch_seqs"]) >= 1)
    return row["gpu"] in GPUS and plain and whole and shaped and row["outcome"] == "ok" and _tokens_per_s(row) > 0


def _read_run(row: Row) -> Run:
    gpu, intra = GPUS[row["gpu"]]
    gpus, stated = int(row["gpus"]), _state_row(row)
    nodes, seq = max(1, gpus // NODE), int(row["seq_len"])
    name = f"2x8-h100:nodes={nodes},gpus={min(NODE, gpus)},intra={intra},inter={_read_gbit(row, gpu) / 8:g},gpu={gpu}"
    # Sources print tokens a second of one GPU, and the ranks of a tensor-parallel group share their tokens.
    tokens = stated.micro_batch * seq * stated.accumulate / stated.layout.tp
    return Run(
        row["id"],
        row["source"],
        row["model"],
        gpu,
        gpus,
        name,
        _read_config(row),
        stated,
        tokens / _tokens_per_s(row),
        row,
    )


def _state_row(row: Row) -> Statement:
    return Statement(
        _read_layout(row),
        int(_parse_number(row["micro_batch_seqs"])),
        int(_parse_number(row["grad_accum"], 1)) or 1,
        int(row["seq_len"]),
        recompute=row["recompute"].split(" ")[0],
        compiled=row["compile"].lower().startswith(("yes", "1", "true")),
        rank_by_rank=hands_out_rank_by_rank(row),
        stack=stack_of(row),
        loss="eager" if leaves_loss_uncompiled(row) else None,
    )


STACKS = {
    "llm-foundry": "llm-foundry",
    "nanotron": "nanotron",
    "InternEvo": "internevo",
    "torchtitan": "torchtitan",
    "ao": "torchtitan",
}
"""The stack of each source, by a part of the source's name."""


def stack_of(row: Row) -> str:
    """Return the stack that ran a row; PyTorch alone if its source is none of the known ones."""
    return next((stack for name, stack in STACKS.items() if row["source"].split(" ")[0].endswith(name)), "torch")


def leaves_loss_uncompiled(row: Row) -> bool:
    """Return whether a run compiled its blocks, and not its loss. From 2024-12-18 to 2025-04-02 torchtitan's code says of the loss
    "compiling loss function causes CUDA errors, turning off for now" (e8977b007 to bbb1b616e). torchtitan's tables of December 2024 fall
    into these days, and so do torchao's, which ran torch 2.7.0a0."""
    return "titan 9dec370" in row["source_ref"] or "torch 2.7.0a0" in row["notes"]


def hands_out_rank_by_rank(row: Row) -> bool:
    """Return whether the stack of a run hands out what ZeRO-1 updated tensor by tensor and rank by rank, as its code says: nanotron's
    `all_gather_coalesced`, InternEvo's `broadcast_params`. Where InternEvo shards states over one node alone (zero1=8), it is eight ranks:
    too few to tell, and the layout here says all."""
    return row["zero_stage"][:1] == "1" and ("nanotron" in row["source"] or row["notes"].startswith("zero1=-1"))


def _read_layout(row: Row) -> Layout:
    gpus, tp = int(row["gpus"]), int(_parse_number(row["tp"], 1)) or 1
    stage, sp = row["zero_stage"][:1] or "0", row["sp"] in ("1", "True") and tp > 1
    if stage == "3":
        shard = int(_parse_number(row["fsdp_shard"])) or gpus // tp
        return Layout(dp=gpus // tp // shard, fsdp=shard, tp=tp, sp=sp)
    return Layout(dp=gpus // tp, tp=tp, sp=sp, zero=int(stage))


def _read_config(row: Row) -> dict[str, Any]:
    """Return the Hugging Face config of the row's shape: Llama where the inner layer is gated, else GPT-NeoX."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    common = {
        "vocab_size": int(_parse_number(row["vocab"], 50304)),
        "num_hidden_layers": int(row["layers"]),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": int(_parse_number(row["ffn"], 4 * hidden)),
        "max_position_embeddings": int(row["seq_len"]),
        "tie_word_embeddings": row["tied_embeddings"] in ("1", "True"),
    }
    if row["ffn_gated"] in ("1", "True"):
        kv = int(_parse_number(row["kv_heads"], heads))
        return common | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": kv}
    return common | {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "use_parallel_residual": False,
    }


def _read_gbit(row: Row, gpu: str) -> float:
    """Gbit/s out of a node."""
    text = row["inter_node"].replace(",", "")
    several = re.search(r"(\d+)\s*x\s*(\d+)\s*G", text)
    if several:
        return float(several[1]) * float(several[2])
    one = re.search(r"(\d{3,4})\s*G", text)
    return float(one[1]) * (NODE if "per GPU" in text else 1) if one else USUAL_GBIT["h" if gpu[0] == "h" else "a"]


def _tokens_per_s(row: Row) -> float:
    return _parse_number(row["tokens_per_s_per_gpu"]) or _parse_number(row["derived_tokens_per_s_per_gpu"])


def _parse_number(text: str, default: float = 0.0) -> float:
    try:
        return float(text)
    except ValueError:
        return default
