"""What `bench.gpu` runs: plans, and for each the ways to run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLANS = Path(__file__).parent / "plans"
ROWS = Path(__file__).resolve().parents[2] / "assets" / "measurements" / "one_rank"
OURS, FSDP2, PARALLELIZE = "ours", "FSDP2", "parallelize_module"
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
"""Mixtral-8x7B with half of its layers."""


@dataclass(frozen=True)
class Case:
    """A stated layout. `runs`: (way, compiled) in the order of their worth; of each a step is profiled."""

    name: str
    what: str
    model: str | Mapping[str, Any]
    cluster: str
    layout: str
    options: Mapping[str, Any] = field(default_factory=dict)
    runs: tuple[tuple[str, bool], ...] = ((OURS, False), (FSDP2, False))
    steps: int = 6
    note: str = ""
    """Why its rows are not compared with predictions; empty if they are."""

    @property
    def plan(self) -> Path:
        """The file of its plan."""
        return PLANS / f"{self.name}.json"


ONE = "1x8-h100:gpus=1"
BOTH = ((OURS, False), (FSDP2, False), (OURS, True), (FSDP2, True))
CASES: Mapping[str, Case] = {
    c.name: c
    for c in (
        Case(
            "l8b_fsdp",
            "Llama-3-8B, FSDP over 16, 1 × 4096 tokens a rank",
            "llama-3-8b",
            "2x8-h100",
            "fsdp=16",
            {"micro_batch": 1, "seq": 4096},
            BOTH,
        ),
        Case(
            "l8b_sp",
            "Llama-3-8B, 4 data × 4 tensor, sequence parallel, 4 × 4096 tokens",
            "llama-3-8b",
            "2x8-h100",
            "dp=4,tp=4,sp",
            {"micro_batch": 4, "seq": 4096},
            ((OURS, False), (PARALLELIZE, False)),
            5,
        ),
        Case(
            "gpt2xl",
            "GPT-2 XL on one GPU, 8 × 1024 tokens",
            "gpt2-xl",
            ONE,
            "dp=1",
            {"micro_batch": 8, "seq": 1024},
            ((OURS, False), (FSDP2, False), (OURS, True)),
        ),
        Case("t5", "T5-large on one GPU, 8 × 512 tokens", "t5-large", ONE, "dp=1", {"micro_batch": 8, "seq": 512}),
        Case("vit", "ViT-large on one GPU, 64 images", "vit-large", ONE, "dp=1", {"micro_batch": 64}, BOTH[:3]),
        Case(
            "mix_fsdp",
            "Mixtral-8x7B of 16 layers, FSDP over 16, selective recomputation, 1 × 4096 tokens a rank",
            MIXTRAL,
            "2x8-h100",
            "fsdp=16",
            {"micro_batch": 1, "seq": 4096, "recompute": "selective"},
            ((OURS, False), (FSDP2, False)),
            4,
        ),
        Case(
            "mix_ep",
            "the same, experts dealt out over 8",
            MIXTRAL,
            "2x8-h100",
            "fsdp=16,ep=8",
            {"micro_batch": 1, "seq": 4096, "recompute": "selective"},
            ((OURS, False),),
            4,
            "a fake group gives every rank the rows of this one, so loads of experts are not those of a real run",
        ),
    )
}


@dataclass(frozen=True)
class Job:
    """One process: a case in one way."""

    case: Case
    way: str
    compiled: bool

    @property
    def name(self) -> str:
        """`l8b_fsdp ours compiled`."""
        return f"{self.case.name} {self.way}{' compiled' if self.compiled else ''}"


def jobs(only: tuple[str, ...] = ()) -> Iterator[Job]:
    """Yield the first way of each case, then the second of each, and so on: what a limit of time cuts off is worth least."""
    cases = [c for c in CASES.values() if not only or c.name in only]
    for place in range(max((len(c.runs) for c in cases), default=0)):
        yield from (Job(c, *c.runs[place]) for c in cases if place < len(c.runs))
