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

    They agree over a gloo group of their own, so no GPU waits for it. The answer is that of the step before.
    """

    def __init__(self) -> None:
        self.heard = torch.zeros(1, dtype=torch.int32)
        self.group = dist.new_group(backend="gloo")
        self.asked_before: tuple[torch.Tensor, Any] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard[0] = 1

    def asked(self) -> bool:
        """Whether to stop. Call it after every step, on every rank."""
        before, total = self.asked_before, self.heard.clone()
        self.asked_before = total, dist.all_reduce(total, group=self.group, async_op=True)
        if before is None:
            return False
        before[1].wait()
        return bool(before[0].item())

    def close(self) -> None:
        """Wait for the last answer, before the process group is destroyed."""
        if self.asked_before is not None:
            self.asked_before[1].wait()
