"""A run as a team states it: the layout and the workload of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from planner_core.core import (
    DEFAULT_PRECISION,
    MAX_SAMPLES,
    OPTIONS,
    InputError,
    Sentence,
    Software,
    Workload,
    check_options,
    named,
)
from planner_core.planning.methods import LayerStyles, Layout


@dataclass(frozen=True, slots=True)
class Statement(Software):
    """A stated run. A step has `accumulate` micro-batches, each of `micro_batch` samples on one data-parallel rank.

    None means the default of the model or of the cluster. `split_layers`: the layers that tensor ranks split, where a file names them; else
    all that Megatron-LM splits."""

    layout: Layout
    micro_batch: int = 1
    accumulate: int = 1
    seq: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    recompute: str = "none"
    precision: str = DEFAULT_PRECISION
    layers: int | None = None
    rank_by_rank: bool = False
    expert_imbalance: float = 1.0
    offload: bool = False
    vocab_multiple: int = 1
    lora: int | None = None
    nf4: bool = False
    split_layers: LayerStyles | None = None

    @property
    def graph_batch(self) -> int:
        """Samples of one global micro-batch."""
        return self.micro_batch * self.layout.data

    @property
    def batch(self) -> int:
        """Samples of one step over all GPUs."""
        return self.graph_batch * self.accumulate

    def workload(self, seq: int, dtype: str) -> Workload:
        """Return the workload of a step with this sequence length and dtype."""
        return Workload(
            self.batch,
            seq,
            dtype,
            self.optimizer,
            recompute=self.recompute,
            accumulate=self.accumulate,
            precision=self.precision,
            **self.stated_software(),
            rank_by_rank=self.rank_by_rank,
            expert_imbalance=self.expert_imbalance,
            offload=self.offload,
        )

    def check(self) -> None:
        """Raise InputError for a value that is impossible or cannot be priced."""
        check_options(self, (f.name for f in fields(self) if f.name in OPTIONS and f.name != "layout"))
        if self.batch > MAX_SAMPLES:
            stated = [named(name, n) for name in ("micro_batch", "accumulate") if (n := getattr(self, name)) > 1]
            raise InputError(
                Sentence.from_list(" and ", stated or [self.layout.term]),
                f" make {self.batch:,} samples a step over {self.layout.data} data-parallel ranks, of {MAX_SAMPLES:,} at most; give fewer",
            )
        self.workload(self.seq or 1, self.dtype or "bfloat16").check()

    @property
    def names_layers(self) -> bool:
        """Whether the split of products is by the names of layers: on tensor ranks beside data-parallel ranks of one kind."""
        layout = self.layout
        # A tensor axis beside one data axis is all that `follow_tp_layout` takes.
        others = max(layout.pp, layout.cp, layout.ep, min(layout.dp, layout.fsdp))
        return self.split_layers is not None and layout.tp > 1 == others

    def but(self, **changes: Any) -> Statement:
        """Return the same run with changes."""
        return replace(self, **changes)


STATED_OPTIONS = tuple(f.name for f in fields(Statement) if f.name in OPTIONS)
"""The options of a statement; the layers that are split are stated by a file alone."""
