"""A clean end when a scheduler or a user asks for it: all ranks stop after the same step."""

# mypy: allow-untyped-calls
from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Stop:
    """Whether the run was asked to stop (SIGTERM or SIGINT). All ranks learn it after the same step.

    They agree over a gloo group of their own, so that no GPU waits for it. The answer is that of the step before.
    """

    def __init__(self) -> None:
        self.received = torch.zeros(1, dtype=torch.int32)
        self.group = dist.new_group(backend="gloo")
        self.last_request: tuple[torch.Tensor, Any] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._mark_signal)

    def _mark_signal(self, number: int, frame: FrameType | None) -> None:
        self.received[0] = 1  # no more than a mark: a signal comes to one rank, perhaps in the middle of a collective

    def asked(self) -> bool:
        """Return whether to stop. Call it after every step, on every rank."""
        # A copy: the sum is written in place, and the mark has to stay that of this rank.
        previous, total = self.last_request, self.received.clone()
        self.last_request = total, dist.all_reduce(total, group=self.group, async_op=True)
        if previous is None:
            return False
        previous[1].wait()
        return bool(previous[0].item())

    def close(self) -> None:
        """Wait for the last answer, before the process group is destroyed."""
        if self.last_request is not None:
            self.last_request[1].wait()
