"""Run the user's Python or exported program in a process of its own. Only a graph or one sentence comes back.

`capture_in_process` starts `child.py` as a program, with a limit of time and a limit of memory. The graph comes back as JSON over a pipe.
The output of the user's code is dropped. Every process that it starts is killed too: a mark in its environment identifies it, even
in another session.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from planner_core.core import (
    CaptureError,
    Graph,
    InputError,
    Sentence,
    graph_from_json,
    is_file,
)

LIMIT_S = 120
"""Seconds to import torch, run the user's code and capture."""
MAX_REPLY_BYTES = 1 << 29
MARK = "SHARDSCOPE_CAPTURE"
"""Environment variable of a capture and of all processes that it starts."""


def capture_in_process(
    source: str, *, batch: int | None, seq: int | None, flat: bool, limit_s: float | None = None
) -> Graph:
    """Capture the graph of `path.py:callable` or of a .pt2 file in a process of its own.

    Raises InputError or CaptureError with the child's sentence, or with how it ended.
    """
    exported = source.endswith(".pt2")
    path = source if exported else source.rpartition(":")[0]
    if not is_file(path):
        raise InputError(f"{path} is not a file; give path/to/file.py:callable, or a file of torch.export.save")
    limit = LIMIT_S if limit_s is None else limit_s
    read, write = os.pipe()
    root = str(Path(__file__).resolve().parents[3])
    search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [
        sys.executable,
        "-m",
        "planner_core.models.sandbox.child",
        str(write),
        source,
        str(batch or 0),
        str(seq or 0),
        str(int(flat)),
    ]
    mark = secrets.token_hex(16)
    child = subprocess.Popen(
        command,
        pass_fds=(write,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # In a group of its own, so that one signal ends the child and what it started.
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1", MARK: mark},
    )
    # Only the child holds the pipe's other end now, so that reading ends when it does.
    os.close(write)
    try:
        reply = _read_reply(read, limit)
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the child, and what it started
        status = child.wait()
        _kill_marked(mark)
    if reply is None:
        remedy = "export fewer layers" if exported else "let the callable build the model on meta and return it"
        raise CaptureError(f"{source} took longer than {limit:g} s; {remedy}")
    return _parse_reply(source, reply, status)


def _kill_marked(mark: str) -> None:
    """Kill processes that left the child's group but have its mark. Without /proc none can be found."""
    wanted = f"{MARK}={mark}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _read_reply(read: int, limit_s: float) -> bytes | None:
    """Read until the pipe closes; None if it does not close in time."""
    end = time.monotonic() + limit_s
    reply = bytearray()
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(read, 1 << 20)
        if not chunk or len(reply) > MAX_REPLY_BYTES:
            return bytes(reply)
        reply += chunk
        if reply.endswith(b"\n"):
            return bytes(reply)


def _parse_reply(source: str, reply: bytes, status: int) -> Graph:
    try:
        data: dict[str, Any] = json.loads(reply)
    except ValueError:
        how = f"signal {-status}" if status < 0 and status != -signal.SIGKILL else f"status {max(status, 0)}"
        raise CaptureError(
            f"{source} ended the process ({how}) before it returned a model; remove the exit from it"
        ) from None
    if "error" in data:
        raise (InputError if data.get("kind") == "InputError" else CaptureError)(Sentence.from_json(data["error"]))
    return graph_from_json(data["graph"])
