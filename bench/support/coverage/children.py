"""Measurements in forked children, each with a limit of time and of memory, so that one that fails leaves the others alone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 300
"""What a child may take; and `limit_memory`'s 2 GB beyond the libraries."""


def warm() -> None:
    """Import once what every child needs, in one thread, so that a fork is safe."""
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)


def in_child(work: Callable[[Any], None]) -> dict[str, Any]:
    """Return what `work` tells, run in a forked child with a time and a memory limit."""
    read, write = os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(write, work)
    os.close(write)
    data, reason = b"", ""
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, LIMIT_S - (time.perf_counter() - start)))
        if not ready:
            reason = f"stopped after {LIMIT_S} s"
            os.kill(child, signal.SIGKILL)
            break
        chunk = os.read(read, 1 << 16)
        if not chunk:
            break
        data += chunk
    os.close(read)
    os.waitpid(child, 0)
    lines = [json.loads(x) for x in data.decode().splitlines() if x.startswith("{") and x.endswith("}")]
    row: dict[str, Any] = {k: v for line in lines for k, v in line.items()}
    row.setdefault("outcome", "stopped")
    if row["outcome"] in ("stopped", "capture", "planning"):
        row["reason"] = reason or row.get("reason") or "the process ended without a word (memory limit)"
    row["total_s"] = round(time.perf_counter() - start, 1)
    return row


def _child(write: int, work: Callable[[Any], None]) -> None:
    """Never returns. Every pass reports as it ends, so that a stopped model says how far it came."""
    from planner_core.models.sandbox.memory_limit import limit_memory

    limit_memory()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)

    def tell(**row: Any) -> None:
        os.write(write, (json.dumps(row) + "\n").encode())

    with contextlib.suppress(BaseException):
        try:
            work(tell)
        except MemoryError:
            tell(outcome="stopped", reason="more than 2 GB of memory")
    os._exit(0)
