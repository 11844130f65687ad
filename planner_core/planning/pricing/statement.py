"""A run as a team states it: the model, the cluster, the layout, and the workload of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from planner_core.core import DEFAULT_PRECISION, Graph, InputError, Workload
from planner_core.planning.methods import Layout

MOST_SAMPLES = 10**9
USUAL_ATTENTION, OLD_ATTENTION = "flash2", "flash1"


def usual_attention(graph: Graph) -> str:
    """The attention kernel that is assumed if none is stated.

    Models with LayerNorm (GPT-NeoX, MPT) come from the stacks of 2023, which used FlashAttention 1. The LayerNorm is the only sign
    of their age. The error for published runs of them is 2 % with FlashAttention 1, and 7 % with FlashAttention-2
    (docs/PUBLISHED.md).
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
    """A run as a team states it. A step has `accumulate` micro-batches, each of `micro_batch` samples on one data-parallel rank.
    None means the default of the model or of the cluster.
    """

    layout: Layout
    micro_batch: int = 1
    accumulate: int = 1
    seq: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    recompute: str = "none"
    compiled: bool = False
    precision: str = DEFAULT_PRECISION
    layers: int | None = None
    attention: str | None = None
    rank_by_rank: bool = False
    expert_imbalance: float = 1.0
    offload: bool = False

    @property
    def graph_batch(self) -> int:
        """Samples of one global micro-batch."""
        return self.micro_batch * self.layout.data

    @property
    def batch(self) -> int:
        """Samples of one step over all GPUs."""
        return self.graph_batch * self.accumulate

    def workload(self, seq: int, dtype: str, attention: str = USUAL_ATTENTION) -> Workload:
        """The workload of a step with this sequence length and dtype. `attention` is the kernel if none was stated."""
        return Workload(
            self.batch, seq, dtype, self.optimizer, recompute=self.recompute, accumulate=self.accumulate,
            precision=self.precision, compiled=self.compiled, attention=self.attention or attention,
            rank_by_rank=self.rank_by_rank, expert_imbalance=self.expert_imbalance, offload=self.offload,
        )  # fmt: skip

    def check(self) -> None:
        """Raise InputError for a value that is impossible, or that cannot be priced yet."""
        for name, value in (("micro-batch", self.micro_batch), ("accumulate", self.accumulate)):
            if not 1 <= value <= MOST_SAMPLES:
                raise InputError(f"--{name} {value} is not a positive number up to 10^9; give e.g. --{name} 2")
        self.workload(self.seq or 1, self.dtype or "bfloat16").check()

    def but(self, **changes: Any) -> Statement:
        """The same run with changes."""
        return replace(self, **changes)
