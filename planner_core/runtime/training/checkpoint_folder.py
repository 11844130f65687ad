"""The checkpoints of a run: written every few steps while it goes on. A new run continues from the newest."""

# mypy: allow-untyped-calls
from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner_core.runtime.training.checkpoints import load, save


class Checkpoints:
    """The checkpoints in a folder, in `step-00000100` and so on. The newest `keep` stay. Without a folder no checkpoint is
    written.

    A checkpoint is complete if it has `.metadata`, which torch writes last.
    """

    def __init__(
        self,
        folder: Path | None,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 0,
        keep: int = 2,
    ) -> None:
        self.folder, self.module, self.optimizer = folder, module, optimizer
        self.every, self.keep = every, keep
        self.pending: Future[Any] | None = None
        self.newest = -1

    def resume(self) -> int:
        """Load the newest complete checkpoint, whatever plan and number of ranks wrote it. Return its number of steps, or 0."""
        complete = complete_checkpoints(self.folder) if self.folder else []
        newest = [str(complete[-1]) if complete else ""]
        dist.broadcast_object_list(newest, 0)  # all ranks from the same one
        if not newest[0]:
            return 0
        step = int(load(self.module, self.optimizer, newest[0], extra={"step": 0})["step"])
        self.newest = step
        return step

    def after(self, step: int) -> None:
        """Save if `step` is a multiple of `every`."""
        if self.every and step % self.every == 0:
            self.save(step)

    def save(self, step: int) -> None:
        """Save now. Training goes on while files are written. One checkpoint is written at a time."""
        if self.folder is None or step == self.newest:
            return
        self.finish()
        self.pending = save(
            self.module, self.optimizer, self.folder / f"step-{step:08}", extra={"step": step}, wait=False
        )
        self.newest = step

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and remove old ones."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        if self.folder is not None and dist.get_rank() == 0 and self.keep:
            for old in complete_checkpoints(self.folder)[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, the oldest first."""
    return sorted(f.parent for f in folder.glob("step-*/.metadata"))
