"""The mesh axes that shard a dim. A function that runs on a part of its tensors reaches the other ranks through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class RankAxis(Protocol):
    """A mesh axis as these functions need it: its size, this rank's place on it, and a sum (or max) over its ranks."""

    @property
    def size(self) -> int:
        """Ranks on the axis."""

    @property
    def rank(self) -> int:
        """This rank's index on the axis."""

    def all_reduce(self, x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        """Return the sum (or max) of every rank's tensor."""

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tensors of all ranks, joined along `dim`."""

    def exchange(
        self, pieces: torch.Tensor, counts: list[int], received: list[int] | None = None, *, back: bool = False
    ) -> torch.Tensor:
        """Send `counts[r]` of the pieces along dim 0 to each rank r, and receive `received[r]` from it (default: as many); in order
        of ranks. `back`: the pieces return to where they came from, so the plan knows the size of what is received."""

    def start_send_recv(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a flat tensor to the next rank, and receive one of the same length from the rank before. The result of the call
        waits for it."""


Axes = Sequence[RankAxis]


def shard_index(axes: Axes) -> int:
    """Return the index of this rank's shard of a dim that `axes` shard. The outer axis makes the larger pieces."""
    index = 0
    for axis in axes:
        index = index * axis.size + axis.rank
    return index


def num_shards(axes: Axes) -> int:
    """Return the number of shards of a dim that `axes` shard."""
    count = 1
    for axis in axes:  # not math.prod, which torch.compile does not know
        count *= axis.size
    return count
