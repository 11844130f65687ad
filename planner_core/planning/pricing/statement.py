"""What a team states of its run: the model, the cluster, the layout, and what a step does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from planner_core.core import Graph, InputError, Workload
from planner_core.planning.methods import Layout

MOST_SAMPLES = 10**9
USUAL_ATTENTION, OLD_ATTENTION = "flash2", "flash1"
PRICED_PRECISION = "mixed"
"""What is trained with unless it is said: bf16 compute, weights, moments and gradients in float32."""


def usual_attention(graph: Graph) -> str:
    """The attention kernel that a model's stack runs where none is stated.

    Models with LayerNorm (GPT-NeoX, MPT) are those of stacks of 2023, which pinned FlashAttention 1; this alone tells their
    age. Published runs of them are met within 2 % with it and within 7 % with FlashAttention-2 (docs/PUBLISHED.md).
    """
    fns = {op.fn for block in (graph.top, *graph.blocks.values()) for op in block.ops}
    causal = any(
        op.attrs.get("is_causal")
        for block in (graph.top, *graph.blocks.values())
        for op in block.ops
        if "attention" in op.fn
    )
    return OLD_ATTENTION if "layer_norm" in fns and causal else USUAL_ATTENTION


@dataclass(frozen=True, slots=True)
class Statement:
    """A run as a team states it. `micro_batch` are the samples of one data-parallel rank at once; a step runs `accumulate` of
    them. None means the model's or the cluster's own default.
    """

    layout: Layout
    micro_batch: int = 1
    accumulate: int = 1
    seq: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    recompute: str = "none"
    compiled: bool = False
    precision: str = PRICED_PRECISION
    layers: int | None = None
    attention: str | None = None

    @property
    def graph_batch(self) -> int:
        """Samples of one micro-batch over all GPUs."""
        return self.micro_batch * self.layout.data

    @property
    def batch(self) -> int:
        """Samples of one step over all GPUs."""
        return self.graph_batch * self.accumulate

    def workload(self, seq: int, dtype: str, attention: str = USUAL_ATTENTION) -> Workload:
        """What a step does, at the sequence length and dtype that were chosen, with this attention kernel unless another is
        stated."""
        return Workload(
            self.batch, seq, dtype, self.optimizer, recompute=self.recompute, accumulate=self.accumulate,
            precision=self.precision, compiled=self.compiled, attention=self.attention or attention,
        )  # fmt: skip

    def check(self) -> None:
        """Raises InputError for what cannot be, or cannot be priced yet."""
        for name, value in (("micro-batch", self.micro_batch), ("accumulate", self.accumulate)):
            if not 1 <= value <= MOST_SAMPLES:
                raise InputError(f"--{name} {value} is not a positive number up to 10^9; give e.g. --{name} 2")
        self.workload(self.seq or 1, self.dtype or "bfloat16").check()

    def but(self, **changes: Any) -> Statement:
        """The same run with changes."""
        return replace(self, **changes)
