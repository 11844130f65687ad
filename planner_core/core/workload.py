"""What one training step does, and how it keeps its state."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner_core.core.errors import InputError

OPTIMIZERS = {"adamw": 2, "adamw-fp32": 0, "sgd": 0, "sgd-momentum": 1}
"""Optimizer states per parameter, each in the parameter's dtype (as torch.optim keeps them)."""


FP32_STATES = {"adamw-fp32": 12}
"""Bytes per parameter of states that are always 32-bit: the master copy and two moments."""


RECOMPUTE = ("none", "full")


@dataclass(frozen=True, slots=True)
class Workload:
    """What a training step does, and how it keeps its state.

    `batch` counts the samples of one step over all GPUs, `seq` the tokens of a sample. A step runs forward and backward
    for `accumulate` micro-batches, each `graph_batch` samples over all GPUs, and then the optimizer.
    """

    batch: int
    seq: int
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    zero: int = 3
    recompute: str = "none"
    accumulate: int = 1

    @property
    def graph_batch(self) -> int:
        """Samples of one micro-batch over all GPUs: the batch of the graph that is planned."""
        return self.batch // self.accumulate

    def check(self) -> None:
        """Raises InputError for a value that cannot be."""
        for name, value in (("batch", self.batch), ("seq", self.seq), ("accumulate", self.accumulate)):
            if not 1 <= value <= 10**9:
                raise InputError(f"--{name} {value} is not a positive number up to 10^9; give e.g. --{name} 16")
        if self.batch % self.accumulate:
            raise InputError(
                f"--accumulate {self.accumulate} does not divide --batch {self.batch}; give a divisor of it"
            )
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise InputError(f"--dtype {self.dtype!r} is not one of bfloat16, float16, float32")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"--optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
        if self.zero not in (0, 3):
            raise InputError(
                f"--zero {self.zero} is not one of 0 (weights kept) or 3 (weights may be sharded and gathered at use); stages 1 and 2, "
                "which keep weights whole and shard optimizer states (and gradients), are not planned"
            )
        if self.recompute not in RECOMPUTE:
            raise InputError(f"--recompute {self.recompute!r} is not one of {', '.join(RECOMPUTE)}")

    def to_json(self) -> dict[str, Any]:
        """Plain data, as plans and reports keep it."""
        return asdict(self)

    def state_bytes(self, item_bytes: int) -> int:
        """Bytes of optimizer state per parameter element."""
        return OPTIMIZERS[self.optimizer] * item_bytes + FP32_STATES.get(self.optimizer, 0)
